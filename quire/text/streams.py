"""Token ids to text, one id at a time: what decoding all of them at once would give, without decoding again.

The tokenizer makes streams (`StreamFactory`), the detokenizer pushes ids through them. A stream follows the output of
one sequence after its prompt; it knows nothing of stop strings. Text that a later token could still change (an open
run of byte-fallback tokens, which turns into U+FFFD as a whole when one byte is wrong) is shown at once and counted
in `num_unstable`, so that a stop string in it is seen at its own token while a client is sent only what stays.
"""

import codecs
import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from quire.text.backend import Backend

REPLACEMENT = "\ufffd"
_Value = TypeVar("_Value")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT = 6  # ids that a windowed decode keeps before the new one: enough for every decoder that looks one back


class TextStream(Protocol):
    """Text of one sequence's output."""

    num_unstable: int  # trailing characters shown so far that a later call may drop again

    def push(self, token_id: int) -> tuple[int, str]:
        """Take the next id; returns (how many shown characters to drop, text to append after that)."""
        ...

    def finish(self) -> tuple[int, str]:
        """No id follows: settle what is open, an incomplete character as U+FFFD. Returns as `push` does."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _Table(dict[int, _Value]):
    """id -> what `read` makes of its token, or of None where it is left out; filled as ids come, for all streams."""

    def __init__(
        self, id_to_token: Callable[[int], str | None], skipped: frozenset[int], read: Callable[[str | None], _Value]
    ) -> None:
        super().__init__()
        self.id_to_token, self._skipped, self._read = id_to_token, skipped, read

    def __missing__(self, token_id: int) -> _Value:
        value = self[token_id] = self._read(None if token_id in self._skipped else self.id_to_token(token_id))
        return value


def _byte_text(token: str | None) -> str | bytes:
    """The text of a byte-level token, or its bytes where they are not whole characters."""
    try:
        own = bytes(_BYTE_OF[c] for c in token or "")
    except KeyError:  # an added token that is written as plain text
        return token or ""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return own


def _bytes_of(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


class ByteLevelStream:
    """Byte-level BPE: tokens are bytes, and text is their UTF-8, with U+FFFD where it is broken."""

    __slots__ = ("_open", "_owed", "_table")
    num_unstable = 0

    def __init__(self, table: _Table[str | bytes], prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = (_bytes_of(table[token_id]) + tail)[-3:]
            if len(tail) == 3:  # an incomplete character has at most three bytes
                break
        self._open = tail[codecs.utf_8_decode(tail, "replace", False)[1] :]  # a character that is not complete
        # Where the prompt ends inside a character that is then never completed, its U+FFFD belongs to the prompt.
        self._owed = bool(self._open)

    def push(self, token_id: int) -> tuple[int, str]:
        text = self._table[token_id]
        if text.__class__ is bytes or self._open:
            text = self._decode(_bytes_of(text), False)
        return 0, text  # type: ignore[return-value]

    def finish(self) -> tuple[int, str]:
        return 0, self._decode(b"", True)

    def _decode(self, more: bytes, final: bool) -> str:
        found = self._open + more
        text, num_used = codecs.utf_8_decode(found, "replace", final)
        self._open = found[num_used:]
        if self._owed and text:
            self._owed = False
            return text.removeprefix(REPLACEMENT)
        return text


_Piece = str | int | None  # its text, the value of a byte-fallback token, or None where it is left out


class PieceStream:
    """SentencePiece-style decoders: pieces with a mark for the space, and runs of byte tokens.

    A run of byte tokens is text when the whole run is valid UTF-8; otherwise each of its bytes is one U+FFFD. So a
    valid run is unstable until another piece ends it, and a broken one is settled byte by byte.
    """

    def __init__(self, table: _Table[_Piece], prompt_token_ids: Sequence[int], strip: str, first_mark: str) -> None:
        """`strip`: character dropped once from the very start of the text; `first_mark`: dropped in the first piece."""
        self.num_unstable = 0
        self._table = table
        kept = (value for i in reversed(prompt_token_ids) if (value := table[i]) is not None)
        run: list[int] = []
        self._first_mark, self._strip = first_mark, strip
        for value in kept:
            self._first_mark = ""
            if isinstance(value, int):
                run.append(value)
            elif value or run:
                break
        else:
            value = ""
        if run or value:
            self._strip = ""
        self._in_run = False
        if run:  # the prompt's last bytes open a run that the output may continue
            self._open_run()
            for byte in reversed(run):
                self._run_text(byte)

    def push(self, token_id: int) -> tuple[int, str]:
        value = self._table[token_id]
        if value.__class__ is str:
            if self._first_mark:
                value, self._first_mark = (self._table.id_to_token(token_id) or "").replace(self._first_mark, ""), ""
            drop, text = self._close_run() if self._in_run else (0, "")
            return drop, text + (self._lead(value) if self._strip and not text else value)  # type: ignore[operator, arg-type]
        if value is None:
            return 0, ""
        if not self._in_run:
            self._open_run()
        self._run_length += 1
        if not self._run_valid:
            return 0, REPLACEMENT
        text = self._run_text(value)  # type: ignore[arg-type]
        if not self._run_valid:
            return self._break_run()
        text = self._lead(text)
        self.num_unstable += len(text)
        return 0, text

    def finish(self) -> tuple[int, str]:
        return self._close_run() if self._in_run else (0, "")

    def _lead(self, text: str) -> str:
        if self._strip and text:
            strip, self._strip = self._strip, ""
            return text.removeprefix(strip)
        return text

    def _open_run(self) -> None:
        self._in_run = self._run_valid = True
        self._run_length = 0  # bytes of the output in the run
        self._run_decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def _run_text(self, byte: int) -> str:
        try:
            return self._run_decoder.decode(bytes((byte,))) if self._run_valid else ""
        except UnicodeDecodeError:
            self._run_valid = False
            return ""

    def _break_run(self) -> tuple[int, str]:
        drop, self.num_unstable = self.num_unstable, 0
        self._strip = ""
        return drop, REPLACEMENT * self._run_length

    def _close_run(self) -> tuple[int, str]:
        self._in_run = False
        if self._run_valid and self._run_decoder.getstate()[0]:  # ends inside a character
            return self._break_run()
        self.num_unstable = 0
        return 0, ""


class WindowStream:
    """Any other decoder: decodes a few ids before the new one with and without it, and takes the difference."""

    num_unstable = 0

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
        joined: Mapping[int, str],
    ) -> None:
        """`joined`: id -> content of tokens that get no space between one another."""
        self._decode, self._skipped, self._joined = decode, skipped, joined
        self._ids = [i for i in prompt_token_ids[-4 * _CONTEXT :] if i not in skipped][-_CONTEXT:]
        self._text = decode(self._ids)
        self._num_pending = 0

    def push(self, token_id: int) -> tuple[int, str]:
        if token_id in self._skipped:
            return 0, ""
        follows = bool(self._ids) and self._ids[-1] in self._joined
        self._ids.append(token_id)
        self._num_pending += 1
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and self._num_pending < 8:  # perhaps an incomplete character
            return 0, ""
        new = self._advance(text)
        return 0, self._joined[token_id] if follows and token_id in self._joined else new

    def finish(self) -> tuple[int, str]:
        return 0, self._advance(self._decode(self._ids)) if self._num_pending else ""

    def _advance(self, text: str) -> str:
        new = text[len(os.path.commonprefix((self._text, text))) :]
        self._ids = self._ids[-_CONTEXT:]
        self._text = self._decode(self._ids)
        self._num_pending = 0
        return new


class CleanupStream:
    """Another stream's text after `clean_up_spaces`, whose patterns may span tokens."""

    def __init__(self, inner: TextStream) -> None:
        self.num_unstable = 0
        self._inner = inner
        self._raw = self._shown = ""  # text since the last place that no pattern can span, as it came and as shown

    def push(self, token_id: int) -> tuple[int, str]:
        return self._apply(*self._inner.push(token_id))

    def finish(self) -> tuple[int, str]:
        return self._apply(*self._inner.finish())

    def _apply(self, inner_drop: int, text: str) -> tuple[int, str]:
        raw = self._raw[: len(self._raw) - inner_drop] + text
        shown = clean_up_spaces(raw)
        same = len(os.path.commonprefix((self._shown, shown)))
        drop, new = len(self._shown) - same, shown[same:]
        settled = len(raw) - self._inner.num_unstable
        longest = settled if len(raw) == settled > _LONGEST_CHAIN else 0
        cut = next((i for i in range(settled, 0, -1) if _is_apart(raw, i)), longest)
        self._raw = raw[cut:]
        self._shown = clean_up_spaces(self._raw)
        self.num_unstable = len(self._shown)
        return drop, new


_LONGEST_CHAIN = 1000  # characters among which patterns may hang together: to look at all at each token takes long
_CLEANED = frozenset(" .?!,'ntmsver")


def _is_apart(text: str, cut: int) -> bool:
    """Whether no pattern of `clean_up_spaces` spans the place: each is a space and at most three other characters."""
    last = text[cut - 1]
    before_space = text[cut : cut + 1] == " " and last not in " '"
    return last not in _CLEANED or before_space or (cut >= 3 and " " not in text[cut - 3 : cut])


def clean_up_spaces(text: str) -> str:
    """Drop the spaces before English punctuation and contractions (`clean_up_tokenization_spaces`)."""
    for old in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(old, old.strip())
    return text


class StreamFactory:
    """Makes the streams of one tokenizer; the tables that they share fill up as tokens are met. Thread-safe."""

    def __init__(self, backend: "Backend", clean_up: bool) -> None:
        self._backend, self._clean_up = backend, clean_up
        special = frozenset(i for i, (_, is_special) in backend.added_tokens.items() if is_special)
        self._skipped = {True: special, False: frozenset[int]()}
        self._pieces = _parse_piece_decoder(backend.decoder_spec)
        self._is_byte_level = (backend.decoder_spec or {}).get("type") == "ByteLevel"
        read = _byte_text if self._is_byte_level else self._piece_of
        self._tables = {skip: _Table[Any](self._id_to_token, ids, read) for skip, ids in self._skipped.items()}

    def new(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool, spaces_between: bool) -> TextStream:
        """A stream for an output that follows `prompt_token_ids`.

        `spaces_between=False` puts no space between neighbouring added tokens; only decoders that join tokens by
        spaces would put one.
        """
        if self._is_byte_level:
            stream: TextStream = ByteLevelStream(self._tables[skip_special_tokens], prompt_token_ids)
        elif self._pieces:
            stream = PieceStream(self._tables[skip_special_tokens], prompt_token_ids, *self._pieces[2:])
        else:
            decode = partial(self._backend.decode, skip_special_tokens=skip_special_tokens)
            joined = {} if spaces_between else {i: content for i, (content, _) in self._backend.added_tokens.items()}
            stream = WindowStream(decode, prompt_token_ids, self._skipped[skip_special_tokens], joined)
        return CleanupStream(stream) if self._clean_up else stream

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The whole text at once, through a stream."""
        stream = self.new((), skip_special_tokens, True)
        text: list[str] = []
        for drop, new in (*map(stream.push, token_ids), stream.finish()):
            while drop:  # shown characters are whole trailing parts
                drop -= len(text.pop())
            text.append(new) if new else None
        return "".join(text)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """A token's own bytes, which need be no whole characters; None where the decoder does not say."""
        value = self._tables[False][token_id]
        return None if value is None else [value] if isinstance(value, int) else list(_bytes_of(value))

    def _piece_of(self, token: str | None) -> _Piece:
        if token is None or self._pieces is None:
            return None
        replacements, byte_fallback, *_ = self._pieces
        for old, new in replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return int(match[1], 16) if match else token

    def _id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if token_id >= 0 else None


def _parse_piece_decoder(spec: dict[str, Any] | None) -> tuple[list[tuple[str, str]], bool, str, str] | None:
    """(replacements, byte fallback, strip, first_mark) when `PieceStream` can follow the decoder, else None."""
    if spec and spec["type"] == "Metaspace":
        mark = spec["replacement"]
        return [(mark, " ")], False, "", "" if spec.get("prepend_scheme") == "never" else mark
    if not spec or spec["type"] != "Sequence":
        return None
    steps = spec["decoders"]
    kinds = " ".join(step["type"] for step in steps)
    strip = steps[-1] if kinds.endswith("Fuse Strip") else {"content": "", "start": 1, "stop": 0}
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    is_known = re.fullmatch("(Replace ?)*(ByteFallback ?)?(Fuse ?(Strip)?)?", kinds) and None not in dict(replaced)
    if not is_known or (strip["start"], strip["stop"]) != (1, 0) or not (replaced or "Strip" in kinds):
        return None
    return replaced, "ByteFallback" in kinds, strip["content"], ""
