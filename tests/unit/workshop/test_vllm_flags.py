"""Every flag of vLLM's `serve` has an answer, and the page of them is up to date."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.main import build_parser
from quire.entrypoints.not_yet import answers
from quire.entrypoints.server.options import ServerArgs
from quire.errors import NotYetSupportedError

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("vllm_flags", ROOT / "tools" / "vllm_flags.py")
assert _spec is not None
assert _spec.loader is not None
vllm_flags = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(vllm_flags)

VERSION, FLAGS = vllm_flags.vllm_flags()
NAMES = [name for names in FLAGS for name in names]
_serve_parser, _parser = cache(vllm_flags.serve_parser), cache(build_parser)


def test_the_list_is_whole() -> None:
    assert VERSION == "0.33.0"
    assert len(FLAGS) == len({names[0] for names in FLAGS}) == 320
    assert {"--config", "--middleware", "--api-server-count", "-tp", "-q", "-O"} - {*NAMES} == {"-O"}, "-O is a prefix"


def test_the_page_is_up_to_date() -> None:
    text = vllm_flags.document()
    assert vllm_flags.DOCUMENT.read_text(encoding="utf-8") == text, "run tools/vllm_flags.py"
    assert all(f"`{name}`" in text for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_has_an_answer(name: str) -> None:
    """Parsed, taken without effect, or refused by a sentence; never unknown."""
    parser = _serve_parser()
    key = name[2:].replace("-", "_") if name.startswith("--") else name
    if name in parser._option_string_actions or name in vllm_flags._REWRITTEN:
        assert key not in answers() or key in ServerArgs.__dataclass_fields__, "what is there is not called missing"
        return
    line = ["serve", name, "nothing-that-anyone-takes"]
    if answers()[key][0] in ("so", "-", "*", "+"):
        assert name not in _parser().parse_known_args(line)[1]
        return
    with pytest.raises(NotYetSupportedError, match=f"^{name} (is|has) "):
        _parser().parse_known_args(line)


def test_answers_say_why_and_what_to_do_instead() -> None:
    for name, (taken, told) in answers().items():
        assert re.match(r"(has|is) .*\.$", told), name
        assert ": " in told or taken == "so", f"{name}: no reason"
        assert taken in ("", "so", "no", "-", "*", "+") or all(value for value in taken.split("|")), name


def test_answers_are_of_names_that_are_not_there() -> None:
    assert EngineArgs.__dataclass_fields__.keys() & answers().keys() == set()
    of_servers = [answers()[name] for name in ServerArgs.__dataclass_fields__.keys() & answers().keys()]
    assert all(taken in ("-", "*") and told.startswith("has no effect here: ") for taken, told in of_servers)
    known = {name.lstrip("-").replace("-", "_") for name in NAMES if name.startswith("--")}
    older = {name for name in answers() if not name.startswith("-")} - known
    assert len(older) < 95, "names that vLLM has no more, or that its benchmarks have"
