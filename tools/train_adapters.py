"""Train a LoRA for Quire's demo model on a text whose style it is to take on, and write it as PEFT does.

The model keeps its own weights; queries, values and the matrices of the MLP get factors of a small rank. Steps are
counted and draws are seeded: the same machine makes the same adapter, in minutes. Needs what `train_demo.py` beside it
needs. Example: `nice -n 19 python tools/train_adapters.py PLAYS.txt --out quire/demo/adapters/play`
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo import BOS, Llama, load_model, make_stream

TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")


class Adapted(nn.Module):
    """A linear layer whose weights stay, and what is added to it: ``B (A x) * scale``."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def adapt(model: Llama, rank: int, alpha: float) -> dict[str, Adapted]:
    """Give a model's layers their factors, and freeze all else; by the layer's name."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found: dict[str, Adapted] = {}
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and name.endswith(TARGETS):
            parent, _, own = name.rpartition(".")
            found[name] = Adapted(module, rank, alpha / rank)
            setattr(model.get_submodule(parent), own, found[name])
    return found


def loss_of(model: Llama, ids: Tensor) -> Tensor:
    """Mean loss of predicting each token of [windows, length + 1] ids."""
    return F.cross_entropy(model.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def save(adapters: dict[str, Adapted], out: Path, rank: int, alpha: float) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in float16."""
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        for factor, weight in (("A", adapter.a), ("B", adapter.b)):
            tensors[f"base_model.model.model.{name}.lora_{factor}.weight"] = weight.detach().half().contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "demo", "r": rank}
    config |= {"lora_alpha": alpha, "target_modules": list(TARGETS), "bias": "none", "modules_to_save": None}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text in the style that is wanted")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--base", type=Path, default=Path("quire/demo"), help="folder of the model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=8, help="of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    model, start = load_model(args.base), time.time()
    adapters = adapt(model, args.rank, args.alpha)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    parts = args.text.read_text(encoding="utf-8").split("\n\n")
    held = max(1, len(parts) // 50)
    stream, test = (make_stream(tokenizer, [BOS + "\n\n".join(part)]) for part in (parts[held:], parts[:held]))
    begins = test.windows(args.length, np.random.default_rng(0))[:16]
    weights = [weight for adapter in adapters.values() for weight in (adapter.a, adapter.b)]
    optimiser = torch.optim.AdamW(weights, lr=args.rate, weight_decay=0.0)
    rng, queue = np.random.default_rng(args.seed), np.array([], np.int64)
    for step in range(args.steps + 1):
        if step % 50 == 0 or step == args.steps:
            with torch.no_grad():
                held_out = loss_of(model, test.batch(begins, args.length)).item()
            print(f"step {step:4d}  held-out loss {held_out:.3f}  {time.time() - start:.0f} s", flush=True)
        if len(queue) < args.windows:
            queue = stream.windows(args.length, rng)
        batch, queue = queue[: args.windows], queue[args.windows :]
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 20) * (1 - step / (args.steps + 1))
        optimiser.zero_grad()
        loss_of(model, stream.batch(batch, args.length)).backward()
        optimiser.step()
    save(adapters, args.out, args.rank, args.alpha)


if __name__ == "__main__":
    main()
