"""Train heads that draft for Quire's demo model, on text that it writes itself and on the text that it was trained on.

A Medusa head (arXiv:2401.10774) predicts a token further ahead from the model's last hidden state; here it is taught
the model's own distribution there. Steps are counted, not minutes, and all draws are seeded: the same machine makes the
same heads. Needs Quire, to write the text, and what `train_demo.py` beside it needs. Example:
`nice -n 19 python tools/train_heads.py medusa TEXT.txt --out quire/demo/medusa`
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_demo import (
    BOS,
    Llama,
    Stream,
    autocast,
    extract_chats,
    keep_memory,
    load_model,
    make_stream,
    read_documents,
    write_json,
)

from quire import LLM, SamplingParams

# Of what the model writes: greedy, where its answers are most alike, and as its users draw.
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0},
]


# ---------------------------------------------------------------- text


def read_stream(paths: list[Path], tokenizer: Tokenizer, share: float, seed: int) -> Stream:
    """The token ids of a share of the chapters, and of chats made from them."""
    rng = random.Random(seed)
    documents = [document for document in read_documents(paths) if rng.random() < share]
    chats = [chat for document in documents for chat in extract_chats(document, rng)]
    return make_stream(tokenizer, [BOS + "\n\n".join(document) for document in documents] + chats)


def write_text(args: argparse.Namespace, stream: Stream, length: int) -> np.ndarray:
    """[windows, length] ids: prompts of the text, and what the model writes after them."""
    rng = np.random.default_rng(args.seed)
    windows = stream.windows(length, rng)[: args.written]
    rows = stream.batch(windows, length)[:, :-1].numpy()
    cuts = rng.integers(4, 48, len(rows))
    llm = LLM(str(args.model), max_num_seqs=64, max_num_batched_tokens=1024, disable_log_stats=True)
    params = [
        SamplingParams(max_tokens=length - int(cut), ignore_eos=True, seed=i, detokenize=False, **MANNERS[i % 3])
        for i, cut in enumerate(cuts)
    ]
    prompts = [{"prompt_token_ids": row[:cut].tolist()} for row, cut in zip(rows, cuts, strict=True)]
    for row, cut, output in zip(rows, cuts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        row[cut:] = output.outputs[0].token_ids
    return rows


# ---------------------------------------------------------------- Medusa


class MedusaHead(nn.Module):
    """`x + silu(W x + b)`, once for each layer; the model's own output head follows."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for name, weight in self.named_parameters():
            if num_layers > 1 and name.endswith("weight"):
                nn.init.normal_(weight, std=0.2 * size**-0.5)
            else:
                nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


def teach(heads: nn.ModuleList, model: Llama, ids: Tensor, scale: float) -> Tensor:
    """Add the gradients of `scale` times the mean cross-entropies; returns those, one a head.

    Head j sees the hidden state after token t, and is taught what the model says after token t + 1 + j.
    """
    with torch.no_grad(), autocast(ids.device):
        hidden = model(ids).float()
    output = model.embed_tokens.weight.to(torch.bfloat16)
    losses = torch.zeros(len(heads))
    for row in hidden:
        with torch.no_grad():
            wanted = (row.to(torch.bfloat16) @ output.T).float().softmax(-1)
        made, slopes = [], []
        for j, head in enumerate(heads):
            goal = wanted[1 + j :]
            x = head(row[: len(goal)])
            with torch.no_grad():
                logits = (x.to(torch.bfloat16) @ output.T).float()
                logits -= logits.logsumexp(-1, keepdim=True)
                losses[j] -= (goal * logits).sum() / len(goal) / len(hidden)
                slope = (logits.exp_() - goal).mul_(scale / len(goal) / len(hidden)).to(torch.bfloat16) @ output
            made.append(x)
            slopes.append(slope.float())
        torch.autograd.backward(made, slopes)
    return losses


@torch.no_grad()
def agreement(heads: nn.ModuleList, model: Llama, rows: Tensor) -> list[float]:
    """How often each head's likeliest token is the one that follows in the rows."""
    hidden = model(rows)
    found = []
    for j, head in enumerate(heads):
        drafts = (head(hidden[:, : -2 - j]) @ model.embed_tokens.weight.T).argmax(-1)
        found.append((drafts == rows[:, 2 + j :]).float().mean().item())
    return found


def train_medusa(args: argparse.Namespace, model: Llama, stream: Stream, written: np.ndarray) -> nn.ModuleList:
    """Train the heads; every other batch is what the model wrote."""
    size = model.shape.hidden_size
    heads = nn.ModuleList(MedusaHead(size, args.layers) for _ in range(args.heads))
    optimiser = torch.optim.AdamW(heads.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = np.random.default_rng(args.seed)
    length = written.shape[1]
    held, own = torch.from_numpy(written[:48]), written[48:]
    begun, shown = time.monotonic(), torch.zeros(args.heads)
    for step in range(args.steps):
        falling = 0.51 + 0.49 * math.cos(math.pi * step / args.steps)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 20) * falling
        if step % args.text_every == args.text_every - 1:
            ids = stream.batch(rng.choice(stream.starts[stream.starts < len(stream.ids) - length], args.rows), length)
            ids = ids[:, :-1]
        else:
            ids = torch.from_numpy(own[rng.integers(len(own), size=args.rows)])
        shown += teach(heads, model, ids, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 100 == 99:
            right = " ".join(f"{share:.1%}" for share in agreement(heads, model, held[:12]))
            means = " ".join(f"{loss:.3f}" for loss in (shown / 100).tolist())
            print(f"step {step + 1} {time.monotonic() - begun:.0f}s loss {means}; right {right}", flush=True)
            shown.zero_()
    for i, manner in enumerate(MANNERS):
        right = " ".join(f"{share:.1%}" for share in agreement(heads, model, held[i::3]))
        print(f"of what it writes with {manner}, next but one and so on: {right}", flush=True)
    return heads


def save_medusa(heads: nn.ModuleList, model: Llama, out: Path) -> None:
    """Write config.json and model.safetensors (bf16), under the names of the published heads."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, head in enumerate(heads):
        for name, tensor in head.named_parameters():  # layers.0.weight
            _, layer, kind = name.split(".")
            tensors[f"{i}.{layer}.linear.{kind}"] = tensor.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
    num_layers = max(int(name.split(".")[1]) for name in tensors) + 1
    sizes = {"hidden_size": model.shape.hidden_size, "vocab_size": model.shape.vocab_size}
    kind = {"architectures": ["MedusaModel"], "model_type": "medusa", "dtype": "bfloat16"}
    write_json(out / "config.json", {**kind, "medusa_num_heads": len(heads), "medusa_num_layers": num_layers, **sizes})


# ---------------------------------------------------------------- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("kind", choices=["medusa"], help="what is trained")
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 text files, those that the model was trained on")
    parser.add_argument("--model", type=Path, default=Path("quire/demo"), help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="residual blocks of a head")
    parser.add_argument("--written", type=int, default=1000, help="windows that the model writes")
    parser.add_argument("--text-share", type=float, default=0.1, help="of the chapters that are read")
    parser.add_argument("--text-every", type=int, default=4, help="one batch of so many is of the text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rows", type=int, default=6, help="windows per step")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    keep_memory()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_model(args.model)
    begun = time.monotonic()
    stream = read_stream(args.text, tokenizer, args.text_share, args.seed)
    print(f"{len(stream.ids)} tokens of text, read in {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    written = write_text(args, stream, args.length)
    print(f"{written.size} tokens written in {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    save_medusa(train_medusa(args, model, stream, written), model, args.out)
    print(f"trained in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
