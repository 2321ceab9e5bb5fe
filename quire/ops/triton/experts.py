"""Mixtures of experts on the device: the choice, the products of each expert's rows, and the sum of their answers.

The kernels of `quire.ops.route` and `mix`. Rows are sorted by expert on the device; a program finds there which expert
its tile is of. No number of rows comes to the host: the grid has room for the worst case. The sums are those of
`quire.ops.triton.linear`, and a token adds up its answers in the order of the experts' numbers.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.experts import LEAST_SUM, Experts, Routing
from quire.ops.experts import mix as reference
from quire.ops.triton.common import begin_kernel, launch, narrow
from quire.ops.triton.linear import NEIGHBOURS, finish, multiply, place
from quire.ops.triton.quantized import CODES, group_of
from quire.ops.triton.tiles import choose, processors

_COLUMNS = 1024  # of a program that adds up answers
_LOWEST, _LEAST_SUM = tl.constexpr(-1e30), tl.constexpr(LEAST_SUM)
TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit
def _route(
    scores, weights, chosen, bias, count, factor,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BY_SIGMOID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    wide = tl.load(scores + row * count + experts, experts < count, other=-float("inf")).to(tl.float32)
    if BY_SIGMOID:
        shares = tl.div_rn(1.0, 1.0 + tl.exp(-wide))
    else:
        wide = tl.exp(wide - tl.max(wide, 0))
        shares = tl.div_rn(wide, tl.sum(wide, 0))
    left = shares if bias is None else shares + tl.load(bias + experts, experts < count, other=0.0)
    left = tl.where(left == left, left, 0.0)  # of NaN, too, so many are chosen
    left = tl.where(experts < count, tl.maximum(left, _LOWEST), -float("inf"))
    taken = tl.zeros((BLOCK,), tl.int32)
    for _ in range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), experts, BLOCK), 0)
        taken = tl.where(experts == best, 1, taken)
        left = tl.where(experts == best, -float("inf"), left)
    if RENORMALIZE:
        shares = tl.div_rn(shares, tl.maximum(tl.sum(tl.where(taken > 0, shares, 0.0), 0), _LEAST_SUM))
    shares *= factor
    places = row * TOP_K + tl.cumsum(taken, 0) - 1
    tl.store(weights + places, shares, taken > 0)
    tl.store(chosen + places, experts, taken > 0)


@triton.jit(do_not_specialize=["tall"])
def _products(
    x, weights, scales, zeros, biases, order, starts, first_tiles, out, tall, num_columns, size, weight_stride,
    num_groups,
    SHARED: tl.constexpr, COUNT: tl.constexpr, EXPERTS: tl.constexpr, TYPE: tl.constexpr, BIAS: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, TURNED: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Rows `order` of `out`; of `x` each is that of SHARED rows of `out`, one after another."""
    begin_kernel()
    tile, column = place(tl.program_id(0), tall, tl.cdiv(num_columns, BLOCK_N), NEIGHBOURS)
    if tile >= tl.load(first_tiles + COUNT):
        return
    experts = tl.arange(0, EXPERTS)
    expert = tl.sum(
        tl.where(experts < COUNT, tl.load(first_tiles + 1 + experts, experts < COUNT, other=0) <= tile, 0), 0
    )
    sorted_rows = tl.load(starts + expert) + (tile - tl.load(first_tiles + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = sorted_rows < tl.load(starts + expert + 1)
    rows = tl.load(order + sorted_rows, mask, other=0)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    here = columns < num_columns
    known = tl.where(here, columns, 0)
    a = x + (rows // SHARED).to(tl.int64)[:, None] * size
    weight = tl.multiple_of(tl.load(weights + expert).to(tl.pointer_type(TYPE)), 16)  # type: ignore[arg-type]
    b = weight + known.to(tl.int64) * weight_stride
    s = tl.load(scales + expert).to(tl.pointer_type(tl.float32)) if scales is not None else None
    z = tl.load(zeros + expert).to(tl.pointer_type(tl.int8)) if zeros is not None else None
    g = known.to(tl.int64) * num_groups
    sums = multiply(
        a, mask[:, None], b, s, z, g, size, num_groups, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, CODES, GROUP, TURNED
    )
    bias = tl.load(biases + expert).to(tl.pointer_type(BIAS)) if biases is not None else None
    sums = finish(sums, None if GROUP else s, bias, known)
    places = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(places, narrow(sums, out.dtype.element_ty), mask[:, None] & here[None, :])


@triton.jit
def _add_up(answers, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    begin_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        answer = tl.load(answers + (row * TOP_K + i) * size + columns, columns < size, other=0.0)
        total += answer.to(tl.float32) * tl.load(weights + row * TOP_K + i)
    tl.store(out + row * size + columns, total, columns < size)


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """As `quire.ops.route`, each token's experts in the order of their numbers."""
    (num_rows, count), top_k = scores.shape, routing.top_k
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=scores.device)
    told = {"TOP_K": top_k, "RENORMALIZE": routing.renormalize, "BY_SIGMOID": routing.by_sigmoid}
    told |= {"BLOCK": triton.next_power_of_2(count), "num_warps": 1}
    launch(_route, (num_rows,), scores.contiguous(), weights, chosen, routing.bias, count, routing.factor, **told)
    return weights, chosen


def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """As `quire.ops.mix`, of experts in ascending order."""
    if experts.weights is None:
        return reference.reference(x, weights, chosen, experts)
    num_rows, top_k = chosen.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = torch.arange(1, experts.count + 1, dtype=flat.dtype, device=x.device)
    starts = torch.searchsorted(flat[order], ends - 1, out_int32=True)
    starts = torch.cat((starts, starts.new_full((1,), flat.numel())))
    gate_up, down = experts.weights
    inner = experts.activation(_multiply(x.contiguous(), "first", gate_up, (order, starts, top_k), experts))
    answers = _multiply(inner, "second", down, (order, starts, 1), experts)
    grid = (num_rows, -(-x.shape[1] // _COLUMNS))
    launch(_add_up, grid, answers, weights, out, x.shape[1], TOP_K=top_k, BLOCK=_COLUMNS)
    return out


def _multiply(
    x: Tensor, name: str, matrices: Sequence[Mapping[str, Tensor]], rows: tuple[Tensor, Tensor, int], experts: Experts
) -> Tensor:
    """Products of sorted rows, each with the matrix of its expert; `name` of the product, for its addresses."""
    order, starts, shared = rows
    told = {tensor: _addresses(experts, name, matrices, tensor) for tensor in matrices[0]}
    weight, scales, zeros = (matrices[0].get(tensor) for tensor in ("codes", "scales", "zeros"))
    weight = matrices[0]["weight"] if weight is None else weight
    num_columns, size = weight.shape[0], x.shape[1]
    group = group_of(weight, scales, zeros, size)
    out = torch.empty(len(order), num_columns, dtype=x.dtype, device=x.device)
    used = min(experts.count, len(order))
    bits = 4 if weight.dtype == torch.uint8 else weight.itemsize * 8
    share = -(-len(order) // experts.count)  # of an expert, if all get as many
    tiles = choose(processors(x.device), share, num_columns * max(used, 1), x.itemsize * 8, bits)
    ends = ((starts.diff() + tiles.block_m - 1) // tiles.block_m).cumsum(0, dtype=torch.int32)
    first_tiles = torch.cat((ends.new_zeros(1), ends))
    tall = min(len(order), -(-len(order) // tiles.block_m) + used)
    launch(
        *(_products, (tall * -(-num_columns // tiles.block_n),)),
        *(x, told.get("weight", told.get("codes")), told.get("scales"), told.get("zeros")),
        told.get("bias"),
        *(order, starts, first_tiles, out, tall, num_columns, size, weight.stride(0)),
        0 if scales is None else scales.shape[1],
        SHARED=shared,
        COUNT=experts.count,
        EXPERTS=triton.next_power_of_2(experts.count),
        TYPE=tl.uint8 if group else TYPES[weight.dtype],
        BIAS=TYPES[x.dtype],
        CODES=CODES.get(weight.dtype),
        GROUP=group,
        NEIGHBOURS=NEIGHBOURS,
        **tiles.constants(x),
    )
    return out


def _addresses(experts: Experts, name: str, matrices: Sequence[Mapping[str, Tensor]], tensor: str) -> Tensor:
    """Where each matrix has this tensor, int64 [experts]; told to the device once."""
    key = f"{name}.{tensor}"
    if key not in experts.addresses:
        found = [each[tensor].data_ptr() for each in matrices]
        experts.addresses[key] = torch.tensor(found, dtype=torch.int64).to(matrices[0][tensor].device)
    return experts.addresses[key]
