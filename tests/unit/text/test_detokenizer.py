"""IncrementalDetokenizer: increments add up to the whole, stop strings are found, and grouping changes nothing."""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
NAMES = ["byte_bpe", "gpt2_files", "sp_bpe", "unigram"]
quick = settings(max_examples=40, deadline=None, derandomize=True)


@cache
def tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(FIXTURES / name)


def token_ids(name: str, max_size: int = 30) -> st.SearchStrategy[list[int]]:
    """Any ids, valid text or not, specials and a few ids beyond the vocabulary among them."""
    size = len(tokenizer(name))
    text = st.text("ab ,.'nz\n\té日😀\u200d\ufffd<s>", max_size=20).map(lambda t: tokenizer(name).encode(t, False))
    any_id = st.lists(st.integers(0, size + 3), max_size=max_size)
    low = st.lists(st.integers(0, 260), max_size=max_size)  # mostly single bytes
    return st.lists(st.one_of(text, any_id, low), max_size=3).map(lambda parts: [i for part in parts for i in part])


def groups(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    places = sorted({min(c, len(ids)) for c in cuts} | {0, len(ids)})
    return [list(ids[a:b]) for a, b in zip(places, places[1:], strict=False)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_increments_add_up_to_decode(name: str, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(token_ids(name))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=8))
    detokenizer = detokenizer_of(tokenizer(name), [], skip_special_tokens=skip)
    pieces = []
    for group in groups(ids, cuts):
        assert detokenizer.update(group) is None
        pieces.append(detokenizer.get_next_output_text(False, True))
    pieces.append(detokenizer.get_next_output_text(True, True))
    expected = tokenizer(name).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == expected
    assert detokenizer.output_text == expected
    assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_output_continues_prompt(name: str, data: st.DataObject) -> None:
    """After a prompt that ends in a whole character, the output is what it adds to the prompt's text."""
    used = tokenizer(name)
    prompt = used.encode(data.draw(st.text("ab é日😀<\n", max_size=12)), data.draw(st.booleans()))
    output = used.encode(data.draw(st.text("ab é日😀.\n", max_size=12)), False)
    skip = data.draw(st.booleans())
    detokenizer = detokenizer_of(used, prompt, skip_special_tokens=skip)
    detokenizer.update(output)
    whole = used.decode(prompt + output, skip_special_tokens=skip)
    before = used.decode(prompt, skip_special_tokens=skip)
    if whole.startswith(before):  # cleaned-up spaces may change the prompt's own end
        assert detokenizer.get_next_output_text(True, True) == whole[len(before) :]


def test_leading_space_after_a_prompt() -> None:
    """Llama's decoder drops the first space of a text, but not of what follows a prompt."""
    used = tokenizer("sp_bpe")
    prompt, output = used.encode("The water"), used.encode("is warm", add_special_tokens=False)
    detokenizer = detokenizer_of(used, prompt)
    detokenizer.update(output)
    assert detokenizer.get_next_output_text(True, True) == " is warm"
    alone = detokenizer_of(used, [1])  # nothing is left of <s> in the text
    alone.update(output)
    assert alone.get_next_output_text(True, True) == "is warm"
    shown = detokenizer_of(used, [1], skip_special_tokens=False)
    shown.update(output)
    assert shown.get_next_output_text(True, True) == " is warm"


@pytest.mark.parametrize("name", ["byte_bpe", "sp_bpe"])
def test_character_cut_between_prompt_and_output(name: str) -> None:
    """The output has the whole character that it completes, and no U+FFFD of the prompt's."""
    used = tokenizer(name)
    ids = used.encode("a😀b", add_special_tokens=False)
    assert len(ids) >= 6, "the emoji is four byte tokens"
    for cut in (2, 3, 4) if name == "sp_bpe" else (2, 3):
        detokenizer = detokenizer_of(used, ids[:cut])
        assert used.decode(ids[:cut]).endswith("\ufffd")
        detokenizer.update(ids[cut:])
        assert detokenizer.get_next_output_text(True, True) == "😀b"
        broken = detokenizer_of(used, ids[:cut])
        broken.update(used.encode("b", add_special_tokens=False)[-1:])
        assert broken.get_next_output_text(True, True).lstrip() == "b"


@pytest.mark.parametrize("name", ["byte_bpe", "sp_bpe"])
def test_incomplete_character(name: str) -> None:
    """Held back while it may be completed; U+FFFD when generation ends."""
    used = tokenizer(name)
    ids = used.encode("x😀", add_special_tokens=False)
    detokenizer = detokenizer_of(used, [])
    seen = ""
    for token_id in ids[:-1]:
        detokenizer.update([token_id])
        seen += detokenizer.get_next_output_text(False, True)
    assert seen == "x"
    assert seen + detokenizer.get_next_output_text(True, True) == used.decode(ids[:-1], skip_special_tokens=True)


def test_special_tokens_are_shown_on_demand() -> None:
    used = tokenizer("byte_bpe")
    ids = [*used.encode("a", False), *used.encode("<|im_end|><think>", False)]
    for skip, text in ((True, "a<think>"), (False, "a<|im_end|><think>")):
        detokenizer = detokenizer_of(used, [], skip_special_tokens=skip)
        detokenizer.update(ids)
        assert detokenizer.get_next_output_text(True, True) == text


def detokenizer_of(used: Tokenizer, prompt: Sequence[int], **options: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(used, prompt, SamplingParams(**options))


def run(
    name: str, ids: Sequence[int], parts: list[list[int]], stop: list[str], include: bool, min_tokens: int
) -> tuple[str | None, int, str]:
    """(stop found, tokens used, text) of a streamed run; checks that what was streamed is never taken back."""
    detokenizer = detokenizer_of(
        tokenizer(name), [], stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    seen, found = "", None
    for part in parts:
        found = detokenizer.update(part)
        if found is not None:
            break
        seen += detokenizer.get_next_output_text(False, True)
        assert detokenizer.output_text.startswith(seen)
        assert seen.startswith(detokenizer.get_next_output_text(False, False)[: len(seen)])
    seen += detokenizer.get_next_output_text(True, True)
    assert detokenizer.output_text == detokenizer.get_next_output_text(True, False) == seen
    return found, detokenizer.num_tokens, seen


def oracle(
    name: str, ids: Sequence[int], stop: list[str], include: bool, min_tokens: int
) -> tuple[str | None, int, str]:
    """The same, by decoding everything after each token; for stop strings without U+FFFD."""
    floor = 0
    for used in range(1, len(ids) + 1):
        text = tokenizer(name).decode(ids[:used], skip_special_tokens=True).rstrip("\ufffd")  # perhaps incomplete
        if used <= min_tokens:
            floor = max(floor, len(text))
            continue
        places = [
            (place, order, s)
            for order, s in enumerate(stop)
            if (place := text.find(s, max(0, floor - len(s) + 1))) >= 0
        ]
        if places:
            place, _, found = min(places)
            return found, used, text[: place + (len(found) if include else 0)]
    return None, len(ids), tokenizer(name).decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_strings_equal_the_oracle(name: str, data: st.DataObject) -> None:
    """Text in which a stop string ends with a token; every grouping gives the oracle's answer."""
    text = st.text("ab n\n日😀", min_size=1, max_size=25)
    encoded = text.map(lambda t: tokenizer(name).encode(t, add_special_tokens=False))
    ids = data.draw(st.one_of(encoded, token_ids(name)))
    whole = tokenizer(name).decode(ids, skip_special_tokens=True).replace("\ufffd", "") + "ab"
    part = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 5)).map(lambda p: whole[p[0] : p[0] + p[1]])
    stop = data.draw(st.lists(st.one_of(part, st.text("ab n", min_size=1, max_size=3)), min_size=1, max_size=3))
    include, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 6))
    expected = oracle(name, ids, stop, include, min_tokens)
    for cuts in (range(len(ids)), [], data.draw(st.lists(st.integers(0, 30), max_size=5))):
        assert run(name, ids, groups(ids, list(cuts)), stop, include, min_tokens) == expected


def update_all(
    stop: list[str], text: str, name: str = "byte_bpe", **options: bool | int
) -> tuple[str | None, str, int]:
    ids = tokenizer(name).encode(text, add_special_tokens=False)
    detokenizer = detokenizer_of(tokenizer(name), [], stop=stop, **options)
    found = detokenizer.update(ids)
    return found, detokenizer.get_next_output_text(True, True), len(ids) - detokenizer.num_tokens


def test_stop_string_over_several_tokens() -> None:
    found, text, left = update_all(["river is w"], "The river is wide here")
    assert (found, text) == ("river is w", "The ")
    assert left > 0


def test_stop_string_within_a_token() -> None:
    ids = tokenizer("byte_bpe").encode(" the", add_special_tokens=False)
    assert len(ids) == 1
    assert update_all(["h"], " the water") == ("h", " t", len(tokenizer("byte_bpe").encode(" water", False)))
    assert update_all(["h"], " the water", include_stop_str_in_output=True)[:2] == ("h", " th")


def test_earliest_stop_string_wins_then_the_first_listed() -> None:
    assert update_all(["e", "h"], " the")[:2] == ("h", " t")
    assert update_all(["the", "th"], " the")[:2] == ("the", " ")
    assert update_all(["th", "the"], " the")[:2] == ("th", " ")


def test_stop_string_counts_after_min_tokens() -> None:
    """A stop string within the first tokens is passed over, one that ends later is not."""
    assert update_all(["a"], "a b a c", min_tokens=1)[:2] == ("a", "a b ")
    assert update_all(["a"], "a b a c", min_tokens=3)[0] is None
    assert update_all(["a b"], "a b c", min_tokens=1)[:2] == ("a b", "")
    assert update_all(["a", "long one"], "a b c", min_tokens=1)[0] is None


def test_newline_of_byte_fallback_stops_at_its_own_token() -> None:
    """<0x0A> could still become U+FFFD, so it is not streamed yet, but a stop string sees it."""
    used = tokenizer("sp_bpe")
    ids = used.encode("a\nb", add_special_tokens=False)
    newline = used.convert_tokens_to_ids("<0x0A>")
    place = ids.index(newline)
    detokenizer = detokenizer_of(used, [], stop=["\n"])
    assert (detokenizer.update(ids), detokenizer.num_tokens) == ("\n", place + 1)
    assert detokenizer.get_next_output_text(True, True) == "a"
    free = detokenizer_of(used, [])
    free.update(ids[: place + 1])
    assert free.get_next_output_text(False, True) == "a"
    assert free.get_next_output_text(True, True) == "\n"


def test_nothing_follows_a_stop_string() -> None:
    """Not even the U+FFFD of a character that the same token begins."""
    used = tokenizer("byte_bpe")
    ends = [
        i
        for i in range(256, len(used))
        if used.decode([i], True).endswith("\ufffd") and used.decode([i], True)[0] != "\ufffd"
    ]
    assert ends, "a token of a whole character and a part of another"
    whole = used.decode(ends[:1], True)
    detokenizer = detokenizer_of(used, [], stop=[whole[0]], include_stop_str_in_output=True)
    assert detokenizer.update(ends[:1]) == whole[0]
    assert detokenizer.get_next_output_text(True, True) == whole[0]


def test_only_a_possible_stop_string_is_held_back() -> None:
    used = tokenizer("byte_bpe")
    detokenizer = detokenizer_of(used, [], stop=["END OF ALL", "x\n"])
    for text, shown in (("the ", "the "), ("EN", ""), ("D", ""), (" x", "END "), ("y", "xy")):
        detokenizer.update(used.encode(text, add_special_tokens=False))
        assert detokenizer.get_next_output_text(False, True) == shown


@settings(max_examples=200, deadline=None, derandomize=True)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), text=st.text("ab", max_size=30))
def test_what_is_held_back_begins_a_stop_string(stops: list[str], text: str) -> None:
    """The longest end of the text that does; stop strings do not count here, as min_tokens has not come."""
    used = tokenizer("byte_bpe")
    detokenizer, ids = detokenizer_of(used, [], stop=stops, min_tokens=99, max_tokens=100), used.encode(text, False)
    shown = ""
    for token_id in ids:
        detokenizer.update([token_id])
        shown += detokenizer.get_next_output_text(False, True)
        so_far = detokenizer.output_text
        begins = (k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert shown == so_far[: len(so_far) - max(begins)]


def test_many_long_stop_strings_that_are_begun_again_and_again_cost_little() -> None:
    """Else a client's 64 of them, with n = 128, would hold up all others at each token."""
    used = tokenizer("byte_bpe")
    (token_id,) = used.encode("th", add_special_tokens=False)[:1]
    stops = [f"{used.decode([token_id], True)[0]}{'x' * 990}{number}" for number in range(64)]
    detokenizer = detokenizer_of(used, [], stop=stops)
    start = time.process_time()
    for _ in range(2000):
        detokenizer.update([token_id])
        detokenizer.get_next_output_text(False, True)
    assert time.process_time() - start < 3.0, "each took some milliseconds"


def test_end_token_is_left_out_of_the_text() -> None:
    used = tokenizer("byte_bpe")
    ids = used.encode("a b", add_special_tokens=False)
    for include, text in ((False, "a"), (True, "a b")):
        detokenizer = detokenizer_of(used, [], include_stop_str_in_output=include)
        assert detokenizer.update(ids, True) is None
        assert detokenizer.get_next_output_text(True, True) == text
        assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("byte_bpe", " the river"), ("byte_bpe", "\x80"), ("sp_bpe", "😀"), ("sp_bpe", "bad"), ("unigram", " . a")],
)
def test_cost_per_token_does_not_grow(name: str, pattern: str) -> None:
    """Endless text, endless broken bytes, an endless run of byte tokens: never a look back at all of it."""
    used = tokenizer(name)
    ids = [i for i in used.encode(pattern, add_special_tokens=False) if used.convert_ids_to_tokens(i) != "▁"]
    if pattern == "\x80":
        ids = [used.convert_tokens_to_ids("Ģ") or 0]  # the byte 0x80
    if pattern == "bad":
        ids = [used.convert_tokens_to_ids("<0x80>") or 0]
    ids = (ids * 20_000)[:20_000]
    times = []
    for count in (4_000, 20_000):
        detokenizer = detokenizer_of(used, [], stop=["never", "\n\n"])
        start = time.process_time()
        for token_id in ids[:count]:
            detokenizer.update([token_id])
            detokenizer.get_next_output_text(False, True)
        times.append((time.process_time() - start) / count)
        detokenizer.get_next_output_text(True, True)
        assert detokenizer.output_text == used.decode(ids[:count], True)
    print(times)
    assert times[1] < 3 * times[0] + 5e-6, "seconds per token"
