"""Adapters for tests, written as PEFT writes them: random ones for the demo, or for shapes that a test gives."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.lora.request import LoRARequest, PromptAdapterRequest

# Modules of the demo's layers: (features out, features in).
DEMO_LAYER = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (704, 256),
    "mlp.up_proj": (704, 256),
    "mlp.down_proj": (256, 704),
}
DEMO = {f"model.layers.{i}.{name}": shape for i in range(5) for name, shape in DEMO_LAYER.items()}
TABLES = {"model.embed_tokens": (4096, 256), "lm_head": (4096, 256)}


def factors(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, size: float = 0.05) -> dict[str, Tensor]:
    """Tensors of an adapter by PEFT's names; a table's are those of an embedding."""
    drawn, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, (out, inner) in shapes.items():
        a = torch.randn(rank, out if name.endswith("embed_tokens") else inner, generator=drawn) * size
        b = torch.randn(inner if name.endswith("embed_tokens") else out, rank, generator=drawn) * size
        ends = ("embedding_A", "embedding_B") if name.endswith("embed_tokens") else ("A.weight", "B.weight")
        found |= {f"base_model.model.{name}.lora_{end}": tensor for end, tensor in zip(ends, (a, b), strict=True)}
    return found


def write_adapter(path: Path, tensors: Mapping[str, Tensor], rank: int, **config: Any) -> Path:
    """An adapter's folder."""
    path.mkdir(parents=True, exist_ok=True)
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "modules_to_save": None} | config
    (path / "adapter_config.json").write_text(json.dumps(stated))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    return path


def demo_adapters(
    folder: Path, ranks: Sequence[int], shapes: Mapping[str, tuple[int, int]] = DEMO
) -> list[LoRARequest]:
    """One adapter for the demo of each rank, with ids from 1 on."""
    found = []
    for number, rank in enumerate(ranks, 1):
        path = write_adapter(folder / f"voice-{number}", factors(DEMO, rank, number), rank)
        found.append(LoRARequest(f"voice-{number}", number, str(path)))
    return found


def write_virtual(path: Path, rows: Tensor, kind: str = "PROMPT_TUNING", **config: Any) -> Path:
    """An adapter of virtual tokens, [tokens, width]."""
    path.mkdir(parents=True, exist_ok=True)
    stated = {"peft_type": kind, "task_type": "CAUSAL_LM", "num_virtual_tokens": len(rows)} | config
    (path / "adapter_config.json").write_text(json.dumps(stated))
    save_file({"prompt_embeddings": rows.contiguous()}, path / "adapter_model.safetensors")
    return path


def demo_prompts(
    folder: Path, sizes: Sequence[int], first: int = 50, prefix: bool = False
) -> list[PromptAdapterRequest]:
    """One adapter for the demo of each number of virtual tokens, with ids from `first` on."""
    found = []
    width = 5 * 2 * 2 * 64 if prefix else 256  # layers, keys and values, heads, features
    for own, size in enumerate(sizes, first):
        rows = torch.randn(size, width, generator=torch.Generator().manual_seed(own)) * (1.0 if prefix else 0.5)
        kind = "PREFIX_TUNING" if prefix else "P_TUNING" if own % 2 else "PROMPT_TUNING"
        path = write_virtual(folder / f"mood-{own}", rows, kind)
        found.append(PromptAdapterRequest(f"mood-{own}", own, str(path), size))
    return found
