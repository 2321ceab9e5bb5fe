"""The operations that layers are made of: one name each, whatever carries it out.

Given tensors, plain torch computes, which is the meaning of each operation. Given a builder's values in place of
tensors, the operation appends itself to a program of native kernels (`quire.ops.native.builder`). Layers call these and
don't see the difference (`quire.ops.table`). Nothing here knows models, batches or caches beyond what it is given.
"""

from quire.ops.activation import gelu as gelu
from quire.ops.activation import gelu_and_mul as gelu_and_mul
from quire.ops.activation import gelu_tanh as gelu_tanh
from quire.ops.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
from quire.ops.activation import relu as relu
from quire.ops.activation import silu as silu
from quire.ops.activation import silu_and_mul as silu_and_mul
from quire.ops.add import add as add
from quire.ops.attention import attend as attend
from quire.ops.attention import paged_attention as paged_attention
from quire.ops.embedding import embedding as embedding
from quire.ops.experts import Experts as Experts
from quire.ops.experts import Owners as Owners
from quire.ops.experts import mix as mix
from quire.ops.experts import route as route
from quire.ops.gather import gather as gather
from quire.ops.gather import gather_rows as gather_rows
from quire.ops.gather import own_rows as own_rows
from quire.ops.gather import reduce as reduce
from quire.ops.host import host as host
from quire.ops.host import on_rows as on_rows
from quire.ops.linear import linear as linear
from quire.ops.lora import Adapted as Adapted
from quire.ops.lora import LoraLayer as LoraLayer
from quire.ops.lora import LoraMatrices as LoraMatrices
from quire.ops.lora import TokenSlots as TokenSlots
from quire.ops.lora import lora as lora
from quire.ops.lora import lora_rows as lora_rows
from quire.ops.norm import add_rms_norm as add_rms_norm
from quire.ops.norm import layer_norm as layer_norm
from quire.ops.norm import rms_norm as rms_norm
from quire.ops.quantized import integer_linear as integer_linear
from quire.ops.quantized import quantized_linear as quantized_linear
from quire.ops.rope import AttentionSpec as AttentionSpec
from quire.ops.rope import prepare as prepare
from quire.ops.rope import rotary as rotary
from quire.ops.rope import write_kv as write_kv
from quire.ops.scale import scale as scale
from quire.ops.softcap import softcap as softcap
