"""How quantized checkpoints lay out the numbers of a matrix: bits in integers, groups of scales, zero points, curves.

Each reader takes the tensors of one matrix and gives `Numbers`, whose values are what the format's own library makes of
them. `quire.models.quantized` finds the tensors; nothing here knows names of modules, files or configurations.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.quantization.grouped import PIECE, PIECE_BYTES

CURVES = ("nf4", "fp4", "e2m1")  # by their numbers in the kernels
_NF4 = (
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334)
    + (-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    + (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
)
_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = {"nf4": _NF4, "fp4": (*_FP4, *(-x for x in _FP4)), "e2m1": (*_E2M1, *(-x for x in _E2M1))}


@dataclass(frozen=True)
class Numbers:
    """A matrix [N, K] as (number of a code - zero) * scale.

    Attributes:
        codes: uint8 [N, K].
        scales: float32 [N, groups].
        zeros: [N, groups], or None for none; of integers only.
        group: columns that share a scale, or for each column its group, int64 [K].
        kind: "integer", "float8" (e4m3) or one of CURVES.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int | Tensor
    kind: str = "integer"

    def columns(self) -> Tensor:
        """The group of each column, int64 [K]."""
        return self.group if isinstance(self.group, Tensor) else torch.arange(self.codes.shape[1]) // self.group

    def dense(self, dtype: torch.dtype, rows_at_once: int = 512) -> Tensor:
        """The values, worked out in float32 and rounded once."""
        columns, out = self.columns(), torch.empty(self.codes.shape, dtype=dtype)
        for low in range(0, len(out), rows_at_once):
            rows = slice(low, low + rows_at_once)
            values = self._values(self.codes[rows])
            if self.zeros is not None:
                values -= self.zeros[rows].float()[:, columns]
            out[rows] = values.mul_(self.scales[rows][:, columns])
        return out

    def blocks(self, eight_bits: bool, span: int) -> Tensor:
        """As rows of the kernels' own blocks, whose scales are shared by `span` columns: uint8 [N, bytes of a row].

        Raises:
            ValueError: columns that have to share a scale have several.
        """
        columns = self.columns()
        num_rows, num_columns = self.codes.shape
        padded = torch.nn.functional.pad(columns, (0, -num_columns % span), value=int(columns[-1])).view(-1, span)
        if not torch.equal(padded, padded[:, :1].expand_as(padded)):
            raise ValueError(f"scales are scattered over columns, where {span} ones after another should share one")
        pieces = columns[::PIECE]
        rows = torch.zeros(num_rows, len(pieces), PIECE_BYTES, dtype=torch.uint8)
        codes, zeros = self.codes, self.zeros
        if self.kind in CURVES:
            zeros = torch.full_like(self.scales, CURVES.index(self.kind))
        elif self.kind == "integer" and eight_bits:  # signed there
            codes, zeros = codes ^ 128, (0 if zeros is None else zeros.int()) - torch.full_like(self.scales, 128)
        rows[:, :, :PIECE] = codes.view(num_rows, -1, PIECE)
        scales = self.scales[:, pieces]
        if self.kind == "float8":  # codes that are no numbers have to show
            broken = (codes & 127 == 127).view(num_rows, -1, PIECE).any(2)
            scales = scales.masked_fill(broken, math.nan)
        rows[:, :, PIECE : PIECE + 4] = _bytes(scales)
        if zeros is not None:
            rows[:, :, PIECE + 4] = zeros[:, pieces].to(torch.int8).view(torch.uint8)
        return rows.flatten(1)

    def whole_rows(self) -> Tensor:
        """As rows of one scale, for the kernels' W8A8: codes, which are signed ones plus 128, and the scale's bytes."""
        return torch.cat([self.codes, _bytes(self.scales).flatten(1)], dim=1)

    def _values(self, codes: Tensor) -> Tensor:
        if self.kind == "integer":
            return codes.float()
        if self.kind == "float8":
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        return torch.tensor(_VALUES[self.kind])[codes.int()]


def _bytes(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.uint8).view(*scales.shape, 4)


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The last dimension's int32 as a stream of `size` codes of so many bits, lowest first: uint8 [..., size]."""
    if 32 % bits == 0:
        stream = packed.contiguous().view(torch.uint8)
        if bits < 8:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
            stream = (stream.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)
        return stream[..., :size]
    words = torch.nn.functional.pad(packed, (0, 1)).long() & 0xFFFFFFFF
    first = torch.arange(size) * bits
    word, shift = first // 32, first % 32
    wide = words[..., word] | (words[..., word + 1] & (1 << bits) - 1) << 32
    return (wide >> shift & (1 << bits) - 1).to(torch.uint8)


def read_gptq(tensors: Mapping[str, Tensor], bits: int, group: int, plus_one: bool) -> Numbers:
    """`qweight` int32 [K * bits / 32, N], `qzeros` [groups, N * bits / 32], `scales` [groups, N], `g_idx` [K] or none.

    Args:
        plus_one: zeros are stored less one, as the first version does.
    """
    scales = tensors["scales"].t().float()
    num_columns = tensors["qweight"].shape[0] * 32 // bits
    zeros = unpack(tensors["qzeros"], bits, scales.shape[0]).t()
    if plus_one:
        zeros = zeros + 1 & (1 << bits) - 1
    index = tensors.get("g_idx")
    columns: int | Tensor = group if index is None else index.long()
    if isinstance(columns, Tensor) and (int(columns.min()) < 0 or int(columns.max()) >= scales.shape[1]):
        raise ValueError(f"g_idx has groups outside of the {scales.shape[1]} that have scales")
    return Numbers(unpack(tensors["qweight"].t(), bits, num_columns), scales, zeros, columns)


_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where the eight codes of an integer are in it


def read_awq(tensors: Mapping[str, Tensor], group: int, gemv: bool) -> Numbers:
    """Four bits. gemm: `qweight` int32 [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N], eights interleaved.

    gemv: [N, K / 8], [N, words for the groups], [N, groups and more], in order.
    """
    codes, scales = tensors["qweight"], tensors["scales"].float()
    if gemv:
        num_groups = -(-codes.shape[1] * 8 // group)
        zeros = unpack(tensors["qzeros"], 4, num_groups) if "qzeros" in tensors else None
        codes, scales = unpack(codes, 4, codes.shape[1] * 8), scales[:, :num_groups]
    else:
        codes, scales = _awq_rows(codes), scales.t()
        zeros = _awq_rows(tensors["qzeros"]) if "qzeros" in tensors else None
    return Numbers(codes, scales, torch.full_like(scales, 8) if zeros is None else zeros, group)


def _awq_rows(packed: Tensor) -> Tensor:
    """int32 [K, N / 8] -> uint8 [N, K]."""
    codes = unpack(packed, 4, packed.shape[1] * 8).view(packed.shape[0], -1, 8)[:, :, _AWQ_ORDER]
    return codes.flatten(1).t().contiguous()


def read_packed(tensors: Mapping[str, Tensor], bits: int, num_columns: int, group: int) -> Numbers:
    """compressed-tensors' pack-quantized: `weight_packed` int32 [N, K * bits / 32], codes plus half of their range.

    `weight_scale` [N, groups], `weight_zero_point` packed along N, or int8 as the codes, or none; `weight_g_idx`.
    """
    scales = tensors["weight_scale"].float()
    zeros, half = tensors.get("weight_zero_point"), 1 << bits - 1
    if zeros is None:
        zeros = torch.full_like(scales, half)
    else:
        zeros = unpack(zeros.t(), bits, scales.shape[0]).t() if zeros.dtype == torch.int32 else zeros.int() + half
    columns = tensors["weight_g_idx"].long() if "weight_g_idx" in tensors else group
    return Numbers(unpack(tensors["weight_packed"], bits, num_columns), scales, zeros, columns)


def read_bytes(tensors: Mapping[str, Tensor], rows: int, group: int) -> Numbers:
    """`weight` [N, K] of float8 or int8, and a scale for each `rows` x `group` of it; `weight_zero_point` or none."""
    weight = tensors["weight"]
    found = next(tensors[name] for name in ("weight_scale", "weight_scale_inv", "SCB") if name in tensors)
    scales = found.float() / 127 if "SCB" in tensors else found.float()
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    scales = scales.repeat_interleave(rows, 0)[: len(weight)]
    if weight.dtype != torch.int8:
        return Numbers(weight.view(torch.uint8), scales, None, group, "float8")
    zeros = torch.full_like(scales, 128)
    if "weight_zero_point" in tensors:
        zeros += tensors["weight_zero_point"].reshape(-1, 1 if found.dim() < 2 else found.shape[-1])
    return Numbers(weight.view(torch.uint8) ^ 128, scales, zeros, group)


def read_four_bits(tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Numbers:
    """bitsandbytes' 4 bits: bytes of two codes, the first one high; a scale for some of them one after the other.

    Raises:
        ValueError: the description beside them (a text in JSON) is none, or not of such a matrix.
    """
    state = four_bits_state(next(tensor for name, tensor in tensors.items() if "quant_state" in name))
    if tuple(state["shape"]) != shape:
        raise ValueError(f"its description has the shape {state['shape']}, not {list(shape)}")
    absmax = tensors["weight.absmax"]
    if absmax.dtype == torch.uint8:
        nested, size = tensors["weight.nested_absmax"].float(), state["nested_blocksize"]
        absmax = tensors["weight.nested_quant_map"].float()[absmax.int()]
        absmax = absmax * nested.repeat_interleave(size)[: absmax.numel()] + state["nested_offset"]
    packed, blocksize = tensors["weight"].flatten(), state["blocksize"]
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten().view(shape)
    absmax, columns = absmax.float().flatten(), shape[1]
    if columns % blocksize == 0:
        return Numbers(codes, absmax.view(shape[0], -1), None, blocksize, state["quant_type"])
    each = absmax.repeat_interleave(blocksize)[: codes.numel()].view(shape)  # blocks go on in the next row
    return Numbers(codes, each, None, 1, state["quant_type"])


def four_bits_state(text: Tensor) -> dict:
    """What bitsandbytes says of a matrix, checked."""
    state = json.loads(bytes(text.tolist()))
    if state["quant_type"] not in ("nf4", "fp4") or not 0 < int(state["blocksize"]) <= 2**20:
        raise ValueError(f"quant_type is {state['quant_type']!r} with blocks of {state['blocksize']!r}")
    return state


def read_mxfp4(
    tensors: Mapping[str, Tensor], num_columns: int, codes: str = "blocks", exponents: str = "scales"
) -> Numbers:
    """Tensors of two names: bytes of two codes, the first one low; exponents of two, a byte each, for 32 columns."""
    packed = tensors[codes].reshape(-1, num_columns // 2)
    scales = tensors[exponents].view(torch.uint8).reshape(len(packed), -1).int()
    scales = torch.ldexp(torch.ones(scales.shape), scales - 127)
    return Numbers(torch.stack([packed & 15, packed >> 4], 2).flatten(1), scales, None, 32, "e2m1")
