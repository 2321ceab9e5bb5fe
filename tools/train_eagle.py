"""Train EAGLE and EAGLE-3 heads that draft for Quire's demo model, on text that it writes itself.

A head is one layer that reads each token with the model's hidden state before it (EAGLE-3: of three layers) and is
taught the model's own distribution of the next token, for several drafts in a row as when it drafts: from the second on
it reads its own output. Needs Quire, to write the text, and what `train_demo.py` beside it needs. Example:
`nice -n 19 python tools/train_eagle.py eagle --out quire/demo/eagle --seconds 150`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_demo import Llama, Optimiser, Shape, rate_scale, rotate

from quire import LLM, SamplingParams

LENGTH = 256  # tokens of a text
TAPS = [1, 3, 5]  # the input of these layers, and the output of the last, by EAGLE-3's way of counting
UNROLLED = 3  # drafts in a row that a head is trained on
SIZES: dict[str, dict[str, int]] = {
    "eagle": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192},
    "eagle3": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128},
}


def write_text(model: str, num_texts: int) -> np.ndarray:
    """Texts [N, LENGTH] by the demo: sampled at several temperatures, and greedy from the beginnings of those."""
    llm = LLM(model, max_num_seqs=64)
    found: list[list[int]] = []
    start = time.perf_counter()
    while len(found) < num_texts:
        prompts = [[0, 1] if i % 6 == 5 else [0] for i in range(96)]
        starts = [found[-1 - i][:24] for i in range(32)] if found else []
        params = [
            SamplingParams(
                temperature=(0.7, 0.85, 1.0)[i % 3], seed=len(found) + i, max_tokens=LENGTH - len(p), ignore_eos=True
            )
            for i, p in enumerate(prompts)
        ]
        params += [SamplingParams(temperature=0, max_tokens=LENGTH - 24, ignore_eos=True) for _ in starts]
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts + starts], params, use_tqdm=False):
            found.append([*(output.prompt_token_ids or []), *output.outputs[0].token_ids])
        print(f"{len(found)} texts in {time.perf_counter() - start:.0f} s", flush=True)
    return np.array(found, np.int64)


class EagleHead(nn.Module):
    """One layer that reads a token and the hidden state before it; its own output is the next hidden state."""

    def __init__(self, model: Llama, kind: str) -> None:
        super().__init__()
        size, sizes = model.shape.hidden_size, SIZES[kind]
        self.kind, self.head_dim = kind, model.shape.head_dim
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.group = heads // kv_heads
        width = 2 * size if kind == "eagle3" else size
        self.fc = nn.Linear((3 if kind == "eagle3" else 2) * size, size, bias=False)
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)
        self.gate_proj = nn.Linear(size, sizes["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(size, sizes["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(sizes["intermediate_size"], size, bias=False)
        eps = model.shape.rms_norm_eps
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        if kind == "eagle3":
            self.input_layernorm, self.hidden_norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
            self.norm = nn.RMSNorm(size, eps=eps)
        for name, weight in self.named_parameters():
            if name.startswith(("o_proj", "down_proj")):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * 0.6)
        if kind == "eagle":  # at first the hidden state passes as it is
            with torch.no_grad():
                self.fc.weight.mul_(0.1)[:, size:] += torch.eye(size)

    def unroll(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, steps: int) -> list[Tensor]:
        """What logits are made of, for each of `steps` drafts in a row.

        embedded, hidden: [B, N, H] of each token, and (EAGLE-3: [B, N, 3 H]) of the position before it.
        """
        rows, num, _ = embedded.shape
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        x = self.fc(hidden) if self.kind == "eagle3" else hidden
        for _ in range(steps):
            if self.kind == "eagle3":
                residual = x
                inner = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
            else:
                residual = inner = self.fc(torch.cat([embedded, x], -1))
            split = (rows, num, -1, self.head_dim)
            q = rotate(self.q_proj(inner).view(split).transpose(1, 2), cos, sin)
            k = rotate(self.k_proj(inner).view(split).transpose(1, 2), cos, sin)
            v = self.v_proj(inner).view(split).transpose(1, 2)
            keys.append(k.repeat_interleave(self.group, 1))
            values.append(v.repeat_interleave(self.group, 1))
            mixed = self._attend(q, keys, values)
            residual = residual + self.o_proj(mixed.transpose(1, 2).reshape(rows, num, -1))
            inner = self.post_attention_layernorm(residual)
            x = residual + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))
            found.append(self.norm(x) if self.kind == "eagle3" else x)
            x = _later(x, 1, 1)
        return found

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """A token sees those before its own drafts as they are, and then the drafts, one of each step before."""
        step, num, scale = len(keys) - 1, q.shape[2], self.head_dim**-0.5
        hidden = torch.ones(num, num, dtype=torch.bool, device=q.device).triu(1 - step)
        scores = [(q @ keys[0].mT * scale).float().masked_fill(hidden, -torch.inf)]
        if not step:
            return scores[0].softmax(-1).to(q.dtype) @ values[0]
        scores += [(q * _later(keys[m], step - m, 2)).sum(-1, keepdim=True) * scale for m in range(1, step + 1)]
        weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
        mixed = weights[..., :num] @ values[0]
        for m in range(1, step + 1):
            mixed = mixed + weights[..., num + m - 1 : num + m] * _later(values[m], step - m, 2)
        return mixed

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors by their published names."""
        layer = "midlayer" if self.kind == "eagle3" else "layers.0"
        found: dict[str, Tensor] = {}
        for name, weight in self.named_parameters():
            block = name.partition("_")[0]
            inner = "self_attn." if block in "qkvo" else "mlp." if block in ("gate", "up", "down") else ""
            own = name in ("fc.weight", "norm.weight")
            found[name if own else f"{layer}.{inner}{name}"] = weight.detach().to(torch.bfloat16).contiguous()
        return found


def _later(x: Tensor, by: int, dim: int) -> Tensor:
    """Moved so many places on along a dimension; zeros come first."""
    if not by:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, by)), kept], dim)


class SoftLoss(torch.autograd.Function):
    """Mean cross-entropy with the model's own probabilities; its gradient is made at once, a part at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, goal: Tensor, head: Tensor) -> Tensor:
        """hidden [steps, N, H], goal [N, H] of the model -> the loss of each step."""
        grad, total = torch.empty_like(hidden), hidden.new_zeros(len(hidden))
        for i in range(0, hidden.shape[1], 512):
            wanted = (goal[i : i + 512] @ head.T).float().softmax(-1)
            for step, one in enumerate(hidden[:, i : i + 512]):
                log = (one.bfloat16() @ head.T).float().log_softmax(-1)
                total[step] -= (wanted * log).sum()
                grad[step, i : i + 512] = (log.exp_().sub_(wanted).bfloat16() @ head).to(grad.dtype)
        ctx.save_for_backward(grad.div_(hidden.shape[1]))
        return total / hidden.shape[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grads[0][:, None, None], None, None


class _Holder(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.layers = head


@torch.no_grad()
def states(model: Llama, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The final hidden states, and what enters each layer and leaves the last."""
    x = model.embed_tokens(ids)
    cos, sin = model.cos[: ids.shape[1]].to(torch.bfloat16), model.sin[: ids.shape[1]].to(torch.bfloat16)
    found = [x]
    for layer in model.layers:
        x = layer(x, cos, sin)
        found.append(x)
    return model.norm(x), found


def train(model: Llama, kind: str, texts: np.ndarray, args: argparse.Namespace) -> EagleHead:
    """Train a head for `args.seconds` of a core; the last texts are held out, and what it reaches there is printed."""
    torch.manual_seed(0)
    head = EagleHead(model, kind)
    optimiser = Optimiser(_Holder(head), 0.02, 0.003)  # pyright: ignore
    rng, held = np.random.default_rng(0), texts[-64:]
    table = model.embed_tokens.weight.detach().bfloat16()
    start, begun, told, count = time.perf_counter(), time.process_time(), 0.0, 0
    while True:
        progress = max((time.process_time() - begun) / args.seconds, (time.perf_counter() - start) / args.at_most)
        if progress >= 1:
            break
        steps = 1 if progress < 0.4 else UNROLLED  # first to draft one token, then several in a row
        ids = torch.from_numpy(texts[rng.integers(len(texts) - 64, size=args.rows)])
        found, goal = outcomes(model, head, ids, steps)
        chosen = torch.from_numpy(rng.permutation(len(goal))[: len(goal) // 2])
        losses = SoftLoss.apply(found[:, chosen], goal[chosen], table)
        (losses * 0.8 ** torch.arange(steps)).sum().backward()
        optimiser.step(rate_scale(progress))
        count += 1
        if progress - told > 0.04:
            told = progress
            print(kind, count, f"{progress:.0%}", [round(x, 3) for x in losses.tolist()], flush=True)
    with torch.no_grad():
        found, goal = outcomes(model, head, torch.from_numpy(held))
        wanted = (goal @ table.T).argmax(-1)
        hits = [((one.bfloat16() @ table.T).argmax(-1) == wanted).float().mean().item() for one in found]
    cpu = time.process_time()
    print(kind, count, f"steps, {cpu:.0f} s of a core; held out:", [round(x, 3) for x in hits], flush=True)
    return head


def outcomes(model: Llama, head: EagleHead, ids: Tensor, steps: int = UNROLLED) -> tuple[Tensor, Tensor]:
    """What the head's logits are made of after each of its steps, [steps, N, H], and the model's, [N, H]."""
    with torch.autocast("cpu", torch.bfloat16):
        final, layers = states(model, ids)
        hidden = torch.cat([layers[i] for i in TAPS], -1) if head.kind == "eagle3" else final
        embedded, num = model.embed_tokens(ids[:, 1:]).detach(), ids.shape[1] - 1
        cos, sin = model.cos[:num].to(torch.bfloat16), model.sin[:num].to(torch.bfloat16)
        found = head.unroll(embedded, hidden[:, :-1].detach(), cos, sin, steps)
    kept = torch.stack([one[:, UNROLLED - 1 :].flatten(0, 1).float() for one in found])
    return kept, final[:, UNROLLED:].flatten(0, 1).bfloat16()


def load_demo(folder: Path) -> Llama:
    config = json.loads((folder / "config.json").read_text())
    names = Shape.__dataclass_fields__
    model = Llama(Shape(**{name: config[name] for name in names}))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}, strict=False
    )
    return model.requires_grad_(False)


def save_head(head: EagleHead, demo: Path, out: Path) -> None:
    config = json.loads((demo / "config.json").read_text())
    config |= SIZES[head.kind] | {"num_hidden_layers": 1, "bias": False}
    if head.kind == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["vocab_size"]}
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS, "use_aux_hidden_state": True}}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(head.checkpoint(), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("kind", choices=list(SIZES), help="what is trained")
    parser.add_argument("--model", type=Path, default=Path("quire/demo"), help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--texts", type=int, default=4000, help="texts that the model writes")
    parser.add_argument("--seconds", type=float, default=360.0, help="of a core, for the training")
    parser.add_argument("--at-most", type=float, default=1800.0, help="seconds in all that it may take")
    parser.add_argument("--rows", type=int, default=8, help="texts per step")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    texts = write_text(str(args.model), args.texts)
    np.random.default_rng(1).shuffle(texts)
    head = train(load_demo(args.model), args.kind, texts, args)
    save_head(head, args.model, args.out)


if __name__ == "__main__":
    main()
