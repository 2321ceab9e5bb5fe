"""The compiled sampler (csrc/sampler.h): all rows of a step in one call, with the bits of its numpy twin.

Called by the sampler, logprobs and the runner where there is a compiled library. A sequence's parameters are packed
once, as C reads them; what changes from step to step is written into them anew. Knows the layout of csrc/sample_args.h;
a row it can't do (a user's logits processors) it leaves to the twin.
"""

import ctypes
import math
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire.ops.native.library import Target, default_target, loaded_library
from quire.ops.native.library import library as library
from quire.ops.native.structs import c_struct
from quire.protocol.step import TokenLogprobs
from quire.sampling.lanes import Draw, Lane
from quire.sampling.select import WEIGHT_BITS, power_scales
from quire.sampling.state import Ids, Mask, SamplingState

MAX_LOGPROBS = 1024  # a row that asks for more gets them from the twin
MAXIMA = {1: -math.inf, 2: math.nan, 3: math.inf}  # error -> the row's largest logit
_BAD_ID = 4
_GREEDY, _DRAW, _GIVEN = 0, 1, 2  # modes
_TYPES = {torch.float32: 0, torch.bfloat16: 1}

# struct SampleRow: mode, seed, sequence_index, top_k, min_weight, top_p, scale, repetition, frequency and presence
# penalty, num_logprobs; then lists of ids (address, number): allowed, forbidden, completing, stop, biased, biases'
# address, seen, counts' address.
_ROW = struct.Struct("=qQQqqd4fq" + "Qq" * 5 + "Q" + "Qq" + "Q")
_LIST = struct.Struct("=Qq")
_SEEN = struct.Struct("=QqQ")
_COMPLETING_AT, _STOP_AT, _SEEN_AT = 72 + 2 * 16, 72 + 3 * 16, 72 + 5 * 16 + 8


class SampleCall:
    """One call's arrays, which know nothing of the logits: they may be made before those are there.

    All int64 that go in and out lie in one: logits_rows, positions, first_sample, errors, ids.
    """

    def __init__(self, records: bytes, rows: Sequence[int], positions: Sequence[int], first: list[int]) -> None:
        num_rows = self._num_rows = len(rows)
        if not (len(records) == num_rows * _ROW.size and len(positions) == num_rows == len(first) - 1):
            raise ValueError(f"{len(records)} bytes, {len(positions)} positions, {len(first)} samples: {num_rows} rows")
        self._rows, self._num_samples = rows, first[-1]
        self.numbers = array("q", [*rows, *positions, *first, *[0] * (num_rows + first[-1])])
        at, _ = self.numbers.buffer_info()
        self.args = c_struct("SampleArgs")(
            num_rows=num_rows, rows=records, logits_rows=at, positions=at + 8 * num_rows,
            first_sample=at + 16 * num_rows, errors=at + 24 * num_rows + 8, token_ids=at + 32 * num_rows + 8,
        )  # fmt: skip

    @classmethod
    def of_each(cls, states: Sequence[SamplingState | None]) -> "SampleCall | None":
        """A token from each row of the logits, where all of these have a `record`."""
        records = [state.record for state in states if state is not None and state.record is not None]
        if not records or len(records) < len(states):
            return None
        positions = [(own := state.tokens).num - own.num_prompt for state in states if state is not None]
        return cls(b"".join(records), range(len(records)), positions, [*range(len(records) + 1)])

    @property
    def token_ids(self) -> list[int]:
        """Of each sample, once it has run."""
        return self.numbers[4 * self._num_rows + 1 :].tolist()

    def give(self, token_ids: Sequence[int]) -> None:
        """Name the samples' tokens, for rows of the mode `given`."""
        self.numbers[4 * self._num_rows + 1 :] = array("q", token_ids)

    def mask(self, masks: Sequence[Mask | None], vocab_size: int) -> None:
        """Let rows draw what their bitmasks allow."""
        num_words = -(-vocab_size // 32)
        if [mask for mask in masks if mask is not None and len(mask.words) < num_words]:
            raise ValueError(f"a mask of a vocabulary of {vocab_size} has {num_words} words")
        self.masks = (ctypes.c_int64 * len(masks))(*[0 if mask is None else mask.address for mask in masks])
        self.args.masks = ctypes.addressof(self.masks)

    def run(self, logits: Tensor, target: Target | None, width: int = 0) -> dict[int, int]:
        """Draw from these logits, and list `width` tokens for each sample.

        Returns the errors, by row; token_ids and the lists are then filled in.
        """
        shape, rows, args = logits.shape, self._rows, self.args
        if len(shape) != 2 or 0 in shape or not logits.is_cpu:
            raise ValueError(f"logits must be [rows, vocabulary] on the CPU, not {list(shape)}, {logits.device}")
        if not (rows and min(rows) >= 0 and max(rows) < shape[0]):
            raise ValueError(f"rows {list(rows)} of {shape[0]} rows of logits")
        logits = logits if logits.dtype in _TYPES else logits.float()
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        args.logits, args.type = logits.data_ptr(), _TYPES[logits.dtype]
        args.vocab_size, args.stride, args.width = shape[1], logits.stride(0), width
        if width:
            self.listed_ids, self.ranks = np.empty((2, self._num_samples, width), np.int64)
            self.logprobs = np.empty(self.ranks.shape, np.float32)
            parts = self.listed_ids, self.logprobs, self.ranks
            args.listed_ids, args.logprobs, args.ranks = [part.ctypes.data for part in parts]
        target = target or default_target()
        loaded_library().quire_sample(target.kernels, target.num_threads, ctypes.addressof(args))
        codes = self.numbers[3 * self._num_rows + 1 : 4 * self._num_rows + 1]
        if not any(codes):
            return {}
        if _BAD_ID in codes:
            raise IndexError(f"a token id is outside the vocabulary of {shape[1]}.")
        return {i: code for i, code in enumerate(codes) if code}

    def entries(self) -> list[tuple[list[int], list[float], list[int]]]:
        """Ids, log-probabilities and ranks of each sample, `width` of each."""
        return list(zip(*[part.tolist() for part in (self.listed_ids, self.logprobs, self.ranks)], strict=True))


def sample_rows(
    target: Target, logits: Tensor, draws: Sequence[Draw]
) -> tuple[list[list[int]], dict[int, int], list[list[TokenLogprobs] | None]]:
    """Sample rows of [R, V] logits for sequences of which none has a logits processor.

    Returns the tokens of each; errors, by index in `draws`; and of each the logprobs, if it asks for at most
    MAX_LOGPROBS.
    """
    states, num_samples = [draw.state for draw in draws], [draw.num_samples for draw in draws]
    asked = {i: k + 1 for i, s in enumerate(states) if (k := s.num_logprobs) is not None and 0 <= k <= MAX_LOGPROBS}
    width = min(max(asked.values()), 1 + logits.shape[1]) if asked else 0
    records = b"".join([draw.state.record or _current(draw.state, draw.mask) for draw in draws])
    first = list(accumulate(num_samples, initial=0))
    positions = [(own := draw.state.tokens).num - own.num_prompt + draw.ahead for draw in draws]
    call = SampleCall(records, [draw.row for draw in draws], positions, first)
    if [draw for draw in draws if draw.mask is not None]:
        call.mask([draw.mask for draw in draws], logits.shape[1])
    errors, flat = call.run(logits, target, width), call.token_ids
    token_ids = [flat[start:end] for start, end in zip(first, first[1:], strict=False)]
    for i in errors:
        token_ids[i] = []
    listed: list[list[TokenLogprobs] | None] = [None] * len(draws)
    if width:
        entries = call.entries()
        for i, n in asked.items():
            if token_ids[i]:
                of_row = entries[first[i] : first[i + 1]]
                listed[i] = [TokenLogprobs(ids[:n], logprobs[:n], ranks[:n]) for ids, logprobs, ranks in of_row]
    return token_ids, errors, listed


def draw_chains(target: Target, logits: Tensor, lanes: Sequence[Lane]) -> list[list[int]]:
    """Draw each lane's tokens from [N, V] logits for as long as they are its drafts; [] where one can't be drawn.

    The states have a `record`, and ask for no logprobs.
    """
    token_ids: list[int] = []
    first = [0]
    for lane in lanes:
        if lane.num_drafts:
            token_ids += lane.state.tokens.drafts()[: lane.num_drafts]
        token_ids.append(-1)
        first.append(len(token_ids))
    if lanes[-1].first_row + lanes[-1].num_drafts >= logits.shape[0]:
        raise ValueError(f"drafts have more rows than the {logits.shape[0]} of the logits")
    records, rows = b"".join([fixed_record(lane.state) for lane in lanes]), [lane.first_row for lane in lanes]
    call = SampleCall(records, rows, [lane.state.tokens.position for lane in lanes], first)
    call.give(token_ids)
    if [lane for lane in lanes if lane.masks]:
        places = [(lane, place) for lane in lanes for place in range(1 + lane.num_drafts)]
        call.mask([lane.masks.get(place) if lane.masks else None for lane, place in places], logits.shape[1])
    nums = (ctypes.c_int64 * len(rows))()
    call.args.drawn = ctypes.addressof(nums)
    errors, drawn = call.run(logits, target), call.token_ids
    return [[] if i in errors else drawn[at : at + nums[i]] for i, at in enumerate(first[:-1])]


def given_logprobs(target: Target, logits: Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Of `token_ids[r]` under row r of [R, V] raw logits, with the k <= MAX_LOGPROBS most likely."""
    num_rows, width = len(token_ids), 1 + min(k, logits.shape[1])
    record = _ROW.pack(_GIVEN, 0, 0, 1, 0, 1.0, 1.0, 1.0, 0.0, 0.0, k, *[0] * 14)
    call = SampleCall(record * num_rows, range(num_rows), [0] * num_rows, [*range(num_rows + 1)])
    call.give(token_ids)
    call.run(logits, target, width)
    return [TokenLogprobs(*entry) for entry in call.entries()]


def fixed_record(state: SamplingState) -> bytes:
    """The record of a row that nothing makes look back, and that reports nothing."""
    if state.record is None:
        state.record = _pack(state)
    return state.record


def _current(state: SamplingState, mask: Mask | None = None) -> bytes | bytearray:
    """The record of a row, new or brought up to date."""
    if (live := state.live_record) is None:
        record = _pack(state)
        lasts = state.counts is None and not state.bad_sequences and state.tokens.position >= state.min_tokens
        if lasts and state.num_logprobs is None:
            state.record = record
            return record
        live = state.live_record = bytearray(record)
    if state.counts is not None:
        state.counts.update()
        ids, counts = state.counts.addresses
        _SEEN.pack_into(live, _SEEN_AT, ids, state.counts.num, counts)
    if state.bad_sequences:
        state.completing = np.array(state.completing_ids(), np.int64)
        _LIST.pack_into(live, _COMPLETING_AT, *_list(state.completing))
    if state.stop_token_ids is not None:
        _LIST.pack_into(live, _STOP_AT, *_list(state.stop_token_ids if state.bars_stops(mask) else None))
    return live


def _pack(state: SamplingState) -> bytes:
    params, (temperature, top_k, top_p, min_p) = state.params, state.choice
    return _ROW.pack(
        _GREEDY if state.greedy else _DRAW,
        state.seed & 2**64 - 1,
        state.sequence_index,
        top_k,
        math.ceil(min_p * 2**WEIGHT_BITS),
        top_p,
        0.0 if state.greedy else power_scales(temperature),
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        -1 if state.num_logprobs is None or state.num_logprobs > MAX_LOGPROBS else state.num_logprobs,
        *_list(state.allowed_token_ids),
        *_list(state.bad_token_ids),
        *_list(None),  # completing, seen: by _current
        *_list(state.stop_token_ids if state.tokens.position < state.min_tokens else None),
        *_list(state.bias_ids),
        state.biases.ctypes.data,
        *(0, 0, 0),
    )


def _list(ids: Ids | None) -> tuple[int, int]:
    return (0, 0) if ids is None else (ids.ctypes.data, len(ids))
