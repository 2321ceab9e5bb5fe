"""Our models against transformers on tiny random configurations, and against themselves, bit for bit."""

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

PROMPT_LEN = 110  # several key tiles, query tiles and windows
# (block size, chunk of the prompt)
PATHS = [(16, 10_000), (8, 7), (64, 16), (1, 33)]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """name -> (transformers model, directory that it is saved in), made on first use."""
    known: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in known:
            theirs = tiny.build_theirs(name)
            known[name] = theirs, tiny.save(theirs, tmp_path_factory.mktemp("model") / name)
        return known[name]

    return get


def ours(saved, name: str, dtype: str = "float32") -> Any:
    # Without a maximum, dynamic rope scaling is fixed for longer sequences than transformers sees here.
    return tiny.build_ours(saved(name)[1], dtype, max_model_len=256)


def prompt(length: int = PROMPT_LEN, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", tiny.CASES)
def test_logits_at_every_position(saved, name: str) -> None:
    expected = their_logits(saved(name)[0], prompt())
    model = ours(saved, name)
    found = [tiny.Paged(model, size).prefill(0, prompt(), chunk) for size, chunk in PATHS]
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)
    for (size, chunk), logits in zip(PATHS[1:], found[1:], strict=True):
        assert torch.equal(logits, found[0]), f"block size {size}, chunks of {chunk}"


@pytest.mark.parametrize("name", tiny.CASES)
def test_greedy_tokens(saved, name: str) -> None:
    """64 greedy tokens; transformers is asked once, about the whole text, which is greedy decoding by induction."""
    start = prompt(20, seed=1)
    tokens = tiny.Paged(ours(saved, name), 16).greedy(0, start, 64)
    their_choice = their_logits(saved(name)[0], start + tokens)[len(start) - 1 : -1].argmax(-1)
    assert tokens == their_choice.tolist()
    assert len(set(tokens)) > 3, "so repetitive a text would hide errors"


@pytest.mark.parametrize("name", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_do_not_depend_on_the_batch(saved, name: str, dtype: str) -> None:
    """Prompts and decoded tokens, alone and in a batch that mixes chunks and decodes."""
    model = ours(saved, name, dtype)
    prompts = [prompt(n, seed=n) for n in (1, 37, 64, 5, 90)]
    decoded = [prompt(6, seed=100 + n) for n in range(len(prompts))]
    texts = [p + d for p, d in zip(prompts, decoded, strict=True)]
    expected = []
    for p, d in zip(prompts, decoded, strict=True):
        one = tiny.Paged(model, 16)
        expected.append(torch.cat([one.prefill(0, p), one.prefill(0, d, chunk=1)]))
    for block_size, seed in ((8, 1), (64, 2)):
        rng = random.Random(seed)
        batch = tiny.Paged(model, block_size, len(texts), seed=seed)
        found: list[list[Tensor]] = [[] for _ in texts]
        while batch.computed != [len(t) for t in texts]:
            step = {}
            for s, text in enumerate(texts):
                step[s] = text[batch.computed[s] :][: rng.choice([0, 1, 1, 3, 16, 50])]
            step = {s: new for s, new in step.items() if new}
            for s, logits in (batch.step(step) if step else {}).items():
                found[s].append(logits)
        for one, parts in zip(expected, found, strict=True):
            assert torch.equal(one, torch.cat(parts))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_half_precision_is_near_single(saved, name: str) -> None:
    single = tiny.Paged(ours(saved, name)).prefill(0, prompt())
    for dtype, bound in (("bfloat16", 0.1), ("float16", 0.02)):
        half = tiny.Paged(ours(saved, name, dtype)).prefill(0, prompt())
        assert half.dtype == getattr(torch, dtype)
        assert (half.float() - single).square().mean().sqrt() < bound * single.std()


def test_batch_larger_than_one_linear_tile(saved) -> None:
    """More than 32 rows at once, all decoding: rows of different tiles of the matrix products."""
    model = ours(saved, "llama")
    batch = tiny.Paged(model, 16, num_sequences=40, max_len=48)
    for s in range(40):
        batch.prefill(s, prompt(3 + s, seed=s))
    together = batch.step({s: [5 + s] for s in range(40)})
    for s in (0, 7, 31, 32, 39):
        alone = tiny.Paged(model, 8)
        alone.prefill(0, prompt(3 + s, seed=s))
        assert torch.equal(alone.step({0: [5 + s]})[0], together[s])
