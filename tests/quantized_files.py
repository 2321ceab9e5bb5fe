"""Quantized checkpoints that tests write: each with the tensors of its format and the values that these stand for.

The formulas are the published ones of each format, written here once more, and slowly; nothing of Quire's is used.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DEMO = Path(__file__).parent.parent / "quire" / "demo"
Tensors = dict[str, Tensor]
Quantizer = Callable[[str, Tensor], tuple[Tensors, Tensor]]  # name, weight -> tensors by suffix, float32 values


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """The last dimension as a stream of bits in int32, lowest first."""
    bools = (codes.long().unsqueeze(-1) >> torch.arange(bits)) & 1
    bools = bools.flatten(-2)
    bools = torch.nn.functional.pad(bools, (0, -bools.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (bools << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def integers(weight: Tensor, bits: int, group: int, symmetric: bool, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales (f16 values) and zeros [N, groups] of what `columns` says is a group each."""
    num_groups, most = int(columns.max()) + 1, 2**bits - 1
    codes = torch.zeros(weight.shape, dtype=torch.long)
    scales, zeros = torch.zeros(len(weight), num_groups), torch.zeros(len(weight), num_groups, dtype=torch.long)
    for number in range(num_groups):
        part = weight[:, columns == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / most).clamp(min=1e-4).half().float()
        zero = torch.full_like(scale, (most + 1) // 2) if symmetric else (-low / scale).round().clamp(0, most)
        codes[:, columns == number] = (part / scale[:, None] + zero[:, None]).round().clamp(0, most).long()
        scales[:, number], zeros[:, number] = scale, zero.long()
    return codes, scales, zeros


def gptq(
    bits: int = 4, group: int = 64, symmetric: bool = False, order: bool = False, version: str = "gptq"
) -> Quantizer:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_columns = weight.shape[1]
        size = num_columns if group == -1 else group
        columns = torch.arange(num_columns) // size
        if order:
            columns = columns[torch.randperm(num_columns, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros = integers(weight, bits, size, symmetric, columns)
        stored = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
        values = (codes - zeros[:, columns]).float() * scales[:, columns]
        return {
            "qweight": pack_bits(codes, bits).t().contiguous(),
            "qzeros": pack_bits(stored.t(), bits),
            "scales": scales.t().contiguous().half(),
            "g_idx": columns.int(),
        }, values

    return quantize


def awq(group: int = 64, version: str = "gemm", zero_point: bool = True) -> Quantizer:
    def interleaved(rows: Tensor) -> Tensor:
        """[.., N] by eights -> int32 [.., N / 8], whose nibbles are 0, 2, 4, 6, 1, 3, 5, 7 of them."""
        eights = rows.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_bits(eights.flatten(-2), 4)

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = integers(weight, 4, group, not zero_point, columns)
        values = (codes - zeros[:, columns]).float() * scales[:, columns]
        if version.lower() == "gemm":
            found = {"qweight": interleaved(codes.t()), "scales": scales.t().contiguous().half()}
            return found | ({"qzeros": interleaved(zeros.t())} if zero_point else {}), values
        padding = {64: 2, 32: 4}.get(group, 1)
        words = -(-(weight.shape[1] // group) // 8)
        words = -(-words // padding) * padding
        wide = torch.nn.functional.pad(scales, (0, words * 8 - scales.shape[1]))
        zeros = torch.nn.functional.pad(zeros, (0, words * 8 - zeros.shape[1]))
        return {"qweight": pack_bits(codes, 4), "qzeros": pack_bits(zeros, 4), "scales": wide.half()}, values

    return quantize


def fp8(kind: str = "tensor", block: tuple[int, int] = (128, 128)) -> Quantizer:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": block}[kind]
        height, width = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = torch.zeros(height * rows, width * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = padded.view(height, rows, width, columns).abs().amax((1, 3)) / 448
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        if kind == "tensor":
            scales = scales.reshape(())
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        return {"weight": codes, name: scales}, codes.float() * wide

    return quantize


def packed(
    bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False, dtype: Any = torch.bfloat16
) -> Quantizer:
    """compressed-tensors' pack-quantized; group -1: a scale a row."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        num_columns = weight.shape[1]
        columns = torch.arange(num_columns) // (num_columns if group == -1 else group)
        if order:
            columns = columns[torch.randperm(num_columns, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros = integers(weight, bits, group, symmetric, columns)
        scales = scales.to(dtype)
        found = {
            "weight_packed": pack_bits(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            found["weight_zero_point"] = pack_bits(zeros.t(), bits).t().contiguous()
        if order:
            found["weight_g_idx"] = columns.int()
        return found, (codes - zeros[:, columns]).float() * scales.float()[:, columns]

    return quantize


def int8(group: int = -1) -> Quantizer:
    """compressed-tensors' int-quantized: a scale a row."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()

    return quantize


NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25]
FP4 += [-number for number in FP4]


def four_bits(kind: str = "nf4", blocksize: int = 64, nested: bool = False) -> Quantizer:
    """bitsandbytes'."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        curve = torch.tensor(NF4 if kind == "nf4" else FP4)
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % blocksize)).view(-1, blocksize)
        absmax = flat.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": blocksize,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        found: Tensors = {"weight.quant_map": curve}
        if nested:
            offset, size = float(absmax.mean()), 256
            table = torch.linspace(-1, 1, 256)
            centred = absmax - offset
            most = torch.stack([part.abs().max() for part in centred.split(size)])
            scaled = centred / most.repeat_interleave(size)[: len(centred)]
            codes = (scaled[:, None] - table).abs().argmin(1).to(torch.uint8)
            absmax = table[codes.int()] * most.repeat_interleave(size)[: len(centred)] + offset
            found |= {"weight.absmax": codes, "weight.nested_absmax": most, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
        else:
            found["weight.absmax"] = absmax
        codes = torch.cat([(part[:, :, None] - curve).abs().argmin(2) for part in (flat / absmax[:, None]).split(512)])
        values = (curve[codes] * absmax[:, None]).flatten()[: weight.numel()].view(weight.shape)
        pairs = codes.flatten()[: weight.numel()].view(-1, 2)
        found["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        found[f"weight.quant_state.bitsandbytes__{kind}"] = text
        return found, values

    return quantize


def rows_of_eight_bits() -> Quantizer:
    """bitsandbytes' int8."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        most = weight.abs().amax(1)
        codes = (weight * (127 / most[:, None])).round().to(torch.int8)
        found = {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return found, codes.float() * (most / 127)[:, None]

    return quantize


def mxfp4(names: tuple[str, str] = ("weight_blocks", "weight_scales")) -> Quantizer:
    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        curve = torch.cat([numbers, -numbers])
        groups = weight.view(len(weight), -1, 32)
        exponents = (groups.abs().amax(2) / 6).log2().ceil().clamp(-127, 127)
        scales = 2.0**exponents
        codes = (groups[..., None] / scales[..., None, None] - curve).abs().argmin(3)
        values = (curve[codes] * scales[..., None]).flatten(1)
        pairs = codes.view(len(weight), -1, 16, 2)
        blocks = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        if names[0] == "weight_packed":
            blocks = blocks.flatten(1)
        return {names[0]: blocks, names[1]: (exponents + 127).to(torch.uint8)}, values

    return quantize


def write(
    directory: Path,
    quantization: dict[str, Any],
    quantize: Quantizer,
    ignored: tuple[str, ...] = (),
    source: Path = DEMO,
    only: str = "",
) -> Tensors:
    """A quantized copy of the demo, of all linear layers but those named; returns what all tensors mean.

    `only`: a piece of the names of all tensors that are written.
    """
    directory.mkdir(exist_ok=True)
    tensors: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if only not in name:
            continue
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and "_proj" in name and not any(part in name for part in ignored):
            parts, values[name] = quantize(module, tensor.float())
            tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            tensors[name] = values[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    for path in source.glob("*.json"):
        if path.name != "config.json":
            (directory / path.name).write_bytes(path.read_bytes())
    return values


def write_values(directory: Path, values: Tensors, dtype: torch.dtype, source: Path = DEMO) -> None:
    """The same model, unquantized."""
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in values.items()}, directory / "model.safetensors")
    for path in source.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())


def _compressed(
    kind: str, bits: int, *, symmetric: bool = True, strategy: str, group: int | None = None, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": group, **more}
    weights["type"] = "float" if kind == "float-quantized" else "int"
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head"],
    }


def _gptq(
    bits: int = 4, group: int = 64, symmetric: bool = False, order: bool = False, version: str = "gptq"
) -> tuple[dict[str, Any], Quantizer]:
    stated = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order}
    return stated | {"checkpoint_format": version}, gptq(bits, group, symmetric, order, version)


def _awq(group: int, version: str, zero_point: bool = True) -> tuple[dict[str, Any], Quantizer]:
    stated = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version, "zero_point": zero_point}
    return stated, awq(group, version, zero_point)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# What is quantized how: quantization_config, quantizer.
CASES: dict[str, tuple[dict[str, Any], Quantizer]] = {
    "gptq-2": _gptq(2, 32),
    "gptq-3": _gptq(3, 64),
    "gptq-4": _gptq(4, 128),
    "gptq-4-sym": _gptq(4, 64, True),
    "gptq-4-row": _gptq(4, -1, version="gptq_v2"),
    "gptq-4-order": _gptq(4, 64, order=True),
    "gptq-8": _gptq(8, 32),
    "gptq-8-row": _gptq(8, -1, version="gptq_v2"),
    "gptq-odd": _gptq(4, 48),
    "awq-gemm": _awq(64, "GEMM"),
    "awq-gemm-sym": _awq(32, "gemm", False),
    "awq-gemv": _awq(64, "gemv"),
    "fp8-tensor": (_FP8, fp8("tensor")),
    "fp8-channel": (_FP8, fp8("channel")),
    "fp8-block": (_FP8 | {"weight_block_size": [128, 128]}, fp8("block")),
    "fp8-odd": (_FP8 | {"weight_block_size": [48, 80]}, fp8("block", (48, 80))),
    "ct-w4": (_compressed("pack-quantized", 4, strategy="group", group=32), packed(4, 32)),
    "ct-w4-zeros": (
        _compressed("pack-quantized", 4, symmetric=False, strategy="group", group=64),
        packed(4, 64, False),
    ),
    "ct-w4-row": (_compressed("pack-quantized", 4, strategy="channel"), packed(4, -1)),
    "ct-w4-order": (
        _compressed("pack-quantized", 4, strategy="group", group=64, actorder="group"),
        packed(4, 64, order=True),
    ),
    "ct-w8": (_compressed("pack-quantized", 8, strategy="group", group=64), packed(8, 64, dtype=torch.float32)),
    "ct-int8": (_compressed("int-quantized", 8, strategy="channel"), int8()),
    "ct-fp8": (_compressed("float-quantized", 8, strategy="channel"), fp8("channel")),
    "ct-mxfp4": (
        _compressed("mxfp4-pack-quantized", 4, strategy="group", group=32),
        mxfp4(("weight_packed", "weight_scale")),
    ),
    "bnb-nf4": (_BNB, four_bits("nf4")),
    "bnb-fp4": (_BNB, four_bits("fp4")),
    "bnb-nested": (_BNB, four_bits("nf4", nested=True)),
    "bnb-odd": (_BNB, four_bits("nf4", 512)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows_of_eight_bits()),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4()),
}
DENSE = ("gptq-4-order", "gptq-odd", "fp8-odd", "ct-w4-order", "bnb-odd")  # have no form in blocks
