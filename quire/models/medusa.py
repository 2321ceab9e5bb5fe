"""Medusa heads (arXiv:2401.10774): each predicts a token further ahead from the model's last hidden state.

A head is some residual blocks, `x + silu(W x + b)`, and an output head, its own or the model's. Checkpoints come in the
published form (`0.0.linear.weight`: head, layer) and in vLLM's (`blocks.0.layers.0.weight`); what is in one is read
here from its tensors' names and shapes. The worker builds and fills these; nothing here knows files.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quire import ops
from quire.attention.step import AdapterBatch, Step
from quire.config.model import ModelConfig
from quire.layers.linear import Linear
from quire.models.builder import Builder
from quire.models.causal_lm import RunnableModel
from quire.models.heads import HeadCheckpoint, spread_logits

TOKEN_MAP = "token_map"  # of vLLM's form: which token each of a head's own outputs stands for
_PLACE = r"(?P<head>\d+)\.(?P<layer>\d+)"
_BLOCK = re.compile(rf"(?:{_PLACE}\.linear|blocks\.(?P<vllm>\d+)\.layers\.(?P<vllm_layer>\d+))\.(?P<kind>weight|bias)")
_HEAD = re.compile(rf"(?:{_PLACE}|lm_heads\.(?P<vllm>\d+)(?P<vllm_layer>))\.weight")
_PREFIX = re.compile(r"medusa_heads?\.")


@dataclass(frozen=True)
class MedusaShape:
    """What heads there are.

    Attributes:
        num_layers: residual blocks of each head.
        num_outputs: of the heads' own output heads; None where they use the model's.
        bias: whether the blocks have one.
        scale: what logits are multiplied by.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    num_outputs: int | None = None
    bias: bool = True
    scale: float = 1.0


def read_shape(checkpoint: HeadCheckpoint, num_heads: int) -> tuple[MedusaShape, dict[str, str | None]]:
    """The first heads of a checkpoint, so many, and each tensor's name here; None for those that are not needed.

    Raises:
        ModelLoadError: its tensors are no such heads, or fewer, or others than its config.json says.
    """
    config = checkpoint.config
    scale = config.get("logit_scale", 1.0)
    if not isinstance(scale, int | float):
        raise checkpoint.error(f"have logit_scale = {scale!r} in config.json; it must be a number.")
    use_models_head = bool(config.get("original_lm_head"))
    names: dict[str, str | None] = {}
    heads, layers = {-1}, {-1}
    sizes, outputs = list[int](), list[int]()
    for name, shape in checkpoint.shapes.items():
        bare = _PREFIX.sub("", name)
        if found := _BLOCK.fullmatch(bare) or _HEAD.fullmatch(bare):
            head, layer = int(found["head"] or found["vllm"]), int(found["layer"] or found["vllm_layer"] or 0)
            own_head = found.re is _HEAD
            heads.add(head)
            if head >= num_heads or (own_head and use_models_head):
                names[name] = None
            elif own_head:
                names[name] = f"lm_heads.{head}.weight"
                outputs += shape[:1]
            else:
                names[name] = f"blocks.{head}.{layer}.{found['kind']}"
                sizes += shape[-1:]
                layers.add(layer)
        elif bare in (TOKEN_MAP, "lm_head.weight"):
            names[name] = None
    if not sizes:
        example = "called as a Medusa head's, as '0.0.linear.weight'"
        raise checkpoint.error(f"have no tensor that is {example}; use such heads.")
    _check_numbers(checkpoint, max(heads) + 1, max(layers) + 1, num_heads)
    bias = any(ours is not None and ours.endswith("bias") for ours in names.values())
    return MedusaShape(num_heads, max(layers) + 1, sizes[0], outputs[0] if outputs else None, bias, scale), names


def _check_numbers(checkpoint: HeadCheckpoint, num_heads: int, num_layers: int, wanted: int) -> None:
    config = checkpoint.config
    said = config.get("medusa_num_heads", config.get("num_heads", num_heads))
    said_layers = config.get("medusa_num_layers", config.get("num_hidden_layers", num_layers))
    if said != num_heads or said_layers != num_layers:
        raise checkpoint.error(
            f"are {said} of {said_layers} layers by config.json, and its tensors are of {num_heads} of {num_layers}: "
            "they don't belong together. Fetch both again."
        )
    if num_heads < wanted:
        raise checkpoint.error(
            f"are {num_heads}, and each drafts one token: num_speculative_tokens, or the depth of "
            f"speculative_token_tree, is {wanted}. Lower it."
        )


def read_heads(
    checkpoint: HeadCheckpoint, model: ModelConfig, num_heads: int
) -> tuple[MedusaShape, dict[str, str | None]]:
    """The first heads of a checkpoint, held against the model, and each tensor's name here.

    Raises:
        ConfigError: they are no Medusa heads. ModelLoadError: they are another model's, or fewer.
    """
    checkpoint.made_for("medusa")
    hidden_size = checkpoint.number("hidden_size", default=model.hidden_size)
    vocab_size = checkpoint.number("vocab_size", default=model.vocab_size)
    num_layers = checkpoint.number("medusa_num_layers", "num_hidden_layers", default=1)
    shape, names = MedusaShape(num_heads, num_layers, hidden_size), {}
    if checkpoint.source is not None:
        shape, names = read_shape(checkpoint, num_heads)
    for found in (hidden_size, shape.hidden_size):
        checkpoint.hold("hidden size", found, model.hidden_size, model.model)
    num_outputs = shape.num_outputs or vocab_size
    mapped = checkpoint.shapes.get(TOKEN_MAP) == (num_outputs,)
    for found in (vocab_size, vocab_size if mapped else num_outputs):
        checkpoint.hold("vocabulary", found, model.vocab_size, model.model)
    return shape, names


def read_token_map(checkpoint: HeadCheckpoint, shape: MedusaShape, vocab_size: int) -> Tensor | None:
    """Which token each of a head's own outputs stands for; None where that is its number.

    Raises:
        ModelLoadError: one that the model's vocabulary has not.
    """
    if shape.num_outputs is None or shape.num_outputs == vocab_size:
        return None
    found = checkpoint.tensor(TOKEN_MAP).long()
    if found.min() < 0 or found.max() >= vocab_size:
        raise checkpoint.error(f"have a {TOKEN_MAP} with ids outside the model's vocabulary of {vocab_size}.")
    return found


class MedusaHeads(nn.Module):
    """The heads, called with the hidden states [R, H] from which the newest tokens were drawn."""

    def __init__(self, shape: MedusaShape, builder: Builder) -> None:
        super().__init__()
        size = shape.hidden_size
        self.shape, self.dtype = shape, builder.context.dtype
        self._blocks = [
            [builder.linear(f"blocks.{head}.{layer}", size, size, bias=shape.bias) for layer in range(shape.num_layers)]
            for head in range(shape.num_heads)
        ]
        self._heads: list[Linear] = []
        if shape.num_outputs is not None:
            self._heads = [builder.linear(f"lm_heads.{i}", size, shape.num_outputs) for i in range(shape.num_heads)]
        self.blocks = nn.ModuleList(nn.ModuleList(block) for block in self._blocks)
        self.lm_heads = nn.ModuleList(self._heads)

    def forward(self, hidden: Tensor, num_heads: int) -> list[Tensor]:
        """Of the first heads: logits [R, V] each, or where the model's output head makes them what it is given, [R, H].

        Head j looks at the token j + 1 places after the newest one.
        """
        found: list[Tensor] = []
        for head, block in enumerate(self._blocks[:num_heads]):
            x = hidden
            for layer in block:
                x = x + ops.silu(layer(x))
            if self._heads:
                x = self._heads[head](x, wide=True)
                x = x if self.shape.scale == 1.0 else ops.scale(x, self.shape.scale)
            found.append(x)
        return found


class MedusaLogits:
    """Heads as a device runs them; called as a model is, too, with hidden states of zeros: for measurements.

    Args:
        model: whose output head serves heads that have none.
        token_map: see `read_token_map`.
        compile: makes one function of those of the first heads, as `Device.compile_heads` does.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        model: RunnableModel,
        token_map: Tensor | None,
        compile: Callable[[Callable[[Tensor], Sequence[Tensor]], int], Callable[[Tensor], Tensor]],
    ) -> None:
        self.vocab_size = model.vocab_size
        self._heads, self._model, self._token_map, self._compile = heads, model, token_map, compile
        self._programs: dict[int, Callable[[Tensor], Tensor]] = {}  # by number of heads

    def __call__(self, input_ids: Tensor, step: Step) -> Tensor:
        size, dtype = self._heads.shape.hidden_size, self._heads.dtype
        return torch.zeros(len(input_ids), size, dtype=dtype, device=input_ids.device)

    def compute_logits(self, hidden: Tensor, adapters: AdapterBatch | None = None) -> Tensor:
        """Of all heads."""
        return self.first(hidden, self._heads.shape.num_heads)

    def first(self, hidden: Tensor, num_heads: int) -> Tensor:
        """[R, H] -> [R * num_heads, V]: of the first heads, one row's after another's."""
        if num_heads not in self._programs:
            self._programs[num_heads] = self._compile(partial(self._heads, num_heads=num_heads), hidden.shape[1])
        found = self._programs[num_heads](hidden).flatten(0, 1)
        if self._heads.shape.num_outputs is None:
            return self._model.compute_logits(found)
        return found if self._token_map is None else spread_logits(found, self._token_map, self.vocab_size)
