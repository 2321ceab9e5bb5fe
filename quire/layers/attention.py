"""The attention block: projections around one call of the attention backend. Models build it, layers run it."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from quire.attention.base import AttentionBackend, AttentionSpec
from quire.attention.step import Step
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.quantization.base import CheckpointSlot, TensorForm


class SelfAttention(nn.Module):
    """Projection, attention as its spec describes it, output projection.

    Args:
        qkv_proj: H -> (Hq + 2 Hkv) * D, queries first.
        o_proj: Hq * D -> H.
        q_norm, k_norm: the modules whose weights the spec names, if any, so that a checkpoint fills them.
        sinks: of all heads, of which the spec has those that are here.

    Attributes:
        kv_start: where keys begin among the features that qkv_proj makes, of all ranks together.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        qkv_proj: nn.Module,
        o_proj: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.backend, self.spec, self.qkv_proj = backend, spec, qkv_proj
        self.o_proj, self.q_norm, self.k_norm = o_proj, q_norm, k_norm
        self.sinks = sinks
        self.kv_start = o_proj.in_features

    def checkpoint_slots(self, path: str) -> Iterator[CheckpointSlot]:
        """The place of the tensor that is its own; `path` is where the module stands."""
        if self.sinks is not None:
            yield CheckpointSlot(f"{path}.sinks", TensorForm(tuple(self.sinks.shape)), self.sinks.copy_)

    def forward(self, x: Tensor | Sequence[Tensor], step: Step) -> Tensor:
        """[T, H], or several side by side where the projection joins them, -> [T, H]."""
        return self.o_proj(self.backend.attend(self.qkv_proj(x, step), self.spec, step), step)
