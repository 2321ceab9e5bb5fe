"""Grammars for the simulation: languages of few tokens that a number names, in the place of compiled ones.

`Language` says what a sequence may draw, `FakeEngine` is to a matcher what llguidance's is, and `FakeManager` takes its
time to compile, as many looks at it as the number wills. Nothing here knows requests, plans or masks in memory but for
the one function that writes them.
"""

import ctypes
from collections.abc import Sequence

from quire.protocol.requests import SamplingTask
from quire.structured.manager import GrammarManager
from quire.structured.matcher import Grammar
from quire.structured_outputs import StructuredOutputsParams

VOCAB, EOS_TOKEN = 40, 3
ALL = (1 << VOCAB) - 1
_END = 1 << EOS_TOKEN
NUM_LANGUAGES = 20
BROKEN = 9  # languages whose number ends with it can't be compiled


def state_after(number: int, token_ids: Sequence[int]) -> int:
    """Where a sequence stands in a language."""
    state = number * 0x9E3779B97F4A7C15 + 1
    for token_id in token_ids:
        state = ((state ^ token_id) * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & ((1 << 64) - 1)
    return state


def allowed_in(state: int) -> int:
    """The tokens that may come, a bit each: one, two, a half or all of them, the end among them or alone."""
    kind, one, other = state >> 40 & 15, state >> 20 & 0xFFFF, state >> 8 & 0xFFFF
    if kind < 6:
        return 1 << (4 + one % (VOCAB - 4))
    if kind < 9:
        return (1 << one % VOCAB) | (1 << other % VOCAB)
    if kind < 13:
        return (ALL // 3) << (one & 1) & ALL | (_END if kind == 12 else 0)
    return ALL if kind < 15 else _END


def allowed(task: SamplingTask, output_token_ids: Sequence[int]) -> int:
    """The tokens that a request's sequence may draw next; all, where it has no grammar."""
    params = task.params.structured_outputs
    if params is None:
        return ALL
    found = allowed_in(state_after(int(params.regex or ""), output_token_ids))
    return found & ~_END if task.params.ignore_eos and found != _END else found


class FakeEngine:
    """A sequence's place in a language; whoever takes what may not come, or goes on after the end, is wrong."""

    def __init__(self, number: int, token_ids: Sequence[int] = ()) -> None:
        self.number = number
        self.token_ids = list(token_ids)

    def deep_copy(self) -> "FakeEngine":
        return FakeEngine(self.number, self.token_ids)

    def get_error(self) -> str:
        return ""

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return self.token_ids[-1:] == [EOS_TOKEN]

    def is_accepting(self) -> bool:
        return bool(self._allowed() & _END)

    def _allowed(self) -> int:
        assert not self.is_stopped(), "a sequence goes on after its grammar's end"
        return allowed_in(state_after(self.number, self.token_ids))

    def consume_token(self, token_id: int) -> None:
        assert self._allowed() >> token_id & 1, "a token that the grammar does not allow"
        self.token_ids.append(token_id)

    def consume_tokens(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.token_ids[len(self.token_ids) - num_tokens :]

    def compute_ff_tokens(self) -> list[int]:
        ahead = self.deep_copy()
        while not ahead.is_stopped() and (only := ahead._allowed()) & (only - 1) == 0 and only != _END:
            ahead.consume_token(only.bit_length() - 1)
        return ahead.token_ids[len(self.token_ids) :]

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        ahead = self.deep_copy()
        for place, token_id in enumerate(token_ids):
            if ahead.is_stopped() or not ahead._allowed() >> token_id & 1:
                return place
            ahead.consume_token(token_id)
        return len(token_ids)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self._allowed().to_bytes(num_bytes, "little"), num_bytes)


class FakeManager(GrammarManager):
    """Compiles in no thread: a grammar is there after so many calls of `take`, or the first that may wait."""

    def __init__(self) -> None:
        self.num_words = -(-VOCAB // 32)
        self._pending: dict[bytes, list[int]] = {}  # the number, and how many calls are to come
        self._ready: dict[bytes, Grammar] = {}

    def get(self, key: bytes) -> Grammar | None:
        return self._ready.get(key)

    def compile(self, key: bytes, params: StructuredOutputsParams) -> None:
        number = int(params.regex or "")
        self._pending.setdefault(key, [number, number % 7])

    def take(self, timeout: float = 0.0) -> list[tuple[bytes, Grammar | str]]:
        found: list[tuple[bytes, Grammar | str]] = []
        for key, pending in list(self._pending.items()):
            pending[1] -= 1
            if pending[1] < 0 or (timeout > 0 and not found):
                found.append((key, self._build(key, self._pending.pop(key)[0])))
        return found

    def _build(self, key: bytes, number: int) -> Grammar | str:
        if number % 10 == BROKEN:
            return "the language is broken."
        grammar = Grammar(FakeEngine(number), (EOS_TOKEN,))
        if len(self._ready) > 3:
            self._ready.pop(next(iter(self._ready)))
        self._ready[key] = grammar
        return grammar
