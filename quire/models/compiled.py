"""A model recorded as two programs of native kernels, body and head: called as the model itself, one native call each.

The CPU's device makes one from a loaded model whose weights are packed. The model's own `forward` says what is
computed: it runs once, with the builder's values in place of tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from quire.attention.step import AdapterBatch, Step, Taps
from quire.models.causal_lm import CausalLM
from quire.ops.native.builder import ProgramBuilder, recorded
from quire.ops.native.library import Target
from quire.ops.native.program import Caches, Program, Spent, StepData
from quire.ops.native.rounds import Rounds
from quire.ops.native.structs import TYPE_OF


class CacheReader:
    """What runs native programs on a KV cache."""

    _caches: Caches | None = None  # of the last step: an engine's are the same for all

    def _held(self, caches: Sequence[Tensor]) -> Caches:
        """The caches as kernels see them."""
        if self._caches is None or self._caches.tensors is not caches:
            self._caches = Caches(caches, TYPE_OF[caches[0].dtype])
        return self._caches


class CompiledModel(CacheReader):
    """Token ids -> hidden states -> logits, as `CausalLM`.

    Args:
        tapped: layers whose outputs a step may ask for (`Step.taps`): another program computes them as outputs.
        target: the level of kernels and the threads that its steps run on; default: `default_target`.
    """

    def __init__(self, model: CausalLM, target: Target | None = None, tapped: Sequence[int] = ()) -> None:
        self.vocab_size, self.cache_layers, self._dtype = model.vocab_size, model.cache_layers, model.dtype
        self._untapped, widths = _record(model, target, ())
        self._width, self._tapped = widths[0], tuple(tapped)
        self._body, (_, *self._tap_widths) = _record(model, target, tapped) if tapped else (self._untapped, widths)
        self._num_incoming, self._head = model.num_incoming, None
        self._adapted = None if model.lora is None else model.lora.tokens
        if model.is_last:
            builder = ProgramBuilder(model.dtype, target)
            logits: Any = model.compute_logits(recorded(builder.input(self._width)))
            self._head = builder.finish(logits)
        # Where kernels do all of it.
        self._whole_head = self._head if self._head and self._head.is_whole and self._body.is_whole else None
        self._narrows = model.is_last and not model.num_incoming and self._untapped.is_whole
        self.target = self._body.target

    def num_bytes(self, num_tokens: int) -> int:
        """Memory that steps of that many tokens make it keep."""
        return self._body.num_bytes(num_tokens)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int | None:
        """`num_bytes`, and what such a step with so many rows sampled takes; None where torch takes some."""
        if self._whole_head is None or self._num_incoming:
            return None
        hidden, logits = num_tokens * self._width * self._dtype.itemsize, num_rows * self.vocab_size * 4
        return self.num_bytes(num_tokens) + hidden + logits

    def reserve(self, num_tokens: int) -> None:
        """Make room for steps of that many tokens."""
        self._body.reserve(num_tokens)

    def spent(self) -> tuple[list[Spent], list[Spent]]:
        """`Program.spent` of the layers, and of the output head."""
        return self._untapped.spent(), self._head.spent() if self._head else []

    def rounds(self, caches: Sequence[Tensor]) -> Rounds | None:
        """Several tokens of rows in one call; None where parts of the model are not kernels."""
        if (head := self._whole_head) is None or self._tapped:
            return None
        return Rounds(self._body, head, self._width, self._dtype, self.vocab_size, self._held(caches))

    def __call__(self, input_ids: Tensor, step: Step) -> Tensor:
        """Hidden states [T, H], or [R, H] of `step.wanted`; keys and values of all are written to the caches."""
        wanted = step.wanted if self._narrows and step.adapters is None and step.taps is None else None
        hidden, inputs = step.outgoing, []
        if hidden is None:
            num_made = input_ids.shape[0] if wanted is None else wanted.shape[0]
            hidden = torch.empty(num_made, self._width, dtype=self._dtype)
        if self._num_incoming:  # where there is none, it is only measured
            shape = (input_ids.shape[0], self._num_incoming)
            inputs = [torch.zeros(shape, dtype=self._dtype) if step.incoming is None else step.incoming]
        caches = self._held(step.caches)
        steps = [StepData(input_ids, step.positions, batch) for batch in step.attention]
        if step.taps is None:
            self._run(self._untapped, step.adapters, [*inputs, hidden], steps, caches, wanted)
            return hidden
        assert tuple(step.taps.layers) == self._tapped, "the program was recorded for other taps"
        tapped = [torch.empty(len(hidden), width, dtype=self._dtype) for width in self._tap_widths]
        self._run(self._body, step.adapters, [*inputs, hidden, *tapped], steps, caches)
        step.taps.hidden.extend(tapped)
        return hidden

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """[R, H] -> float32 [R, V]; [R, 0] where a later stage has the head."""
        if self._head is None:
            return hidden[:, :0]
        rows, width = hidden.shape[0], self.vocab_size
        # numpy's memory is malloc's as it is: torch asks for more, to align it, so that what it freed is too small to
        # be used again, and every step touches new pages.
        memory = torch.from_numpy(np.empty(rows * width + 16, np.float32))
        logits = memory[-memory.data_ptr() // 4 % 16 :][: rows * width].view(rows, width)
        self._run(self._head, adapters, [hidden, logits])
        return logits

    def _run(self, program: Program, adapters: AdapterBatch | None, *arguments: Any) -> None:
        if adapters is None or self._adapted is None:
            return program.run(*arguments)
        try:
            self._adapted.set(adapters.slots)
            program.run(*arguments)
        finally:  # after a Ctrl-C, too: others' programs have the same head, those that draft
            self._adapted.set(None)


def _record(model: CausalLM, target: Target | None, tapped: Sequence[int]) -> tuple[Program, list[int]]:
    """What makes hidden states, and the outputs of the layers `tapped`, of token ids; and how wide each is."""
    builder, taps = ProgramBuilder(model.dtype, target), Taps(tapped)
    incoming = recorded(builder.input(model.num_incoming)) if model.num_incoming else None
    step = Step(recorded(builder.positions), taps=taps if tapped else None, incoming=incoming)
    hidden: Any = model(recorded(builder.ids), step)
    values = [hidden, *(builder.keep(value) for value in cast(list[Any], taps.hidden))]
    return builder.finish(values), [value.width for value in values]


class CompiledHeads:
    """Functions of the same rows, recorded as one program: [R, width] -> [R, N] each.

    Args:
        heads: makes all of them.
        dtype: of the rows.
        target: as for `CompiledModel`.
    """

    def __init__(
        self, heads: Callable[[Tensor], Sequence[Tensor]], width: int, dtype: torch.dtype, target: Target | None = None
    ) -> None:
        builder = ProgramBuilder(dtype, target)
        outputs: Any = heads(recorded(builder.input(width)))
        self._shape, self._dtype = (len(outputs), outputs[0].width), outputs[0].dtype
        self._program = builder.finish(outputs)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[R, width] -> [R, K, N]."""
        found = torch.empty(hidden.shape[0], *self._shape, dtype=self._dtype)
        self._program.run([hidden, *found.unbind(1)])
        return found
