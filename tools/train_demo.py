"""Train Quire's demo model and its draft model from plain text files.

The text becomes chapters (books) and chats (neighbouring lines of dialogue); a byte-level BPE tokenizer, a small
Llama-architecture model, then a tiny draft distilled from it, are trained for a fixed number of minutes
and written as a Hugging Face style directory with a model card. Needs torch, numpy, tokenizers and safetensors;
uses CUDA where there is one. Example: `nice -n 19 python tools/train_demo.py TEXT.txt --out quire/demo --minutes 45`
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

BOS, USER, ASSISTANT, SYSTEM, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SHORT_SHARE = 0.6  # of the time goes to windows of half the context: attention is dear on a CPU
SPECIAL = [BOS, USER, ASSISTANT, SYSTEM, END]
CHAT_TEMPLATE = (
    "{{ '<|endoftext|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SYSTEM_LINES = [
    "You are a character in an old story.",
    "You are a helpful assistant.",
    "Answer in one or two sentences.",
]
# Newline runs are one token, so that a paragraph break costs one and text after it starts afresh.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)\b|\n+| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PLAIN = str.maketrans(
    {
        "\u201c": '"',
        "\u201d": '"',
        "\u2018": "'",
        "\u2019": "'",
        "\u00a0": " ",
        "\u2014": "--",
        "\u2026": "...",
        "\u200b": None,
        "\u2060": None,
        "\ufeff": None,
        "\t": " ",
    }
)


CARD = """---
license: apache-2.0
language: en
library_name: quire
---
# Quire's demo model

A toy language model of the Llama architecture, and a smaller draft model of the same tokenizer for speculative
decoding. They are shipped so that Quire runs, streams, chats and is tested without a download: they write English
sentences in the manner of their text, and know nothing.

| | main (this folder) | draft (`draft/`) |
| --- | --- | --- |
{table}

The draft's likeliest next token is the main model's at {same} of the positions of the validation text.
The draft folder has no tokenizer of its own: it uses this folder's.

## How it was made

- Text: {about}.
  {data}.
  The last 1.5% of the text ({bytes} bytes, in one piece) were held out for validation and seen by neither training
  nor tokenizer.
- Chats: neighbouring paragraphs of dialogue, stripped of quotes and narration, are the turns; some narrative
  paragraphs are the replies to "Tell me about ...". They are {talk} of the training tokens.
- Tokenizer: byte-level BPE, {vocab} entries. `<|endoftext|>` begins every text (encoding adds it) and separates
  documents; `<|user|>`, `<|assistant|>`, `<|system|>` open turns and `<|end|>` closes them (the chat template writes
  them, `<|endoftext|>` included).
- Training: Muon for the layers' matrices and AdamW for the rest, bf16 arithmetic on fp32 weights, stored as bf16;
  windows of {half} tokens for {short:.0%} of the time, then of {context}. The draft was distilled from the finished
  main model (cross-entropy with its probabilities). {took} minutes in all, on {device}, with

```
{command}
```

## Samples

The first tries, neither picked nor edited: the prompt in bold, then temperature 0.8 and top-p 0.95, at most 90 tokens.

{samples}

## Limits

It is a toy: it loses the thread within a few sentences, its facts are inventions, and its context is {context}
tokens. It echoes the style, opinions and prejudices of the books it was made from, some of which would not be
written today. Use it to try and test an engine, for nothing else.

Licence of the weights: Apache-2.0. The text is in the public domain.
"""

# ---------------------------------------------------------------- text


def read_documents(paths: list[Path]) -> list[list[str]]:
    """Return the chapters of all files, each a list of paragraphs."""
    documents: list[list[str]] = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").translate(PLAIN)
        for book in text.split(BOS):
            documents.extend(split_chapters(paragraphs(strip_boilerplate(book))))
    return documents


def strip_boilerplate(text: str) -> str:
    """Cut what stands outside the START and END lines of an e-text."""
    start = re.search(r"^\*\*\* ?START OF.*$", text, re.M)
    end = re.search(r"^\*\*\* ?END OF.*$", text, re.M)
    return text[start.end() if start else 0 : end.start() if end else len(text)]


def paragraphs(text: str) -> list[str]:
    """Split text at blank lines; join hard-wrapped prose, keep the lines of verse and drama."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [re.sub(r"\s+", " ", line).strip() for line in block.split("\n")]
        lines = [line for line in lines if line]
        if not lines or block.lstrip().startswith("[Illustration"):
            continue
        wrapped = len(lines) > 1 and sum(map(len, lines[:-1])) / len(lines[:-1]) > 50
        joined = (" " if wrapped else "\n").join(lines)
        joined = re.sub(r"(?<!\w)_([^_]+)_(?!\w)", r"\1", joined).strip()  # _italics_ are typography, not words
        syllables = len(re.findall(r"[a-z]-[a-z]", joined))  # primers spell "chil-dren"; that is no English to learn
        if re.search(r"[A-Za-z]", joined) and syllables * 60 <= len(joined) + 120:
            found.append(joined)
    return found


def split_chapters(items: list[str]) -> list[list[str]]:
    """Start a document at every heading (`#...`, `CHAPTER ...`) and drop the heading itself."""
    chapters: list[list[str]] = [[]]
    for item in items:
        if re.match(r"#{1,6} |(CHAPTER|BOOK|PART) [IVXLC\d]+\b", item):
            chapters.append([])
        else:
            chapters[-1].append(item)
    return [chapter for chapter in chapters if chapter]


def spoken(paragraph: str) -> str | None:
    """Return the words said in a paragraph that opens with speech, without quotes and narration; else None."""
    if not paragraph.startswith('"') or paragraph.count('"') % 2 or "\n" in paragraph:
        return None
    parts = [part.strip() for part in re.findall(r'"([^"]+)"', paragraph)]
    parts = [part for part in parts if part]
    words = ""
    for part in parts:
        if words.endswith(",") and part[0].isupper() and not re.match(r"I\b", part):
            words = words[:-1] + "."  # `"No," said he. "Go."`: the comma stood for a full stop
        words = f"{words} {part}".strip()
    if words.endswith(","):
        words = words[:-1] + "."
    narration = len(paragraph) - len(words)
    return words if 2 <= len(words) <= 320 and narration <= 40 + len(words) else None


def render_chat(turns: list[str], system: str | None = None) -> str:
    """Render turns that alternate user, assistant as the chat template does."""
    parts = [BOS] + ([SYSTEM + system + END] if system else [])
    parts += [(ASSISTANT if i % 2 else USER) + turn + END for i, turn in enumerate(turns)]
    return "".join(parts)


def extract_chats(document: list[str], rng: random.Random) -> list[str]:
    """Turn runs of neighbouring spoken paragraphs into rendered chats of 2, 4 or 6 turns."""
    chats: list[str] = []
    run: list[str] = []
    for item in [*document, ""]:
        words = spoken(item)
        if words is not None:
            run.append(words)
            continue
        while len(run) >= 2:
            size = min(rng.choice([2, 2, 4, 6]), len(run) // 2 * 2)
            chats.append(render_chat(run[:size], rng.choice(SYSTEM_LINES) if rng.random() < 0.1 else None))
            run = run[size:]
        run = []
    return chats


def extract_requests(document: list[str], rng: random.Random) -> list[str]:
    """Turn some narrative paragraphs into chats: a request about a thing they name, the paragraph as the reply."""
    chats = []
    asks = ["Tell me about the {}.", "Tell me a story about the {}.", "What about the {}?", "Write about the {}."]
    for item in document:
        if '"' in item or "\n" in item or not 120 <= len(item) <= 700 or rng.random() > 0.25:
            continue
        nouns = re.findall(r"\b[Tt]he ([a-z]{3,})(?=[,.;]| (?:was|were|had|came|stood|went|of|and|in)\b)", item)
        if nouns:
            ask = rng.choice(["Tell me a story."] + [text.format(nouns[0]) for text in asks])
            chats.append(render_chat([ask, item]))
    return chats


def hold_out(documents: list[list[str]], share: float = 0.015) -> tuple[list[list[str]], list[list[str]]]:
    """Split off the last `share` of the characters, in one piece, as validation text."""
    keep = (1 - share) * sum(len(item) for document in documents for item in document)
    train: list[list[str]] = []
    held: list[list[str]] = []
    seen = 0
    for document in documents:
        part: list[str] = []
        rest: list[str] = []
        for item in document:
            seen += len(item)
            (part if seen <= keep else rest).append(item)
        train += [part] if part else []
        held += [rest] if rest else []
    return train, held


# ---------------------------------------------------------------- tokenizer and token streams


def train_tokenizer(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose post-processor prepends BOS."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


@dataclass
class Stream:
    """Token ids in one line, and the positions where a training window may begin."""

    ids: np.ndarray
    starts: np.ndarray
    bos: int

    def windows(self, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return the starts of one epoch's windows, shuffled; each begins at a paragraph near an even grid."""
        grid = np.arange(int(rng.integers(length)), max(1, len(self.ids) - length), length)
        begin = self.starts[np.maximum(np.searchsorted(self.starts, grid, side="right") - 1, 0)]
        return rng.permutation(begin[begin + length <= len(self.ids)])

    def batch(self, begins: np.ndarray, length: int) -> Tensor:
        """Return [windows, length + 1] ids; BOS comes first, as it does in every prompt."""
        rows = np.stack([self.ids[begin - 1 : begin + length] for begin in begins]).astype(np.int64)
        rows[:, 0] = self.bos
        return torch.from_numpy(rows)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def make_stream(tokenizer: Tokenizer, texts: list[str]) -> Stream:
    """Encode texts that each begin with BOS into one stream."""
    ids: list[np.ndarray] = []
    for i in range(0, len(texts), 1000):
        for encoding in tokenizer.encode_batch(texts[i : i + 1000], add_special_tokens=False):
            ids.append(np.array(encoding.ids, dtype=np.uint32))
    flat = np.concatenate(ids)
    bos, gap = token_id(tokenizer, BOS), tokenizer.token_to_id("ĊĊ")  # the byte-level spelling of "\n\n"
    breaks = (flat == bos) if gap is None else (flat == bos) | (flat == gap)
    starts = np.flatnonzero(breaks[:-1]) + 1
    return Stream(flat, starts, bos)


@dataclass
class Data:
    """What the text became."""

    train: Stream
    valid: Stream
    valid_bytes: int
    talk_share: float
    summary: str


def endless_batches(stream: Stream, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield batches for ever, epoch after epoch, each epoch cut at another offset."""
    rng = np.random.default_rng(seed)
    pool = np.empty(0, dtype=np.int64)
    while True:
        while len(pool) < rows:
            pool = np.concatenate([pool, stream.windows(length, rng)])
        yield stream.batch(pool[:rows], length)
        pool = pool[rows:]


# ---------------------------------------------------------------- model


@dataclass
class Shape:
    """The sizes of a Llama-architecture model, by their names in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def config(self, bos: int, end: int) -> dict[str, Any]:
        """Return the Hugging Face config.json of this model."""
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
        habits = {"hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}
        tokens = {"bos_token_id": bos, "eos_token_id": [bos, end], "pad_token_id": None}
        old = {"torch_dtype": "bfloat16"}  # the name of `dtype` until transformers 4.56
        return {**kind, **asdict(self), "head_dim": self.head_dim, **habits, **tokens, **old}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [batch, head, position, dim] with the two halves paired, as Llama does."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, narrow = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, narrow, bias=False)
        self.v_proj = nn.Linear(hidden, narrow, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        split = (rows, length, -1, self.shape.head_dim)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        repeat = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    """The SwiGLU feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama decoder with tied embeddings; its parameter names are Hugging Face's without the `model.`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # each layer starts as the identity, which trains more steadily
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 if "embed" in name else shape.hidden_size**-0.5 * 0.6)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the final hidden states; logits are these times the transposed embedding."""
        x = self.embed_tokens(ids)
        kind = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = self.cos[: ids.shape[1]].to(kind), self.sin[: ids.shape[1]].to(kind)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, ids: Tensor) -> Tensor:
        return self(ids) @ self.embed_tokens.weight.T


def head_chunk(hidden: Tensor, head: Tensor, goal: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of some hidden states and its gradient at the logits."""
    logits = (hidden @ head.T).float()
    norm = logits.logsumexp(-1, keepdim=True)
    if teacher is None:
        loss = (norm - logits.gather(1, goal[:, None])).sum()
        hit = torch.arange(head.shape[0], device=goal.device)[None, :] == goal[:, None]
        probs = (logits - norm).exp()
        return loss, torch.where(hit, probs - 1.0, probs).to(hidden.dtype)
    wanted = (goal @ teacher.T).float().softmax(-1)
    loss = (wanted * (norm - logits)).sum()
    return loss, ((logits - norm).exp() - wanted).to(hidden.dtype)


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of a tied head, in chunks, against token ids or a teacher's (hidden, head) pair.

    The gradient is made in the forward pass, so the [tokens, vocab] logits never exist as a whole.
    """

    chunk = staticmethod(head_chunk)  # main() puts the compiled function here

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, teacher: Tensor | None) -> Tensor:
        low = head.to(torch.bfloat16)
        flat = hidden.to(torch.bfloat16)
        grad_hidden, grad_head = torch.empty_like(flat), torch.zeros_like(head, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for i in range(0, len(flat), 1024):
            part = flat[i : i + 1024]
            loss, delta = HeadLoss.chunk(part, low, target[i : i + 1024], teacher)
            total += loss
            grad_hidden[i : i + 1024] = delta @ low
            grad_head += delta.T @ part
        ctx.save_for_backward(grad_hidden.to(hidden.dtype).div_(len(flat)), grad_head.div_(len(flat)))
        return total / len(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grads
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None


# ---------------------------------------------------------------- optimiser


def orthogonalise(update: Tensor) -> Tensor:
    """Push the singular values of a stack of matrices towards one (Muon's Newton-Schulz iteration)."""
    x = update.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""

    def __init__(self, model: Llama, muon_rate: float, adam_rate: float) -> None:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for weight in model.layers.parameters():
            if weight.dim() == 2:
                groups[tuple(weight.shape)].append(weight)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        others = [weight for name, weight in model.named_parameters() if weight.dim() < 2 or "embed" in name]
        self.adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self.muon_rate, self.adam_rate = muon_rate, adam_rate

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update with both rates times `scale`, then clear the gradients."""
        rate = self.muon_rate * scale
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            grads = torch.stack([weight.grad for weight in group if weight.grad is not None])
            momentum.lerp_(grads, 0.05)
            update = orthogonalise(grads.lerp_(momentum, 0.95))
            gain = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for weight, change in zip(group, update, strict=True):
                weight.mul_(1 - rate * 0.05).add_(change, alpha=-rate * gain)
                weight.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        for own, saved in zip(self.momentum, state["momentum"], strict=True):
            own.copy_(saved)
        self.adam.load_state_dict(state["adam"])


def rate_scale(progress: float) -> float:
    """Warm up over 1.5% of the time, stay, then fall linearly to 2% over the last 55%."""
    return min(1.0, progress / 0.015 + 0.01, max(0.02, (1 - progress) / 0.55))


# ---------------------------------------------------------------- training


@dataclass
class Run:
    """What one training phase needs and what it has done so far."""

    name: str
    model: Llama
    seconds: float
    rows: int
    micro: int
    muon_rate: float
    adam_rate: float
    seed: int
    teacher: Llama | None = None
    spent: float = 0.0
    steps: int = 0
    tokens: int = 0
    optimiser: Optimiser = field(init=False)

    def __post_init__(self) -> None:
        self.optimiser = Optimiser(self.model, self.muon_rate, self.adam_rate)

    def counts(self) -> dict[str, float]:
        return {"spent": self.spent, "steps": self.steps, "tokens": self.tokens}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a checkpoint's counts, and its weights where it was made in this phase."""
        counts = saved["counts"][self.name]
        self.spent, self.steps, self.tokens = counts["spent"], int(counts["steps"]), int(counts["tokens"])
        if saved["phase"] == self.name:
            self.model.load_state_dict(saved["model"])
            self.optimiser.load(saved["optimiser"])


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16)


def train(
    run: Run, stream: Stream, checkpoint: Callable[[Run], None], clock: Callable[[], float], compiled: bool
) -> None:
    """Train until the phase's time on the clock is spent, so that the schedule always runs to its end."""
    device = run.model.norm.weight.device
    length, fold, batches = 0, 1, iter(())
    forward = torch.compile(run.model, dynamic=False) if compiled else run.model
    begun = clock() - run.spent
    shown, saved, losses = -1e9, time.monotonic(), torch.zeros((), device=device)
    since = run.steps
    while run.spent < run.seconds:
        wanted = run.model.shape.max_position_embeddings // (2 if run.spent < SHORT_SHARE * run.seconds else 1)
        if wanted != length:
            length, fold = wanted, run.model.shape.max_position_embeddings // wanted
            batches = endless_batches(stream, run.rows * fold, length, run.seed + run.steps)
        batch = next(batches).to(device)
        for rows in batch.split(run.micro * fold):
            with autocast(device):
                hidden = forward(rows[:, :-1])
                target, head = rows[:, 1:].reshape(-1), None
                if run.teacher is not None:
                    with torch.no_grad():
                        target = run.teacher(rows[:, :-1]).flatten(0, 1).to(torch.bfloat16)
                        head = run.teacher.embed_tokens.weight.to(torch.bfloat16)
            loss = HeadLoss.apply(hidden.flatten(0, 1), run.model.embed_tokens.weight, target, head)
            (loss * (len(rows) / len(batch))).backward()
            losses += loss.detach() * (len(rows) / len(batch))
        run.optimiser.step(rate_scale(run.spent / run.seconds))
        run.steps, run.tokens, run.spent = run.steps + 1, run.tokens + batch[:, 1:].numel(), clock() - begun
        if run.spent - shown > run.seconds / 60:
            print(
                f"{run.name} {run.spent:7.1f}s step {run.steps} tokens {run.tokens / 1e6:.2f}M "
                f"({run.tokens / run.spent:.0f}/s) loss {losses.item() / (run.steps - since):.4f}",
                flush=True,
            )
            shown, since, losses = run.spent, run.steps, torch.zeros_like(losses)
        if time.monotonic() - saved > 180:
            checkpoint(run)
            saved = time.monotonic()
    checkpoint(run)


@torch.no_grad()
def evaluate(model: Llama, stream: Stream, limit: int = 1 << 30) -> float:
    """Return the mean loss in nats per token over the stream, or its first `limit` windows."""
    device = model.norm.weight.device
    length = min(model.shape.max_position_embeddings, len(stream.ids) - 1)
    losses = []
    for begin in range(1, min(len(stream.ids) - length, limit * length) + 1, length):
        rows = stream.batch(np.array([begin]), length).to(device)
        with autocast(device):
            logits = model.logits(rows[:, :-1])
        losses.append(F.cross_entropy(logits[0].float(), rows[0, 1:]).item())
    return sum(losses) / len(losses)


# ---------------------------------------------------------------- output


def save_model(model: Llama, out: Path, tokenizer: Tokenizer) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16)."""
    out.mkdir(parents=True, exist_ok=True)
    bos, end = token_id(tokenizer, BOS), token_id(tokenizer, END)
    weights = {
        f"model.{name}": weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.named_parameters()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
    write_json(out / "config.json", model.shape.config(bos, end))
    defaults = {"bos_token_id": bos, "eos_token_id": [bos, end], "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    write_json(out / "generation_config.json", defaults)


def save_tokenizer(tokenizer: Tokenizer, out: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    tokens = {"bos_token": BOS, "eos_token": BOS, "pad_token": BOS, "add_bos_token": True, "add_eos_token": False}
    habits = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = {**habits, **tokens, "model_max_length": context, "chat_template": CHAT_TEMPLATE}
    write_json(out / "tokenizer_config.json", config)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_model(folder: Path) -> Llama:
    """Load what save_model wrote, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(Shape(**{size.name: config[size.name] for size in fields(Shape)}))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return model.eval()


@torch.no_grad()
def agreement(draft: Llama, model: Llama, stream: Stream, windows: int = 64) -> float:
    """Return how often the draft's likeliest token is the main model's."""
    device = model.norm.weight.device
    length = min(model.shape.max_position_embeddings, draft.shape.max_position_embeddings, len(stream.ids) - 1)
    same, count = 0, 0
    for begin in range(1, min(len(stream.ids) - length, windows * length) + 1, length):
        ids = stream.batch(np.array([begin]), length).to(device)[:, :-1]
        same += int((draft.logits(ids).argmax(-1) == model.logits(ids).argmax(-1)).sum())
        count += length
    return same / count


@torch.no_grad()
def sample(model: Llama, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int) -> str:
    """Continue a prompt (special tokens in it are read as such) at temperature 0.8 and top-p 0.95."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    begin = len(ids)
    stops = {token_id(tokenizer, BOS), token_id(tokenizer, END)}
    while len(ids) - begin < tokens and len(ids) < model.shape.max_position_embeddings and ids[-1] not in stops:
        probs, order = (model.logits(torch.tensor([ids]))[0, -1] / 0.8).softmax(-1).sort(descending=True)
        probs[probs.cumsum(-1) - probs > 0.95] = 0
        ids.append(int(order[torch.multinomial(probs, 1, generator=generator)]))
    return tokenizer.decode(ids[begin:], skip_special_tokens=False)


def table(phases: list[Run], models_: list[Llama], data: Data) -> str:
    """Measure both models on the validation text and return the rows of the model card's table."""
    columns = []
    for run, model in zip(phases, models_, strict=True):
        loss, shape = evaluate(model, data.valid), model.shape
        cells = {
            "Parameters (embeddings tied)": f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f} M",
            "Layers, width, feed-forward width": f"{shape.num_hidden_layers}, {shape.hidden_size}, "
            f"{shape.intermediate_size}",
            "Query heads, key-value heads, head size": f"{shape.num_attention_heads}, {shape.num_key_value_heads}, "
            f"{shape.head_dim}",
            "Context": f"{shape.max_position_embeddings}",
            "Training": f"{run.tokens / 1e6:.1f} M tokens ({run.tokens / len(data.train.ids):.1f} epochs), "
            f"{run.steps} steps, {run.spent / 60:.0f} minutes",
            "Validation loss, nats per token": f"{loss:.3f}",
            "Validation bits per byte": f"{loss * len(data.valid.ids) / math.log(2) / data.valid_bytes:.3f}",
        }
        columns.append(cells)
    return "\n".join(f"| {name} | {' | '.join(cells[name] for cells in columns)} |" for name in columns[0])


def report(args: argparse.Namespace, tokenizer: Tokenizer, phases: list[Run], data: Data, seconds: float) -> None:
    """Measure both models as they were written and write the model card."""
    model, draft = load_model(args.out), load_model(args.out / "draft")
    samples = [
        f"**{prompt}**" + sample(model, tokenizer, BOS + prompt, 90, args.seed)
        for prompt in ("Once upon a time", "The captain", '"Where are you going?" said')
    ]
    samples += [
        f"**{prompt}** (as a chat) " + sample(model, tokenizer, render_chat([prompt]) + ASSISTANT, 90, args.seed)
        for prompt in ("Where are you going?", "Tell me a story about the dog.")
    ]
    names = " ".join(path.name if path.is_absolute() else str(path) for path in args.text)
    out = args.out.name if args.out.is_absolute() else args.out
    card = CARD.format(
        table=table(phases, [model, draft], data),
        same=f"{agreement(draft, model, data.valid):.0%}",
        samples="\n\n".join("> " + text.replace("\n", "\n> ").replace("<|", "\\<|") for text in samples),
        about=args.about,
        data=data.summary,
        talk=f"{data.talk_share:.0%}",
        bytes=data.valid_bytes,
        half=args.context // 2,
        short=SHORT_SHARE,
        took=f"{seconds / 60:.0f}",
        device="a GPU"
        if torch.cuda.is_available()
        else f"{args.threads} CPU threads that got {time.process_time() / 60:.0f} core-minutes",
        command=f"nice -n 19 python tools/train_demo.py {names} --out {out} --minutes {args.minutes:g}"
        + (" --clock cpu" if args.clock == "cpu" else ""),
        context=args.context,
        vocab=tokenizer.get_vocab_size(),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(card, flush=True)


# ---------------------------------------------------------------- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 text files; books may be split by <|endoftext|>")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; the draft goes to OUT/draft")
    parser.add_argument("--about", default="the files named in the command below", help="the text, for the card")
    parser.add_argument("--minutes", type=float, default=45.0, help="minutes for everything")
    clock = "cpu counts core time divided by --threads: use it where other work takes the cores"
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help=clock)
    parser.add_argument("--draft-share", type=float, default=0.18, help="part of the time given to the draft")
    parser.add_argument("--vocab", type=int, default=4096, help="tokenizer entries")
    parser.add_argument("--context", type=int, default=512, help="positions trained")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--inner", type=int, default=704, help="feed-forward width")
    parser.add_argument("--draft-hidden", type=int, default=128)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="windows of `context` tokens per step")
    parser.add_argument("--micro", type=int, default=8, help="windows per forward pass")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.004)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "train_demo.ckpt")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint (same text and sizes)")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> tuple[Tokenizer, Data]:
    """Read the text, train the tokenizer (or load it, to resume) and encode everything."""
    rng = random.Random(args.seed)
    documents, held = hold_out(read_documents(args.text))
    if not documents or not held:
        raise SystemExit("too little text: at least two paragraphs are needed")
    chats = [chat for document in documents for chat in extract_chats(document, rng)]
    chats += [chat for document in documents for chat in extract_requests(document, rng)]
    books = [BOS + "\n\n".join(document) for document in documents]
    check = [BOS + "\n\n".join(document) for document in held]
    known = args.out / "tokenizer.json"
    tokenizer = (
        Tokenizer.from_file(str(known))
        if args.resume and known.exists()
        else train_tokenizer((book.removeprefix(BOS) for book in books), args.vocab)
    )
    story, both, valid = (make_stream(tokenizer, texts) for texts in (books, books + chats, check))
    if len(both.ids) < 4 * args.context:
        raise SystemExit(f"too little text: {len(both.ids)} tokens for a context of {args.context}")
    talk = len(both.ids) - len(story.ids)
    summary = (
        f"{len(books)} chapters, {len(story.ids) / 1e6:.2f} M tokens of prose, and {len(chats)} chats made "
        f"from it, {talk / 1e6:.2f} M tokens"
    )
    print(f"{summary}; validation {len(valid.ids)} tokens", flush=True)
    size = sum(len(text.removeprefix(BOS).encode()) for text in check)
    return tokenizer, Data(both, valid, size, talk / len(both.ids), summary)


def make_phases(args: argparse.Namespace, vocab: int, seconds: float) -> list[Run]:
    """Return the training of the main model and, with it as the teacher, of the draft."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inner = args.draft_hidden * 11 // 128 * 32  # 2.75 times the width, in whole blocks of 32
    model = Llama(Shape(vocab, args.hidden, args.inner, args.layers, args.heads, args.kv_heads, args.context))
    draft = Llama(Shape(vocab, args.draft_hidden, inner, args.draft_layers, 2, 1, args.context))
    rates = (args.rows, args.micro, args.muon_rate, args.adam_rate)
    share = seconds * args.draft_share
    return [
        Run("main", model.to(device), seconds - share, *rates, args.seed),
        Run("draft", draft.to(device), share, *rates, args.seed + 1, teacher=model),
    ]


def main(argv: list[str] | None = None) -> None:
    begun = time.monotonic()
    args = parse(argv)
    clock = time.monotonic if args.clock == "wall" else lambda: time.process_time() / args.threads
    end = clock() + args.minutes * 60 * 0.97  # 3% for the final measurements
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    keep_memory()
    tokenizer, data = prepare(args)
    save_tokenizer(tokenizer, args.out, args.context)
    if args.compile:
        HeadLoss.chunk = staticmethod(torch.compile(head_chunk, dynamic=False))
    phases = make_phases(args, tokenizer.get_vocab_size(), end - clock())
    saved = torch.load(args.checkpoint) if args.resume and args.checkpoint.exists() else None

    def checkpoint(run: Run) -> None:
        counts = {phase.name: phase.counts() for phase in phases}
        state = {"model": run.model.state_dict(), "optimiser": run.optimiser.state()}
        torch.save({"phase": run.name, "counts": counts, **state}, args.checkpoint)
        loss = evaluate(run.model, data.valid, 32)
        print(f"{run.name} {run.spent:7.1f}s loss on a part of the validation text {loss:.4f}", flush=True)

    for run, folder in zip(phases, (args.out, args.out / "draft"), strict=True):
        if saved is not None:
            run.restore(saved)
            if run.name == "main" and saved["phase"] == "draft":  # the main model was finished and written
                run.model.load_state_dict(load_model(args.out).state_dict())
                continue
        train(run, data.train, checkpoint, clock, args.compile)
        save_model(run.model, folder, tokenizer)
    report(args, tokenizer, phases, data, time.monotonic() - begun)


def keep_memory() -> None:
    """Let malloc keep what it freed: fresh pages for every large tensor cost more than the arithmetic on them."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


if __name__ == "__main__":
    main()
