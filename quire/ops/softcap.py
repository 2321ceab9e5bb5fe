"""Numbers kept within bounds, smoothly: of logits here, of attention's scores within `paged_attention`."""

import ctypes

from torch import Tensor

from quire.ops.native.builder import Value
from quire.ops.native.structs import instruction
from quire.ops.rows import in_blocks
from quire.ops.table import op


@op
def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, in fp32, rounded once."""
    return in_blocks(lambda rows: (rows.float() / cap).tanh_().mul_(cap), x.shape[-1], x)


@instruction("softcap")
class SoftcapSpec(ctypes.Structure):
    _fields_ = [("size", ctypes.c_int64), ("cap", ctypes.c_float)]


@softcap.native
def _build(x: Value, cap: float) -> Value:
    return x.builder.append(SoftcapSpec(x.width, cap), [x], x.width, x.type)
