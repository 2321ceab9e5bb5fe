"""A GPU's place taken by the CPU: what its stream is handed is done at once, and what it draws is told late.

What captures hand back writes into the very tensors that the first run returned, as a graph does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionBatch, AttentionSpec
from quire.attention.reference import ReferenceBackend, ReferenceMetadata
from quire.attention.step import Step
from quire.config.worker import WorkerConfig
from quire.ops.native.library import TORCH
from quire.sampling.lanes import Draw
from quire.sampling.sampler import SamplerOutput, sample
from quire.sampling.state import Mask, SamplingState
from quire.sampling.tokens import SequenceTokens
from quire.worker.devices.base import RowSampler
from quire.worker.devices.cuda import CudaDevice
from quire.worker.devices.meter import peak_bytes
from quire.worker.devices.stream import CudaStream

TOTAL = 4 * 2**30


class Done:
    def synchronize(self) -> None:
        pass


class HostStream(CudaStream):
    """See `quire.worker.devices.stream.CudaStream`; `num_entered`, `num_captured` and `num_replayed` count."""

    def __init__(self) -> None:
        self.device, self.capability = torch.device("cpu"), (9, 0)
        self.num_entered = self.num_captured = self.num_replayed = 0

    def enter(self) -> None:
        self.num_entered += 1

    def mark(self) -> Done:
        return Done()

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def capture(self, function: Callable[[], Tensor], pool: list[Any]) -> tuple[Tensor, Callable[[], None]]:
        result = function()
        self.num_captured += 1

        def replay() -> None:
            result.copy_(function())
            self.num_replayed += 1

        return result, replay

    def free_bytes(self) -> int:
        return TOTAL // 2

    def total_bytes(self) -> int:
        return TOTAL

    def peak_bytes(self, function: Callable[[], Any]) -> int:
        return peak_bytes(function)[1]


class LateSampler:
    """Draws as the host does, with tokens of its own that the runner hears of when it waits for them."""

    def __init__(self, last_tokens: Tensor, vocab_size: int) -> None:
        self._last_tokens, self._vocab_size = last_tokens, vocab_size
        self._states: dict[int, SamplingState] = {}
        self.num_waiting = self.most_waiting = 0

    def can_draw(self, state: SamplingState) -> bool:
        return not state.logits_processors and not state.bad_sequences

    def assign(self, row: int, state: SamplingState) -> None:
        ids = np.zeros(len(state.tokens.ids) + 1, np.int32)
        ids[: state.tokens.num] = state.tokens.ids[: state.tokens.num]
        own = SamplingState(
            state.params,
            SequenceTokens(ids, state.tokens.num_prompt, state.tokens.num),
            seed=state.seed,
            sequence_index=state.sequence_index,
            vocab_size=self._vocab_size,
            stop_token_ids=[] if state.stop_token_ids is None else state.stop_token_ids.tolist(),
            bad_words_token_ids=[] if state.bad_token_ids is None else [[i] for i in state.bad_token_ids.tolist()],
        )
        self._states[row] = own

    def launch(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], masks: Sequence[Mask | None] | None = None
    ) -> Callable[[], SamplerOutput]:
        states = [self._states[row] for row in rows]
        assert [state.tokens.position for state in states] == list(positions), "a row is drawn for another position"
        draws = [Draw(state, i, mask=masks[i] if masks else None) for i, state in enumerate(states)]
        output = sample(logits, draws)
        for row, state, token_ids in zip(rows, states, output.token_ids, strict=True):
            self._last_tokens[row] = token_ids[0] if token_ids else 0
            for token_id in token_ids:
                state.tokens.append(token_id)
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        return LateDrawing(self, output).wait


@dataclasses.dataclass
class LateDrawing:
    sampler: LateSampler
    output: SamplerOutput

    def wait(self) -> SamplerOutput:
        self.sampler.num_waiting -= 1
        return self.output


class PaddedReference(ReferenceBackend):
    """Plain torch for graphs' steps: sequences without a token, which come last, are neither read nor written."""

    def build(self, batch: AttentionBatch) -> ReferenceMetadata:
        num = int((batch.seq_lens > 0).sum())
        starts = batch.query_start_loc[: num + 1]
        cut = {"seq_lens": batch.seq_lens[:num], "block_tables": batch.block_tables[:num]}
        slots = batch.slot_mapping[: int(starts[-1])]
        return super().build(dataclasses.replace(batch, query_start_loc=starts, slot_mapping=slots, **cut))

    def attend(self, qkv: Tensor, spec: AttentionSpec, step: Step) -> Tensor:
        num = len(step.attention[spec.group].batch.slot_mapping)
        out = qkv.new_zeros(len(qkv), spec.num_heads * spec.head_dim)
        if num:
            cut = dataclasses.replace(step, positions=step.positions[:num])
            out[:num] = super().attend(qkv[:num], spec, cut)
        return out


class HostDevice(CudaDevice):
    """All of the CUDA device's logic, with plain torch for kernels and a sampler that answers late."""

    def __init__(self, config: WorkerConfig, stream: HostStream) -> None:
        super().__init__(dataclasses.replace(config, kernels=TORCH), stream)
        self.kernels, self.draws, self.backend = "stand-in", True, PaddedReference()
        self.samplers: list[LateSampler] = []

    def make_sampler(self, vocab_size: int) -> RowSampler:
        self.samplers.append(LateSampler(self._last_tokens, vocab_size))
        return self.samplers[-1]
