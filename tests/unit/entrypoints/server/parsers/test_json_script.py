"""What passes is JSON and nothing else, however it is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.server.parsers.base import Offer
from quire.entrypoints.server.parsers.json_script import MAX_DEPTH, json_text
from quire.entrypoints.server.parsers.reader import Reader, WrongCallError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def scan(*pieces: str) -> tuple[str, int]:
    """What it lets pass, and how many characters it took."""
    read, passed, num_fed, end = Reader(Offer(), str), list[str](), 0, "..."
    script = json_text(read, passed.append)
    for piece in pieces:
        read.feed(piece)
        num_fed += len(piece)
        try:
            next(script)
        except (StopIteration, WrongCallError) as error:
            end = "!" if isinstance(error, WrongCallError) else ""
            break
    return "".join(passed) + end, num_fed - len(read._text[read._at :])


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans(), st.lists(st.integers(0, 400), max_size=4))
def test_json_passes_as_it_is_and_no_further(value: Any, indent: int | None, escapes: bool, cuts: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escapes)
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert scan(*pieces, "\n} and so on") in ((text, len(text)), (text + "\n", len(text) + 1))
    assert json.loads(scan(*pieces, " ")[0]) == value


@given(st.text(alphabet='{}[]":,\\u0aeE+-.1 tfnrlsu\n'))
def test_what_is_refused_is_no_json(text: str) -> None:
    passed, taken = scan(text, " ")
    try:
        json.loads(text, strict=False, parse_constant=lambda name: pytest.fail(name))
    except (ValueError, pytest.fail.Exception):
        assert passed.endswith(("!", "...")) or taken < len(text)
    else:
        assert not passed.endswith(("!", "..."))


@given(st.text(alphabet='{}[]":,\\u0aeE+-.1 tfnrlsu\n'), st.integers(0, 100))
def test_where_it_is_cut_changes_nothing(text: str, cut: int) -> None:
    assert scan(text[:cut], text[cut:]) == scan(text)


@pytest.mark.parametrize(
    "text",
    ["01 ", "1. ", ".5", "+1", "[1,]", "{,}", '{"a"}', "[1 2]", "nul ", "tru}", '"\\x"', "'a'", "NaN", "-Infinity"],
)
def test_no_json(text: str) -> None:
    assert scan(text)[0].endswith("!")


def test_line_breaks_in_strings_become_escapes() -> None:
    assert scan('{"a\n": "', "\t\x01", '"}') == ('{"a\\n": "\\t\\u0001"}', 12)


def test_depth_is_bounded() -> None:
    assert scan("[" * MAX_DEPTH)[0].endswith("...")
    assert scan("[" * (MAX_DEPTH + 1))[0].endswith("!")
