"""Matchers: masks of drafts that leave no trace, forced tokens, ends; and how grammars are compiled and kept."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import quire
from quire.errors import InvalidRequestError, RequestFailedError
from quire.structured import manager as module
from quire.structured.manager import GrammarManager
from quire.structured.matcher import Grammar, MaskBuffer, Matcher
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars import meter
from quire.text.grammars.compiler import Vocabulary
from quire.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(quire.__file__).parent / "demo"
EOS = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarManager:
    return GrammarManager(Vocabulary(tokenizer.grammar_table, 4096, (EOS,)))


def wait(grammars: GrammarManager, num: int = 1) -> list[Any]:
    found: list[Any] = []
    end = time.monotonic() + 300  # a large vocabulary takes 10 s, on a machine that has nothing else to do
    while len(found) < num and time.monotonic() < end:
        found += grammars.take(0.1)
    return found


def compiled(grammars: GrammarManager, **fields: Any) -> Grammar:
    params = StructuredOutputsParams(**fields)
    key = grammars.key(params)
    grammars.compile(key, params)
    ((found, grammar),) = wait(grammars)
    assert found == key
    assert isinstance(grammar, Grammar), grammar
    return grammar


def allowed(mask: Iterable[int]) -> set[int]:
    bits = np.unpackbits(np.array(mask, np.uint32).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def masks_of(matcher: Matcher, drafts: list[int]) -> list[set[int]]:
    masks = MaskBuffer(128, 1 + len(drafts))
    masks.array[:] = 5
    matcher.fill(masks, drafts)
    return [allowed(mask) for mask in masks.array]


def test_masks_of_drafts_are_those_of_tokens_and_leave_no_trace(grammars: GrammarManager, tokenizer: Tokenizer) -> None:
    grammar = compiled(grammars, regex="(cat|dog) [0-9]{2}")
    ids = tokenizer.encode("dog 42", add_special_tokens=False)
    one_by_one = []
    for num in range(len(ids) + 1):
        one_by_one += masks_of(grammar.matcher(ids[:num], goes_on=False), [])
    matcher = grammar.matcher([], goes_on=False)
    for _ in range(2):
        assert masks_of(matcher, ids) == one_by_one
    assert one_by_one[-1] == {EOS}
    assert matcher.num_allowed([*ids, ids[0]]) == len(ids)
    wrong = tokenizer.encode("house", add_special_tokens=False)
    assert masks_of(matcher, [ids[0], wrong[0], ids[1]])[1:] == [one_by_one[1], set(), set()]
    fork = matcher.copy()
    fork.take(ids)
    assert masks_of(matcher, []) == one_by_one[:1]
    assert masks_of(fork, []) == [{EOS}]


def test_a_sequence_that_goes_on_ends_where_nothing_else_is_left(
    grammars: GrammarManager, tokenizer: Tokenizer
) -> None:
    grammar = compiled(grammars, regex="a{2,3}")
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    for goes_on in (False, True):
        (mask,) = masks_of(grammar.matcher([a, a], goes_on), [])
        assert (EOS in mask) != goes_on
        assert a in mask
        assert masks_of(grammar.matcher([a, a, a], goes_on), []) == [{EOS}]


@pytest.mark.parametrize(("size", "num_read"), [(4096, 0), (40_000, 1)])
def test_a_large_vocabulary_is_read_before_anybody_streams(tokenizer: Tokenizer, size: int, num_read: int) -> None:
    load = Mock(wraps=tokenizer.grammar_table)
    grammars = GrammarManager(Vocabulary(load, size, (EOS,)))
    grammars.compiler.prepare()
    assert load.call_count == num_read
    compiled(grammars, choice=["a"])
    assert load.call_count == 1
    broken = GrammarManager(Vocabulary(Mock(side_effect=RequestFailedError("no tokenizer")), size, (EOS,)))
    broken.compiler.prepare()
    broken.compile(b"key", StructuredOutputsParams(choice=["a"]))
    assert wait(broken)[0][1] == "no tokenizer"


def test_a_tokenizer_may_have_tokens_that_no_logit_has(tokenizer: Tokenizer) -> None:
    """As Gemma 3's of 1B, whose last one stands for an image."""
    text, special = tokenizer.grammar_table()
    parts = json.loads(text)
    parts["added_tokens"].append({**parts["added_tokens"][0], "id": 4096, "content": "<image>"})
    table = json.dumps(parts), {**special, "<image>": 4096}
    grammar = compiled(GrammarManager(Vocabulary(lambda: table, 4096, (EOS,))), choice=["a", "b"])
    (mask,) = masks_of(grammar.matcher([], goes_on=False), [])
    assert mask == {*tokenizer.encode("a", False), *tokenizer.encode("b", False)}


def test_forced_tokens(grammars: GrammarManager, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"length": {"type": "boolean"}}, "required": ["length"],
              "additionalProperties": False}  # fmt: skip
    matcher = compiled(grammars, json=schema, disable_any_whitespace=True).matcher([], goes_on=False)
    forced = matcher.forced()
    assert tokenizer.decode(forced).startswith('{"')
    matcher.take(forced)
    assert not matcher.error


def test_grammars_are_kept_by_content_and_the_oldest_go(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    grammars = GrammarManager(Vocabulary(tokenizer.grammar_table, 4096, (EOS,)))
    keys = []
    for choice in ("a", "b", "c"):
        params = StructuredOutputsParams(choice=[choice])
        keys.append(grammars.key(params))
        for _ in range(3):  # asked for by several at once, compiled once
            grammars.compile(keys[-1], params)
    assert len(wait(grammars, 3)) == 3
    assert [grammars.get(key) is not None for key in keys] == [False, True, True]
    assert grammars.take() == []


def test_what_took_long_to_compile_weighs_more_than_its_source(tokenizer: Tokenizer) -> None:
    """Bounded is the processor time of all that are kept, as what they hold goes by that: a divisor's states."""
    grammars, choice = GrammarManager(Vocabulary(tokenizer.grammar_table, 4096, (EOS,))), [b"a", b"b", b"c"]
    for key in choice:
        grammars._put(key, object(), 0.001)
    grammars._put(b"refused", InvalidRequestError("why"), 9.0)  # of which nothing is held
    assert len(wait(grammars, 4)) == 4
    most = module.MAX_KEPT_BYTES / module.BYTES_PER_SECOND
    for number in range(1, 9):
        grammars._put(b"divisor %d" % number, object(), 0.3 * most)
        assert len(wait(grammars)) == 1
    assert [number for number in range(1, 9) if grammars.get(b"divisor %d" % number)] == [6, 7, 8]
    assert not any(map(grammars.get, choice))
    grammars._put(b"heavy", object(), 2 * most)  # by itself
    assert len(wait(grammars)) == 1
    assert [*grammars._kept] == [b"heavy"]


def test_a_grammar_that_can_not_be_compiled_says_why(grammars: GrammarManager) -> None:
    params = StructuredOutputsParams(grammar='start: "a"\n  b c')
    grammars.compile(b"key", params)
    ((key, error),) = wait(grammars)
    assert key == b"key"
    assert str(error).startswith("line 2, column ")
    assert grammars.get(b"key") is None


def test_a_refusal_is_kept_as_long_as_a_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    grammars = GrammarManager(Vocabulary(tokenizer.grammar_table, 4096, (EOS,)))
    tried: list[StructuredOutputsParams] = []
    compile = grammars.compiler.compile
    monkeypatch.setattr(
        grammars.compiler, "compile", lambda params, pace: tried.append(params) or compile(params, pace)
    )
    bad = StructuredOutputsParams(json={"not": {}})
    refusals: list[Any] = []
    for _ in range(3):
        grammars.compile(b"bad", bad)
        refusals += wait(grammars)
    assert refusals == [refusals[0]] * 3
    assert len(tried) == 1
    assert grammars.get(b"bad") is None
    for choice in ("a", "b"):
        compiled(grammars, choice=[choice])
    grammars.compile(b"bad", bad)
    assert wait(grammars) == refusals[:1]
    assert tried.count(bad) == 2


def test_what_may_go_better_the_next_time_is_tried_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarManager(Vocabulary(tokenizer.grammar_table, 4096, (EOS,)))
    for error in (OSError("no memory"), RequestFailedError("no process")):
        with monkeypatch.context() as patch:
            patch.setattr(grammars.compiler, "compile", Mock(side_effect=error))
            grammars.compile(grammars.key(StructuredOutputsParams(choice=["a"])), StructuredOutputsParams(choice=["a"]))
            assert isinstance(wait(grammars)[0][1], str)
    compiled(grammars, choice=["a"])


def test_a_request_that_took_its_time_may_draw_nothing_more(
    grammars: GrammarManager, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its sequences together; others of the same grammar have their own time."""
    monkeypatch.setattr(meter, "_SECONDS", 0.1)
    grammar = compiled(grammars, regex="[ab]*")
    request, other = grammar.opened(), grammar.opened()
    first, second = request.matcher([], goes_on=False), request.matcher([], goes_on=False)
    request._meter.add(5.0)  # somebody else may have had the processor
    assert masks_of(first, [])[0]
    request._meter.add(0.2)
    for matcher in (first, second, first.copy()):
        assert masks_of(matcher, []) == [set()]
        assert "more than half a second" in str(matcher.error)
    assert masks_of(other.matcher([], goes_on=False), [])[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-2", "llama-3", "mistral-v3", "qwen3"])
def test_every_kind_of_tokenizer(shared_data: Path, name: str) -> None:
    """What the masks let through is the text that was asked for, with the model's own tokens."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / name)
    end = tokenizer.eos_token_id or 0
    size = len(tokenizer) + 128  # padded, as models' tables are
    grammars = GrammarManager(Vocabulary(tokenizer.grammar_table, size, (end,)))
    schema = {
        "type": "object",
        "properties": {"n\u00e9e": {"enum": ["\u4e2d\u6587 x", "two"]}},
        "required": ["n\u00e9e"],
    }
    grammar = compiled(grammars, json=schema, disable_any_whitespace=True, disable_additional_properties=True)
    matcher, ids = grammar.matcher([], goes_on=False), list[int]()
    rng = np.random.default_rng(3)
    while True:
        masks = MaskBuffer(grammars.num_words, 1)
        matcher.fill(masks, [])
        choices = sorted(allowed(masks.array[0]))
        assert choices[-1] < len(tokenizer)
        token = int(rng.choice(choices))
        if token == end:
            break
        ids.append(token)
        matcher.take([token])
    assert tokenizer.decode(ids) in ('{"n\u00e9e":"\u4e2d\u6587 x"}', '{"n\u00e9e":"two"}')


def test_what_became_too_complex_says_which_limit_was_met() -> None:
    said = "Parser Error: Current row has 2001 items; max is 2000; consider another\n<non-verbose/>"
    engine = Mock(is_error=Mock(return_value=True), get_error=Mock(return_value=said))
    assert Matcher(engine, (EOS,), False, meter.Meter()).error == (
        "the grammar became too complex to follow: Current row has 2001 items; max is 2000; consider another. Use a "
        "simpler one."
    )


def test_tokens_that_are_owed_are_as_good_as_taken(grammars: GrammarManager, tokenizer: Tokenizer) -> None:
    grammar = compiled(grammars, regex="(red|green) shoes")
    took, owed = grammar.matcher([], False), grammar.matcher([], False)
    for token_id in tokenizer.encode("green", add_special_tokens=False):
        took.take([token_id])
        assert owed.owe(token_id) == []
    assert took.forced() == owed.forced() != []
    fork = owed.copy()
    assert masks_of(fork, []) == masks_of(took, [])


def test_what_was_seen_ahead_is_forced_after_its_first_token(grammars: GrammarManager) -> None:
    grammar = compiled(grammars, choice=["once upon a time"])
    matcher = grammar.matcher([], False)
    matcher.ahead = matcher.forced()
    first, *rest = matcher.ahead
    assert rest
    assert matcher.owe(first) == rest == matcher.forced()
    assert matcher.ahead == []


def test_rows_that_allow_one_token_alone() -> None:
    masks = MaskBuffer(3, 8)
    masks.array[:6] = [[0, 0, 0], [0, 4, 0], [0, 0x80000000, 0], [4, 4, 0], [0, 5, 0], [1, 0, 0]]
    masks.array[6] = [1, 0, 0]  # of an earlier step
    assert masks.single_rows(6) == [1, 2, 5]
    assert masks.single_rows(0) == []
