"""Text streams of decoders that no fixture has, and UTF-8 at its worst."""

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from quire.text import streams
from quire.text.backend import FastBackend
from quire.text.streams import _BYTE_OF, StreamFactory, clean_up_spaces

quick = settings(max_examples=60, deadline=None, derandomize=True)
WORDS = [
    "a",
    "##b",
    "b",
    "c",
    ".",
    ",",
    "'",
    "▁a",
    "▁",
    "▁▁b",
    "<0x0A>",
    "<0xC3>",
    "<0xA9>",
    "<0xFF>",
    "x</w>",
    "n't",
    "▁n",
    "t",
]
DECODERS = {
    "none": None,
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "replace_only": decoders.Sequence([decoders.Replace("▁", " ")]),
    "metaspace_in_sequence": decoders.Sequence([decoders.Metaspace()]),
}


def backend(decoder: decoders.Decoder | None) -> FastBackend:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    fast = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    if decoder is not None:
        fast.decoder = decoder
    fast.add_special_tokens(["<s>", "</s>"])
    fast.add_tokens([AddedToken("<plain>")])
    return FastBackend(fast)


def stream_text(factory: StreamFactory, prompt: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    stream = factory.new(prompt, skip, True)
    text = ""
    for drop, new in (*map(stream.push, ids), stream.finish()):
        text = text[: len(text) - drop] + new
    return text


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("name", DECODERS)
@quick
@given(ids=st.lists(st.integers(0, len(WORDS) + 4), max_size=14), skip=st.booleans())
@example(ids=[WORDS.index(w) for w in ("a", "<0xC3>", "<0xA9>", "<0xFF>", "b")], skip=True)  # a run that breaks late
@example(ids=[WORDS.index(w) for w in ("a", "▁n", "'", "t", "b")], skip=True)  # a pattern over three tokens
def test_streams_equal_decode(name: str, clean_up: bool, ids: list[int], skip: bool) -> None:
    used = backend(DECODERS[name])
    expected = used.decode(ids, skip)
    if clean_up:
        expected = clean_up_spaces(expected)
    assert stream_text(StreamFactory(used, clean_up), [], ids, skip) == expected


def test_a_text_that_nothing_settles_is_not_looked_at_as_a_whole_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose tokens a client has chosen would hold up all others, longer with each of them."""
    lengths = [0]
    monkeypatch.setattr(streams, "clean_up_spaces", lambda text: lengths.append(len(text)) or clean_up_spaces(text))
    ids = [WORDS.index("'")] * 3000  # the decoder's spaces between them are part of patterns
    text = stream_text(StreamFactory(backend(None), True), [], ids, False)
    assert text.count("'") == 3000
    assert max(lengths) < 1100


@pytest.mark.parametrize("name", DECODERS)
@quick
@given(ids=st.lists(st.integers(0, len(WORDS) + 4), max_size=14), cut=st.integers(0, 14), skip=st.booleans())
def test_streams_continue_a_prompt(name: str, ids: list[int], cut: int, skip: bool) -> None:
    """Wherever the prompt ends, unless inside a run of byte tokens, whose text is not settled there."""
    prompt, output = ids[:cut], ids[cut:]
    used = backend(DECODERS[name])
    kept = [i for i in prompt if not (skip and i in (len(WORDS), len(WORDS) + 1))]
    last = used.id_to_token(kept[-1]) if kept else None
    before, whole = used.decode(prompt, skip), used.decode(ids, skip)
    if (last or "").startswith("<0x") or not whole.startswith(before):
        return
    assert stream_text(StreamFactory(used, False), prompt, output, skip) == whole[len(before) :]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    parts=st.lists(st.one_of(st.binary(max_size=4), st.text("aé日😀\ufffd", max_size=2).map(str.encode)), max_size=8),
    cut=st.integers(0, 12),
)
def test_bytes_of_any_kind(parts: list[bytes], cut: int) -> None:
    """Byte-level text is Rust's lossy UTF-8, for every cut between prompt and output."""
    data = b"".join(parts)
    alphabet = {char: i for i, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    fast = tokenizers.Tokenizer(models.BPE(alphabet, []))
    fast.decoder = decoders.ByteLevel()
    used = FastBackend(fast)
    char_of = {byte: char for char, byte in _BYTE_OF.items()}
    ids = [alphabet[char_of[byte]] for byte in data]
    factory = StreamFactory(used, False)
    assert used.decode(ids, True) == data.decode("utf-8", "replace")
    assert stream_text(factory, [], ids, True) == used.decode(ids, True)
    before = used.decode(ids[:cut], True)
    if not before.endswith("\ufffd"):
        assert stream_text(factory, ids[:cut], ids[cut:], True) == used.decode(ids, True)[len(before) :]


def test_space_between_added_tokens() -> None:
    """Only a decoder that joins tokens by spaces puts any; spaces_between_special_tokens=False takes them away."""
    used = backend(None)
    start, end, plain = (used.token_to_id(t) for t in ("<s>", "</s>", "<plain>"))
    ids = [0, start, end, plain, 2]
    for spaces, expected in ((True, "a <s> </s> <plain> b"), (False, "a <s></s><plain> b")):
        stream = StreamFactory(used, False).new([], False, spaces)
        assert "".join(stream.push(i)[1] for i in ids if i is not None) == expected
