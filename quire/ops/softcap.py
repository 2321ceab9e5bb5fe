"""Numbers kept within bounds, smoothly: of logits here, of attention's scores within `paged_attention`."""

from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.rows import in_blocks
from quire.ops.table import op


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, in fp32, rounded once."""
    return in_blocks(lambda rows: (rows.float() / cap).tanh_().mul_(cap), x.shape[-1], x)


@softcap.native
def _build(x: Value, cap: float) -> Value:
    return x.builder.append("softcap", [x], x.width, type=x.type, size=x.width, cap=cap)
