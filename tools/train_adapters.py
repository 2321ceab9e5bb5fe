"""Train a LoRA or a soft prompt for Quire's demo model on a text whose style it is to take on; write it as PEFT does.

The model keeps its own weights. Queries, values and the matrices of the MLP get factors of a small rank; or else, with
`--virtual`, so many vectors before every text are trained in place of embeddings (prompt tuning). Steps are counted and
draws are seeded: the same machine makes the same adapter, in minutes. Needs what `train_demo.py` beside it needs.
Example: `nice -n 19 python tools/train_adapters.py PLAYS.txt --out quire/demo/adapters/play`
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

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


class Prompted(nn.Module):
    """A table of embeddings that stays, with trained rows in place of those of a text's first tokens."""

    def __init__(self, base: nn.Embedding, rows: Tensor) -> None:
        super().__init__()
        self.base, self.weight = base, base.weight
        self.rows = nn.Parameter(rows.clone())

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows.expand(len(ids), -1, -1)
        return torch.cat([rows, self.base(ids[:, len(self.rows) :])], 1)


def adapt(model: Llama, rank: int, alpha: float) -> dict[str, Adapted]:
    """Give a model's layers their factors; by the layer's name."""
    found: dict[str, Adapted] = {}
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and name.endswith(TARGETS):
            parent, _, own = name.rpartition(".")
            found[name] = Adapted(module, rank, alpha / rank)
            setattr(model.get_submodule(parent), own, found[name])
    return found


def loss_of(model: Llama, ids: Tensor, num_virtual: int) -> Tensor:
    """Mean loss of predicting each token of [windows, length + 1] ids, with so many virtual tokens before them."""
    logits = model.logits(F.pad(ids[:, :-1], (num_virtual, 0)))[:, num_virtual:]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def save(adapters: dict[str, Adapted], out: Path, rank: int, alpha: float) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in float16."""
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        for factor, weight in (("A", adapter.a), ("B", adapter.b)):
            tensors[f"base_model.model.model.{name}.lora_{factor}.weight"] = weight.detach().half().contiguous()
    config = {"r": rank, "lora_alpha": alpha, "target_modules": list(TARGETS), "bias": "none", "modules_to_save": None}
    write(tensors, {"peft_type": "LORA"} | config, out)


def write(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    """Both files of an adapter."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    (out / "adapter_model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
    kind = {"peft_type": config["peft_type"], "task_type": "CAUSAL_LM", "base_model_name_or_path": "demo"}
    config = kind | config
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8 text in the style that is wanted")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapter")
    parser.add_argument("--base", type=Path, default=Path("quire/demo"), help="folder of the model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--virtual", type=int, default=0, help="tokens of a soft prompt; 0: a LoRA")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=8, help="of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    model, start = load_model(args.base), time.time()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    parts = args.text.read_text(encoding="utf-8").split("\n\n")
    held = max(1, len(parts) // 50)
    stream, test = (make_stream(tokenizer, [BOS + "\n\n".join(part)]) for part in (parts[held:], parts[:held]))
    begins = test.windows(args.length, np.random.default_rng(0))[:16]
    adapters: dict[str, Adapted] = {}
    if args.virtual:  # begins as words of the text
        rows = model.embed_tokens.weight[torch.from_numpy(stream.ids[1 : args.virtual + 1].astype(np.int64))]
        model.embed_tokens = Prompted(model.embed_tokens, rows)  # type: ignore[assignment]
    else:
        adapters = adapt(model, args.rank, args.alpha)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=args.rate, weight_decay=0.0)
    rng, queue = np.random.default_rng(args.seed), np.array([], np.int64)
    for step in range(args.steps + 1):
        if step % 50 == 0 or step == args.steps:
            with torch.no_grad():
                held_out = loss_of(model, test.batch(begins, args.length), args.virtual).item()
            print(f"step {step:4d}  held-out loss {held_out:.3f}  {time.time() - start:.0f} s", flush=True)
        if len(queue) < args.windows:
            queue = stream.windows(args.length, rng)
        batch, queue = queue[: args.windows], queue[args.windows :]
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 20) * (1 - step / (args.steps + 1))
        optimiser.zero_grad()
        loss_of(model, stream.batch(batch, args.length), args.virtual).backward()
        optimiser.step()
    if args.virtual:
        rows = weights[0].detach().half()
        write({"prompt_embeddings": rows}, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": len(rows)}, args.out)
    else:
        save(adapters, args.out, args.rank, args.alpha)


if __name__ == "__main__":
    main()
