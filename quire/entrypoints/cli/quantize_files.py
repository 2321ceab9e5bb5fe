"""A quantized checkpoint on disk: codes packed as GPTQ, AWQ or compressed-tensors have them, config.json, the card.

`quire quantize` hands over each layer as it is done. What is read back is for `quire.quantization`. Must not know how
codes came about.
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.entrypoints.cli.quantize_codes import Codes, Scheme

SHARD_BYTES = 2**30
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Tokenizer, templates, defaults.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "additional_chat_templates/*.jinja", "*.tiktoken", "LICENSE*")
_CARD = Path(__file__).with_name("quantize_card.md")


class CheckpointWriter:
    """Writes tensors into files of about SHARD_BYTES.

    Args:
        folder: which is there, and empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, once."""
        if name not in self._names:
            self._names.add(name)
            self._waiting[name] = tensor.contiguous()
            self.num_bytes += tensor.nbytes
            if sum(each.nbytes for each in self._waiting.values()) >= SHARD_BYTES:
                self._write()

    def close(self) -> None:
        """Write what is left, and the index."""
        self._write()
        count, weight_map = len(self._shards), {}
        for i, names in enumerate(self._shards):
            shard = f"model-{i + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            (self.folder / f"{i}.safetensors").rename(self.folder / shard)
            weight_map |= dict.fromkeys(names, shard)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index)

    def _write(self) -> None:
        path = self.folder / f"{len(self._shards)}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors leaves it readable by its owner alone
        self._shards.append([*self._waiting])
        self._waiting = {}


def packed(codes: Codes, scheme: Scheme) -> dict[str, Tensor]:
    """A matrix's tensors, by the ends of their names."""
    half = codes.scales.to(scheme.scale_dtype)
    if scheme.method == "fp8":
        return {"weight": codes.codes, "weight_scale": half}
    if scheme.method == "gptq":  # which stores zeros less 1
        zeros, weight = pack(codes.zeros.t() - 1, scheme.bits), pack(codes.codes, scheme.bits).t()
        return {"qweight": weight, "qzeros": zeros, "scales": half.t(), "g_idx": codes.groups.int()}
    if scheme.method == "awq":
        zeros, weight = (pack(each.t(), scheme.bits, _AWQ_ORDER) for each in (codes.zeros, codes.codes))
        return {"qweight": weight, "qzeros": zeros, "scales": half.t()}
    shape = torch.tensor(codes.codes.shape)
    return {"weight_packed": pack(codes.codes, scheme.bits), "weight_scale": half, "weight_shape": shape}


def pack(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Several codes of a row in an int32 [N, K] -> [N, K * bits / 32], the first lowest, or in an order."""
    num = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % num)).view(len(codes), -1, num)
    shifts = bits * torch.arange(num, dtype=torch.int32)
    return (padded[:, :, list(order or range(num))].int() << shifts).sum(-1, dtype=torch.int32)


def quantization_config(scheme: Scheme, plain: list[str]) -> dict[str, Any]:
    """What config.json says; `plain` are the layers that are not quantized."""
    size = scheme.group_size or -1
    if scheme.method == "gptq":
        said = {"desc_act": scheme.desc_act, "sym": True, "checkpoint_format": "gptq", "damp_percent": scheme.damp}
        kept = {"dynamic": {f"-:^{re.escape(name)}$": {} for name in plain}} if plain else {}
        return {"quant_method": "gptq", "bits": scheme.bits, "group_size": size, "lm_head": False, **said, **kept}
    if scheme.method == "awq":
        said = {"modules_to_not_convert": plain or None, "version": "gemm", "zero_point": True}
        return {"quant_method": "awq", "bits": scheme.bits, "group_size": size, **said}
    is_fp8 = scheme.method == "fp8"
    common = {"num_bits": scheme.bits, "type": "float" if is_fp8 else "int", "symmetric": True}
    strategy = {"strategy": "group", "group_size": size} if scheme.group_size else {"strategy": "channel"}
    given = {**common, "strategy": "token", "dynamic": True} if is_fp8 else None
    group = {"targets": ["Linear"], "weights": {**common, **strategy, "dynamic": False}, "input_activations": given}
    said = {"format": "float-quantized" if is_fp8 else "pack-quantized", "quantization_status": "compressed"}
    said |= {"config_groups": {"group_0": group}, "ignore": ["lm_head", *plain]}
    return {"quant_method": "compressed-tensors", **said}


def copy_rest(source: Path, folder: Path) -> None:
    """Bring what is not weights along, but what is written anew."""
    for path in (path for pattern in _COPIED for path in source.glob(pattern)):
        if path.name not in ("config.json", "quantize_config.json") and not path.name.endswith(".index.json"):
            (target := folder / path.relative_to(source)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def write_json(path: Path, value: object) -> None:
    """As checkpoints have it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def card(model: str, scheme: Scheme, text: str, losses: Sequence[float], errors: Sequence[float]) -> str:
    """The model card.

    Args:
        text: what was calibrated, and measured, with.
        losses: mean cross entropy, before and after, in nats.
        errors: after each layer.
    """
    shared = f"groups of {scheme.group_size} columns" if scheme.group_size else "rows"
    kind = f"{scheme.method}, {scheme.bits} bits, scales for {shared}{', by activity' * scheme.desc_act}"
    before, after = (f"{loss:.4f} | {math.exp(loss):.3f}" for loss in losses)
    table = "\n".join(f"| {i} | {error:.2e} |" for i, error in enumerate(errors))
    facts = {"model": model, "base": json.dumps(model), "title": f"{Path(model).name}, {scheme.method}", "kind": kind}
    return _CARD.read_text("utf-8").format(text=text, before=before, after=after, errors=table, **facts)
