"""A model layer by layer, to be quantized: each read, run and watched by itself.

`quire quantize` makes a `Layer` of one after another. It is a stage of the models that are served, so every family has
it; what it is run on are the hidden states that the layers before it made. Must not know weight formats.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.attention.base import AttentionBatch
from quire.attention.registry import select_backend
from quire.attention.step import Step
from quire.config.model import ModelConfig
from quire.config.worker import Stage
from quire.errors import ModelLoadError
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.models.registry import build_model
from quire.models.weights import TensorSource
from quire.quantization.base import MatrixShape, Unquantized
from quire.quantization.registry import WeightFormats

_BLOCK_SIZE = 16


class _Whole(Unquantized):
    """Multiplied by torch at once and not tile by tile: quicker, as nothing here depends on the last bit."""

    def apply(self, weights: Mapping[str, Tensor], shape: MatrixShape, x: Tensor, *, wide: bool = False) -> Tensor:
        return F.linear(x, weights["weight"], weights.get("bias"))

    def operands(self, weights: Mapping[str, Tensor]) -> None:
        return None


class Inputs(NamedTuple):
    """What a linear layer was given: the sum of x xᵀ [K, K], and of the magnitudes [K]."""

    hessian: Tensor
    activity: Tensor

    def add(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Count the rows of an input [T, K] in."""
        self.hessian.addmm_(given[0].t(), given[0])
        self.activity.add_(given[0].abs().sum(0))


class Part(NamedTuple):
    """A linear layer that is quantized, as checkpoints have it."""

    path: str
    module: Linear
    names: list[str]  # in the checkpoint, of what it is merged from
    turned: bool  # a checkpoint has [K, N]


class Survey:
    """A model that has no weights yet, and what of it is quantized.

    Args:
        stage: the layers that there are; None for all.
    """

    def __init__(self, config: ModelConfig, stage: Stage | None = None) -> None:
        self.backend, formats = select_backend("reference"), WeightFormats(_Whole(), _Whole(), _Whole())
        self.model = build_model(config, self.backend, formats, stage=stage)
        self.parts: dict[str, Part] = {}
        self.plain: list[str] = []  # names in the checkpoint of linear layers that stay as they are
        for path, module in self.model.named_modules():
            if not isinstance(module, Linear):
                continue
            names = [self.model.form.checkpoint_name(slot.name) for slot in module.checkpoint_slots(path)]
            names = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
            if module.method is formats.linear and ".layers." in path:
                turned = f"{names[0]}.weight".endswith(self.model.form.transposed)
                self.parts[path] = Part(path, module, names, turned)
            elif path != "lm_head":
                self.plain += names


class Layer(Survey):
    """One layer, with what stands before or after the stack where it is the first or last.

    Attributes:
        weights: by their names in checkpoints, float32.
        dtypes: those that they had.
    """

    def __init__(self, config: ModelConfig, index: int, source: TensorSource) -> None:
        super().__init__(config, Stage(index, range(index, index + 1), index == 0, index == config.num_layers - 1))
        self.path = f"model.layers.{index}"
        self.norms = {path: module for path, module in self.model.named_modules() if isinstance(module, Norm)}
        self.dtypes: dict[str, torch.dtype] = {}
        weights, needed, canonical = {}, self.model.checkpoint_shapes(), self.model.form.canonical
        for spec, tensor in source.stream({each.name for each in source.specs if canonical(each.name) not in needed}):
            if not tensor.isfinite().all():
                raise ModelLoadError(f"{spec.file}: tensor {spec.name!r} has values that are not finite.")
            name = canonical(spec.name)
            weights[name], self.dtypes[name] = tensor.to(torch.float32, copy=True), tensor.dtype
        if missing := sorted(needed.keys() - weights.keys()):
            raise ModelLoadError(f"the checkpoint of {config.model!r} lacks {missing[0]!r}; fetch it again.")
        self.fill(weights)

    def fill(self, weights: dict[str, Tensor]) -> None:
        """Have these weights."""
        self.weights = weights
        self.model.load_weights(weights.items())

    def matrices(self, part: Part) -> list[Tensor]:
        """A checkpoint's matrices [N, K], one for each of the part's names; views."""
        weights = [self.weights[f"{name}.weight"] for name in part.names]
        return [weight.t() for weight in weights] if part.turned else weights

    def run(self, ids: Tensor, x: Tensor | None) -> Tensor:
        """A sequence's hidden states [T, H]; `x` are those before this layer, None before the first."""
        count, [kept] = len(ids), self.model.cache_layers
        table, slots = torch.arange(-(-count // _BLOCK_SIZE)), torch.arange(count)
        batch = AttentionBatch(torch.tensor([0, count]), torch.tensor([count]), table[None], slots, _BLOCK_SIZE)
        shape = self.backend.kv_cache_shape(len(table), _BLOCK_SIZE, kept.num_kv_heads, kept.head_dim)
        return self.model(ids, Step(slots.int(), [torch.zeros(shape)], [self.backend.build(batch)], incoming=x))

    def run_all(self, ids: list[Tensor], states: list[Tensor] | None) -> list[Tensor]:
        """Each sequence's."""
        return [self.run(row, None if states is None else states[i]) for i, row in enumerate(ids)]

    def loss(self, ids: list[Tensor], states: list[Tensor]) -> float:
        """Mean cross entropy of the tokens, in nats, by what leaves the last layer."""
        logits = (self.model.compute_logits(x[:-1]).float() for x in states)
        return sum(float(F.cross_entropy(each, row[1:])) for each, row in zip(logits, ids, strict=True)) / len(ids)

    @contextmanager
    def watched(self) -> Iterator[dict[str, Inputs]]:
        """Inputs of linear layers, by path, of what is run meanwhile."""
        found: dict[str, Inputs] = {}
        handles = []
        for path, part in self.parts.items():
            size = part.module.shape.in_features
            found[path] = own = Inputs(torch.zeros(size, size), torch.zeros(size))
            handles.append(part.module.register_forward_pre_hook(own.add))
        yield found
        for handle in handles:
            handle.remove()
