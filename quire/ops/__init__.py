"""The operations that layers are made of: one name each, whatever carries it out.

Given tensors, plain torch computes, which is the meaning of each operation. Given a builder's values in place of
tensors, the operation appends itself to a program of native kernels (`quire.ops.native.builder`). Layers call these and
don't see the difference (`quire.ops.table`). Nothing here knows models, batches or caches beyond what it is given.
"""

# ruff: noqa: F401 - others import these from here

from quire.ops.activation import gelu, gelu_and_mul, gelu_tanh, gelu_tanh_and_mul, relu, silu, silu_and_mul, swiglu_oai
from quire.ops.activation import relu2 as relu2
from quire.ops.attention import attend, paged_attention
from quire.ops.elementwise import add, scale, softcap
from quire.ops.embedding import embedding
from quire.ops.experts import Experts, Owners, Routing, mix, mixture, route
from quire.ops.gather import gather, gather_rows, own_rows, reduce
from quire.ops.linear import linear
from quire.ops.lora import Adapted, AdaptedRows, LoraLayer, LoraMatrices, TokenSlots, lora, lora_rows
from quire.ops.norm import add_rms_norm, layer_norm, rms_norm, rms_norm_first
from quire.ops.quantized import gated_linear, integer_linear, quantized_linear
from quire.ops.rope import AttentionSpec, prepare, rotary, write_kv
