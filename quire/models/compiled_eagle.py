"""An EAGLE head recorded as native programs: what it reads of the model, its layer, its logits; a call each.

The device makes one from a filled head, as `quire.models.compiled` does from a model, or runs the head itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.attention.step import AdapterBatch, Step
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
        """What it reads of the model's hidden states, [T, H] each -> [T, H]."""
        if self._fuse is None:
            return hidden[0]
        out = torch.empty(hidden[0].shape[0], self._width, dtype=self.dtype)
        self._fuse.run([*hidden, out])
        return out

    def __call__(self, input_ids: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """[T, H], from tokens and the hidden states before them; writes to the step's caches."""
        out = torch.empty(input_ids.shape[0], self._width, dtype=self.dtype)
        steps = [StepData(input_ids, step.positions, batch) for batch in step.attention]
        self._body.run([hidden, out], steps, self._held(step.caches))
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> logits of the tokens that it draws from."""
        logits = torch.empty(hidden.shape[0], self._num_logits)
        self._head.run([hidden, logits])
        return logits


RunnableHead = EagleHead | CompiledEagle  # what a device makes of a head: called as the head itself


class TimedHead:
    """A head, called as a model is, with hidden states of zeros: for measurements."""

    def __init__(self, head: RunnableHead, num_hidden: int) -> None:
        self.vocab_size, self._head, self._num_hidden = head.vocab_size, head, num_hidden

    def __call__(self, input_ids: Tensor, step: Step) -> Tensor:
        hidden = torch.zeros(len(input_ids), self._num_hidden, dtype=self._head.dtype, device=input_ids.device)
        return self._head(input_ids, hidden, step)

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        return self._head.spread(self._head.compute_logits(hidden))
