"""Grammars that take long: they hold up nobody who does not, and end with the interpreter."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.structured.manager import GrammarManager
from quire.structured.matcher import Grammar
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars import compiler
from quire.text.grammars.compiler import Vocabulary
from quire.text.grammars.trial import Trial
from quire.text.tokenizer import load_tokenizer

DEMO = Path(quire.__file__).parent / "demo"
BOMB = {"allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(40)]}
LARGE = {"properties": {f"field_{i}": {"type": "string"} for i in range(8000)}}  # no patterns, and seconds all the same
PATTERN = {"type": "string", "pattern": "^[a-z]{3}-[0-9]{4}$"}


@pytest.fixture
def grammars() -> GrammarManager:
    return GrammarManager(Vocabulary(load_tokenizer(DEMO).grammar_table, 4096, (0,)))


def take(grammars: GrammarManager, num: int) -> list[tuple[bytes, Any]]:
    found: list[tuple[bytes, Any]] = []
    end = time.monotonic() + 120
    while len(found) < num and time.monotonic() < end:
        found += grammars.take(0.1)
    return found


@pytest.mark.slow
def test_nobody_waits_for_a_bomb(grammars: GrammarManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones take all that each lane gives them, and in the last one longer than the others together."""
    passes, others_are_there = Trial.passes, threading.Event()

    def tried(trial: Trial, source: str, seconds: float) -> bool:
        if len(source) < 500:
            return passes(trial, source, 60 * seconds)
        assert seconds < compiler._SECONDS[-1] or others_are_there.wait(60)
        return False

    monkeypatch.setattr(Trial, "passes", tried)
    for key, schema in (("bomb", BOMB), ("large", LARGE), ("small", {"type": "integer"}), ("pattern", PATTERN)):
        grammars.compile(key.encode(), StructuredOutputsParams(json=schema))
    found = dict(take(grammars, 2))
    assert [*found] == [b"small", b"pattern"]
    assert all(isinstance(grammar, Grammar) for grammar in found.values())
    others_are_there.set()
    for key, reason in take(grammars, 2):
        assert key in (b"bomb", b"large")
        assert "takes more than 4 s" in reason


@pytest.mark.parametrize("bomb", [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_still_compiles_does_not_outlive_the_interpreter(bomb: bool) -> None:
    """llguidance, in a daemon thread, ends the process by a fault."""
    code = f"""
import time
from quire.structured_outputs import StructuredOutputsParams
from quire.structured.manager import GrammarManager
from quire.text.grammars.compiler import Vocabulary
from quire.text.tokenizer import load_tokenizer
class Slow:
    def __del__(self):
        time.sleep(0.5)  # while the interpreter ends
slow = Slow()
grammars = GrammarManager(Vocabulary(load_tokenizer({str(DEMO)!r}).grammar_table, 4096, (0,)))
grammars.compile(b"bomb", StructuredOutputsParams(json={BOMB})) if {bomb} else None
for i in range(60):
    fields = {{f"field_{{n}}": {{"type": "string"}} for n in range(500)}}
    grammars.compile(b"%d" % i, StructuredOutputsParams(json={{"title": str(i), "properties": fields}}))
assert len(grammars.take(10)) < 60
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
