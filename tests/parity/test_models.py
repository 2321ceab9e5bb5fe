"""Our models against transformers on tiny random configurations, and against themselves, bit for bit."""

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.registry import select_backend
from quire.config.families import WITH_TEXT
from quire.config.model import ModelConfig
from quire.models.registry import build_model
from quire.ops.native.library import TORCH
from quire.worker.weights.load import load_model_weights

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


def ours(saved, name: str, dtype: str = "float32", kernels: str = "torch") -> Any:
    # Without a maximum, dynamic rope scaling is fixed for longer sequences than transformers sees here.
    return tiny.build_ours(saved(name)[1], dtype, kernels, max_model_len=256)


def prompt(length: int = PROMPT_LEN, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.pairs
@pytest.mark.parametrize("name", tiny.CASES)
def test_logits_at_every_position(saved, name: str, kernels: str) -> None:
    found = logits_on_every_path(ours(saved, name, kernels=kernels))
    torch.testing.assert_close(found, their_logits(saved(name)[0], prompt()), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", [name if "qwen3" in name else pytest.param(name, marks=pytest.mark.slow) for name in tiny.SEEING]
)
def test_the_text_of_models_that_see_and_hear(saved, name: str, tmp_path: Path) -> None:
    """From files as they are published, which have all that the language model is run without."""
    theirs, directory = saved(name)
    config = ModelConfig.from_pretrained(str(directory), max_model_len=256)
    model = build_model(config, select_backend("reference"))
    load_model_weights(model, config, "auto", progress=False)
    found = tiny.Paged(tiny.Ours(model, model, select_backend("reference"))).prefill(0, prompt())
    torch.testing.assert_close(found, their_logits(theirs, prompt()), atol=1e-4, rtol=0)


def test_every_model_of_which_text_is_run_has_been_run() -> None:
    assert {model for _, model, _ in tiny.SEEING.values()} == WITH_TEXT


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2"])
def test_logits_on_every_level(saved, name: str, level: str) -> None:
    found = logits_on_every_path(ours(saved, name, kernels=level))
    torch.testing.assert_close(found, their_logits(saved(name)[0], prompt()), atol=1e-4, rtol=0)


def logits_on_every_path(model: Any) -> Tensor:
    first, *others = (tiny.Paged(model, size).prefill(0, prompt(), chunk) for size, chunk in PATHS)
    for (size, chunk), logits in zip(PATHS[1:], others, strict=True):
        assert torch.equal(logits, first), f"block size {size}, chunks of {chunk}"
    return first


@pytest.mark.parametrize("name", tiny.CASES)
def test_greedy_tokens(saved, name: str, native: str) -> None:
    check_greedy(saved, name, native)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in tiny.FAMILIES else pytest.mark.nightly) for n in tiny.CASES],
)
def test_greedy_tokens_of_plain_torch(saved, name: str) -> None:
    check_greedy(saved, name, TORCH)


def check_greedy(saved, name: str, kernels: str) -> None:
    """64 greedy tokens; transformers is asked once, about the whole text, which is greedy decoding by induction."""
    start = prompt(20, seed=1)
    tokens = tiny.Paged(ours(saved, name, kernels=kernels), 16).greedy(0, start, 64)
    their_choice = their_logits(saved(name)[0], start + tokens)[len(start) - 1 : -1].argmax(-1)
    assert tokens == their_choice.tolist()
    assert len(set(tokens)) > 3, "so repetitive a text would hide errors"


@pytest.mark.sweep
@pytest.mark.parametrize("name", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(saved, name: str, dtype: str, kernels: str) -> None:
    check_bits(ours(saved, name, dtype, kernels))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_bits_of_float16_do_not_depend_on_the_batch(saved, name: str) -> None:
    check_bits(ours(saved, name, "float16"))


def check_bits(model: Any) -> None:
    """Prompts and decoded tokens, alone and in a batch that mixes chunks and decodes."""
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


@pytest.mark.parametrize("name", tiny.CASES)
def test_bfloat16_at_every_position(saved, name: str, native: str) -> None:
    check_bfloat16(saved, name, native)


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2"])
def test_bfloat16_on_every_level(saved, name: str, level: str) -> None:
    check_bfloat16(saved, name, level)


def check_bfloat16(saved, name: str, level: str) -> None:
    """The native kernels are as near to transformers' float32 as torch is."""
    expected = their_logits(saved(name)[0], prompt())

    def error(logits: Tensor) -> float:
        errors = (logits.float() - expected).square().mean(-1)
        # Of most positions, as a token whose choice of experts was close chooses others in fewer bits.
        typical = errors.median() if name in tiny.WITH_EXPERTS else errors.mean()
        return (typical.sqrt() / expected.std()).item()

    found = logits_on_every_path(ours(saved, name, "bfloat16", level))
    assert found.dtype == torch.float32, "logits are not rounded"
    torchs = tiny.Paged(ours(saved, name, "bfloat16")).prefill(0, prompt())
    assert error(found) < min(0.1, 1.3 * error(torchs) + 0.005)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_half_precision_is_near_single(saved, name: str) -> None:
    single = tiny.Paged(ours(saved, name)).prefill(0, prompt())
    for dtype, bound in (("bfloat16", 0.1), ("float16", 0.02)):
        half = tiny.Paged(ours(saved, name, dtype)).prefill(0, prompt())
        assert half.dtype == torch.float32
        # Of each position, as a token whose choice of experts was close chooses others in fewer bits.
        errors = (half.float() - single).square().mean(-1).sqrt()
        typical = errors.median() if name in tiny.WITH_EXPERTS else errors.square().mean().sqrt()
        assert typical < bound * single.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_larger_than_one_linear_tile(saved, dtype: str, kernels: str) -> None:
    """More than 32 rows at once, all decoding: rows of different tiles of the matrix products."""
    model = ours(saved, "llama", dtype, kernels)
    batch = tiny.Paged(model, 16, num_sequences=40, max_len=48)
    for s in range(40):
        batch.prefill(s, prompt(3 + s, seed=s))
    together = batch.step({s: [5 + s] for s in range(40)})
    for s in (0, 7, 31, 32, 39):
        alone = tiny.Paged(model, 8)
        alone.prefill(0, prompt(3 + s, seed=s))
        assert torch.equal(alone.step({0: [5 + s]})[0], together[s])
