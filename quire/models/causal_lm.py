"""A causal language model: a backbone, an output head of tokens or classes, and the loading of a checkpoint.

`quire.models.registry.build_model` makes one; the weight loader fills it and the model runner calls it. Families
differ in how they compose the backbone and in the names of their checkpoints; this class knows neither. It must not
know requests or files.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from quire import ops
from quire.attention.step import AdapterBatch, Step
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.embedding import VocabEmbedding
from quire.lora.slots import LoraSlots
from quire.models.builder import Builder
from quire.models.decoder import Decoder
from quire.models.weights import CheckpointFormat, weight_slots
from quire.quantization.base import CheckpointSlot


class RunnableModel(Protocol):
    """What a device makes of a model: called as the model itself."""

    vocab_size: int

    def __call__(self, input_ids: Tensor, step: Step) -> Tensor:
        """Hidden states [T, H], or [R, H] of `step.wanted`; keys and values of all are written to the caches."""
        ...

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """[R, H] -> [R, V]; `adapters` of these rows."""
        ...


class CausalLM(nn.Module):
    """Token ids -> hidden states -> logits.

    Args:
        backbone: ``backbone(input_ids, step) -> [T, H]``, whose token embedding the head shares when the configuration
            ties them.
        form: how the family's checkpoints name things.
        logit_scale: factor on the logits.
        logit_softcap: logits l become ``logit_softcap * tanh(l / logit_softcap)``.

    Attributes:
        cache_layers: what each attention layer keeps of a token; with the backend's shapes, this sizes the KV cache.
        assign_groups: lets its cache layers share KV groups with others, before anything is computed.
        dtype: of parameters, hidden states, KV cache and logits.
        form: how its checkpoints name things.
        filled_weights: checkpoint names that `load_weights` need not be given: an earlier start packed them.
        missing_weights: checkpoint names that `load_weights` has not met yet.
        num_incoming: features of what its stage of the model is given in place of token ids; 0 for the first one.
        is_last: its stage ends with the final norm and the head.
        classifies: its head is for classes: logits are of these.
        num_parameters: of all stages.
        elsewhere: checkpoint names of other stages' tensors.
        lora: the places of adapters, where it has any.
    """

    def __init__(
        self,
        config: ModelConfig,
        builder: Builder,
        backbone: Decoder,
        form: CheckpointFormat,
        *,
        logit_scale: float | None = None,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = config.num_labels or config.vocab_size
        self.dtype = builder.context.dtype
        self.cache_layers = builder.context.cache_layers
        self.model = backbone
        self.tied, self.classifies = config.tie_word_embeddings, config.num_labels > 0
        self.lm_head = builder.head(backbone.embed_tokens, tied=self.tied, num_labels=config.num_labels)
        stage = builder.context.stage
        self.num_incoming = 0 if stage is None or stage.is_first else config.hidden_size
        self.is_last = stage is None or stage.is_last
        if not self.is_last:
            backbone.norm = backbone.project_out = None
        builder.context.assign_groups()
        self.assign_groups = builder.context.assign_groups
        self.form = replace(form, names=(*form.names, ("lm_head.", "score."))) if self.classifies else form
        self._logit_scale, self._logit_softcap = logit_scale, logit_softcap
        slots = weight_slots(self, self.form)
        self.filled_weights = {name for name, slot in slots.items() if slot.filled}
        self.missing_weights = slots.keys() - self.filled_weights
        self.elsewhere: set[str] = set()
        self.lora: LoraSlots | None = None
        self.num_parameters = sum(slot.form.num_weights or math.prod(slot.form.shape) for slot in slots.values())

    def leave(self, whole: "CausalLM") -> None:
        """Let other stages have the rest of what the whole model needs."""
        self.elsewhere = whole.checkpoint_shapes().keys() - self.checkpoint_shapes().keys()
        self.filled_weights |= self.elsewhere
        self.num_parameters = whole.num_parameters

    @property
    def embedding(self) -> VocabEmbedding:
        """The backbone's token embedding."""
        return self.model.embed_tokens

    def forward(self, input_ids: Tensor, step: Step) -> Tensor:
        """Hidden states of a step's tokens, int64 [T] -> [T, H] after the final norm; writes to the step's caches."""
        if self.num_incoming and step.incoming is None:  # it is only measured
            step = replace(step, incoming=torch.zeros(len(input_ids), self.num_incoming, dtype=self.dtype))
        hidden = self.model(input_ids, step)
        return hidden if step.outgoing is None else step.outgoing.copy_(hidden)

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """[R, H] -> [R, V], in the model's dtype or float32; [R, 0] where a later stage has the head."""
        if not self.is_last:
            return hidden[:, :0]
        step = None if adapters is None else Step(hidden, adapters=adapters)
        logits = self.lm_head(hidden, step, wide=True)
        if self._logit_scale is not None:
            logits = ops.scale(logits, self._logit_scale)
        return logits if self._logit_softcap is None else ops.softcap(logits, self._logit_softcap)

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model holds: name -> shape."""
        return {name: slot.form.shape for name, slot in weight_slots(self, self.form).items()}

    def reads(self, name: str) -> bool:
        """Whether `load_weights` is to be given a checkpoint's tensor: what is no part of it, or filled, is not."""
        return not self.form.passes_over(name) and self.form.canonical(name) not in self.filled_weights

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the parameters, in place; may be called for each shard in turn.

        Raises:
            ModelLoadError: a tensor that this architecture has no place for, or one of the wrong shape or type.
        """
        slots = weight_slots(self, self.form)
        for name, tensor in weights:
            canonical = self.form.canonical(name)
            elsewhere = canonical in self.elsewhere or (self.tied and canonical == "lm_head.weight")
            if elsewhere or self.form.passes_over(name):
                continue
            if (slot := slots.get(canonical)) is None:
                eagle = " An EAGLE head has such a one: it drafts by the method 'eagle'." * (name == "fc.weight")
                raise ModelLoadError(
                    f"the checkpoint has a tensor {name!r}, for which this model as config.json describes it has no "
                    f"place: config.json and the weights don't belong together.{eagle}"
                )
            _check(name, tensor, slot)
            if not slot.filled:
                slot.load(tensor)
            self.missing_weights.discard(canonical)


def _check(name: str, tensor: Tensor, slot: CheckpointSlot) -> None:
    """Refuse a tensor that is not like its slot."""
    if tuple(tensor.shape) != slot.form.shape:
        raise ModelLoadError(
            f"tensor {name!r} has the shape {tuple(tensor.shape)} in the checkpoint, but config.json implies "
            f"{slot.form.shape}: config.json and the weights don't belong together."
        )
    if tensor.dtype not in slot.form.dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in slot.form.dtypes)
        raise ModelLoadError(
            f"tensor {name!r} is of type {str(tensor.dtype).removeprefix('torch.')} in the checkpoint, where one of "
            f"{wanted} is expected: use a checkpoint that is not quantized, or one in a supported format."
        )
