"""The sampler for rows of logits on a device: it draws there, and the host hears of it later.

A launch needs nothing that an earlier one drew: positions come from the caller, and tokens and their counts stay on the
device, so that several launches can be under way. Its tokens, failures and log-probabilities are those of sampler.py,
bit for bit. Called by the runner of a device that has Triton's kernels; what `can_draw` refuses goes to sampler.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.triton import sampler as kernels
from quire.ops.triton.sampler_jobs import MAX_LISTED, RECORD, list_records, listed_logprobs, selection
from quire.protocol.step import TokenLogprobs
from quire.sampling.native import MAXIMA
from quire.sampling.sampler import SamplerOutput, unusable
from quire.sampling.select import WEIGHT_BITS, power_scales
from quire.sampling.state import Mask, SamplingState, TokenCounts, Words, forbid

Array = np.ndarray[Any, Any]


class DeviceSampler:
    """Draws for the rows of sequences on a device, by their parameters, counts and last tokens, which it keeps there.

    Counts take 4 bytes a token of the vocabulary for each row whose request has penalties, and are allocated as such
    rows come. A launch takes as much again for each row whose logits are processed, while it runs, and 16 bytes a part
    of 512 tokens for each row. What masks logits (grammars, allowed and bad words, min_tokens) is sent as bitmasks.

    Args:
        last_tokens: int32 [num_rows] on the device: gets what each row's last launch drew; 0 where it failed.
    """

    def __init__(self, last_tokens: Tensor, vocab_size: int) -> None:
        device, num_rows = last_tokens.device, len(last_tokens)
        self._device, self._vocab_size, self._last_tokens = device, vocab_size, last_tokens
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._records = np.zeros(num_rows, RECORD)
        self._records["counts"] = -1
        self._free_counts, self._states = list[int](), dict[int, SamplingState]()
        self._asks = np.zeros(num_rows, bool)  # for log-probabilities, or for logits that are processed
        self._allowed: dict[int, Words] = {}  # by the requests' own lists

    @staticmethod
    def can_draw(state: SamplingState) -> bool:
        """Whether the device can draw for such a sequence, one token at a time."""
        lists = state.num_logprobs is None or 0 <= state.num_logprobs <= MAX_LISTED
        return lists and not state.logits_processors and not state.bad_sequences

    def assign(self, row: int, state: SamplingState) -> None:
        """Give a row to a sequence, of whose tokens the host knows all; anew where the host has drawn one of them."""
        self.release(row)
        self._states[row], self._asks[row] = state, state.num_logprobs is not None or state.processes
        params, (temperature, top_k, top_p, min_p), vocab_size = state.params, state.choice, self._vocab_size
        kind, selects = selection(state.greedy, top_k, top_p, vocab_size)
        seed, scale = (state.seed + 2**63) % 2**64 - 2**63, 0.0 if state.greedy else power_scales(temperature)
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        counts = -1 if state.counts is None else self._count(state.counts)
        self._records[row] = (
            kind, row, 0, 0, seed, state.sequence_index, top_k, top_p, math.ceil(min_p * 2**WEIGHT_BITS), scale,
            *map(np.float32, penalties), selects, counts, -1, -1, 0, 0,
        )  # fmt: skip
        if state.allowed_token_ids is not None or state.bad_token_ids is not None:
            words = self._allowed[row] = self._all_allowed()
            if state.allowed_token_ids is not None:
                forbid(words, state.allowed_token_ids)
                np.invert(words, out=words)
            if state.bad_token_ids is not None:
                forbid(words, state.bad_token_ids)

    def release(self, row: int) -> None:
        """A row's sequence has gone, or draws on the host from now on."""
        self._allowed.pop(row, None)
        if (slot := int(self._records[row]["counts"])) >= 0:
            self._records[row]["counts"] = -1  # first: an interrupt between the two loses a slot, and gives none twice
            self._free_counts.append(slot)

    def launch(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], masks: Sequence[Mask | None] | None = None
    ) -> Callable[[], SamplerOutput]:
        """Draw from row i of [N, V] logits, float32 or bfloat16 on the device, for row `rows[i]`; waits for nothing.

        Args:
            rows: distinct, assigned ones.
            positions: of the tokens in their outputs.
            masks: grammars', by i; may be written to once this has returned.
        """
        indices = np.array(rows)
        draws, asks = self._records.take(indices), self._asks[indices] | (masks is not None)
        draws["source"], draws["position"] = np.arange(len(rows)), positions
        asking = [(i, self._states[rows[i]]) for i in np.flatnonzero(asks).tolist()]
        listing = {i: min(s.num_logprobs, self._vocab_size) for i, s in asking if s.num_logprobs is not None}
        lists = list_records(list(listing), list(listing.values()), power_scales(1.0))
        table = [draws.view(np.int64), lists.view(np.int64)]
        num_words, num_processed = len(table[0]) + len(table[1]), 0
        for i, state in asking:
            words = self._mask_words(rows[i], positions[i], masks[i] if masks else None)
            if words is None and state.bias_ids is None and state.counts is None:
                continue
            draws[i]["processed"], num_processed = num_processed, num_processed + 1
            if words is not None:
                draws[i]["mask"] = num_words
                table.append(words.view(np.int64))
                num_words += len(table[-1])
            if state.bias_ids is not None:
                order = np.argsort(state.bias_ids)
                draws[i]["biases"], draws[i]["num_biases"] = num_words, len(order)
                table += [state.bias_ids[order], state.biases[order].astype(np.float64).view(np.int64)]
                num_words += 2 * len(order)
        uploaded = self._upload(np.concatenate(table))
        launch = kernels.Launch(uploaded, np.concatenate(table[:2]).view(RECORD), len(draws), num_processed)
        drawn, facts, listed = map(self._fetch, kernels.draw(launch, logits, self._counts, self._last_tokens))
        event = None if self._device.type == "cpu" else torch.Event(self._device)
        if event is not None:
            event.record()
        return partial(_wait, event, drawn, facts, listed, listing)

    def _all_allowed(self) -> Words:
        """A bitmask, of whole int64."""
        return np.full(2 * -(-self._vocab_size // 64), 0xFFFFFFFF, np.uint32)

    def _mask_words(self, row: int, position: int, mask: Mask | None) -> Words | None:
        """What a row may draw at a position, a copy; None for all."""
        state, allowed = self._states[row], self._allowed.get(row)
        stops = state.stop_token_ids if position < state.min_tokens and state.bars_stops(mask, position) else None
        if mask is None and allowed is None and stops is None:
            return None
        words = self._all_allowed() if allowed is None else allowed.copy()
        if mask is not None:
            num = min(len(words), len(mask.words))
            words[:num] &= mask.words[:num]
        if stops is not None:
            forbid(words, stops)
        return words

    def _count(self, counts: TokenCounts) -> int:
        """A row of the counts on the device, with these."""
        if not self._free_counts:
            num = len(self._counts)
            more = torch.zeros((max(4, num), self._vocab_size), dtype=torch.int32, device=self._device)
            self._counts = torch.cat([self._counts, more])
            self._free_counts = list(range(num, len(self._counts)))
        counts.update()
        slot = self._free_counts.pop()
        numbers = 2 * counts.counts.astype(np.int32) + 1
        self._counts[slot].zero_().index_copy_(0, self._upload(counts.ids.copy()), self._upload(numbers))
        return slot

    def _upload(self, array: Array) -> Tensor:
        """The array on the device, for later work on the stream."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def _fetch(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, once the stream has come so far; one without elements at once."""
        if self._device.type == "cpu" or not tensor.numel():
            return tensor.cpu()
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _wait(
    event: torch.Event | None, drawn: Tensor, facts: Tensor, listed: Tensor, listing: dict[int, int]
) -> SamplerOutput:
    """What was drawn, one token a row, once the device has drawn it.

    Args:
        drawn, facts, listed: as `kernels.draw` returns them, on the host once `event` has come.
        listing: by index of a draw, how many likely tokens are listed; in the order of `facts`.
    """
    if event is not None:
        event.synchronize()
    numbers = drawn.numpy()
    output = SamplerOutput(numbers[:, :1].tolist(), [None] * len(numbers))
    for i in np.flatnonzero(numbers[:, 1]).tolist():
        output.token_ids[i], output.failures[i] = [], unusable(MAXIMA[int(numbers[i, 1])]).failure
    if listing:
        tokens = numbers[list(listing), 0].tolist()
        entries = listed_logprobs(facts.numpy(), listed.numpy(), tokens, list(listing.values()))
        for i, entry in zip(listing, entries, strict=True):
            output.logprobs[i] = [TokenLogprobs(*entry)] if output.token_ids[i] else None
    return output
