"""An EAGLE head recorded as native programs: what it reads of the model, its layer, its logits; a call each.

The device makes one from a filled head, as `quire.models.compiled` does from a model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.attention.step import Step
from quire.models.compiled import CacheReader
from quire.models.eagle import EagleHead
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.library import Target
from quire.ops.native.program import Program, StepData
from quire.ops.native.rounds import Rounds


class CompiledEagle(CacheReader):
    """As `EagleHead` is called; `widths` are of the hidden states that it fuses."""

    def __init__(self, head: EagleHead, widths: Sequence[int], target: Target | None) -> None:
        self.vocab_size, self.dtype = head.vocab_size, head.dtype
        self._fuse: Program | None = None
        builder = ProgramBuilder(head.dtype, target)
        inputs: list[Any] = [builder.input(width) for width in widths]
        fused: Any = head.fuse(inputs)
        self._width = fused.width
        if fused is not inputs[0]:
            self._fuse = builder.finish(fused)
        builder = ProgramBuilder(head.dtype, target)
        ids, before, step = builder.ids, builder.input(self._width), Step(recorded(builder.positions))
        hidden: Any = head(recorded(ids), recorded(before), step)
        self._body = builder.finish(hidden)
        builder = ProgramBuilder(head.dtype, target)
        logits: Any = head.compute_logits(recorded(builder.input(hidden.width)))
        self._num_logits, self._head = logits.width, builder.finish(logits)
        self.spread, self._draws_all = head.spread, head.d2t is None

    def rounds(self, caches: Sequence[Tensor]) -> Rounds | None:
        """Several drafts of rows in one call; None where parts of it are not kernels."""
        if not (self._body.is_whole and self._head.is_whole and self._draws_all):
            return None
        return Rounds(self._body, self._head, self._width, self.dtype, self.vocab_size, self._held(caches))

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        if self._fuse is None:
            return hidden[0]
        out = torch.empty(hidden[0].shape[0], self._width, dtype=self.dtype)
        self._fuse.run([*hidden, out])
        return out

    def __call__(self, input_ids: Tensor, hidden: Tensor, step: Step) -> Tensor:
        out = torch.empty(input_ids.shape[0], self._width, dtype=self.dtype)
        steps = [StepData(ids=input_ids, positions=step.positions, **vars(batch)) for batch in step.attention]
        self._body.run([hidden, out], steps, self._held(step.caches))
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = torch.empty(hidden.shape[0], self._num_logits)
        self._head.run([hidden, logits])
        return logits
