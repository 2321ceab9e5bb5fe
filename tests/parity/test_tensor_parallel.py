"""Every family shared by the ranks of a group, against the same model on one rank: logits equal to the last bit.

Ranks are threads here, each with its own model, caches and view of the group; tests/engine has real processes.
"""

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import TCPStore

from quire.distributed.groups import Group, GroupAbortedError, segment_bytes
from quire.distributed.network import NetworkGroup
from quire.errors import ModelLoadError

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

PROMPT = [5, 9, 33, 7, 21, 60, 8, 96, 0, 1, 17, 50, 51, 52, 4, 88, 91, 12, 12, 30]
CASES = (
    *tiny.FAMILIES,
    "llama-tied-mha",
    "llama-biases-mqa",
    "qwen3-window-tied",
    "phi3",
    "gemma2-caps",
    "opt-350m",
    "gpt2-inverse-scale",
    "qwen2-moe-dense-layers",
)
T = TypeVar("T")


def on_ranks(size: int, home: Path, function: Callable[[Group], T]) -> list[T]:
    """What the function returns on each rank; the group is aborted where it raises on one."""
    path = home / "group"
    path.write_bytes(bytes(segment_bytes(97)))
    groups = [Group(str(path), rank, size) for rank in range(size)]

    def run(group: Group) -> T:
        try:
            return function(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in groups]
    return [future.result() for future in futures]


def logits(ours: Any) -> torch.Tensor:
    """Of a prompt in chunks beside another sequence, and of a few tokens after it."""
    paged = tiny.Paged(ours, num_sequences=2)
    parts = [paged.prefill(0, PROMPT, 7)]
    parts += [paged.step({0: [token], 1: PROMPT[i : i + 2]})[0] for i, token in enumerate((3, 44, 96))]
    return torch.cat(parts)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = tiny.save(tiny.build_theirs(name), tmp_path_factory.mktemp("ranks") / name)
        return made[name]

    return save


def check_reduced(directory: Path, home: Path, size: int, **options: Any) -> None:
    """Near one rank's, but equal on all ranks, in every run, and in every batch."""
    expected = logits(tiny.build_ours(directory, **options))

    def run(group: Group) -> list[torch.Tensor]:
        ours = tiny.build_ours(directory, group=group, reduces=True, **options)
        group.agree(None)
        alone = tiny.Paged(ours, num_sequences=2)
        parts = [alone.prefill(0, PROMPT, 3), *(alone.step({0: [token]})[0] for token in (3, 44, 96))]
        return [logits(ours), logits(ours), torch.cat(parts)]

    (first, *others), *ranks = on_ranks(size, home, run)
    for found in (*others, *(found for rank in ranks for found in rank)):
        assert torch.equal(found, first)
    if "quantization" in options:  # as wrong, as columns that are apart have scales of their own
        exact = logits(tiny.build_ours(directory, **options | {"quantization": None, "dtype": "float32"}))
        assert (first - exact).abs().mean() < 1.3 * (expected - exact).abs().mean()
    elif options.get("dtype") == "bfloat16":  # a mixture's token may choose another expert, by a hair's breadth
        assert torch.isclose(first, expected, rtol=0.05, atol=0.15).float().mean() > 0.9
    else:
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES[1:])])
def test_ranks_that_reduce(saved: Callable[[str], Path], tmp_path: Path, kernels: str, dtype: str, name: str) -> None:
    check_reduced(saved(name), tmp_path, 2, dtype=dtype, kernels=kernels)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "quantization"), [(2, "int8"), (2, "int4"), (4, None)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ranks_that_reduce_quantized_weights(
    saved: Callable[[str], Path], tmp_path: Path, kernels: str, size: int, quantization: str | None, name: str
) -> None:
    """A rank's columns have scales of their own."""
    options = {} if quantization is None else {"quantization": quantization, "dtype": "bfloat16"}
    check_reduced(saved(name), tmp_path, size, kernels=kernels, **options)


def check(directory: Path, home: Path, size: int, **options: Any) -> None:
    expected = logits(tiny.build_ours(directory, **options))

    def run(group: Group) -> torch.Tensor:
        ours = tiny.build_ours(directory, group=group, **options)
        group.agree(None)  # all are built: packing takes turns with rank 0's kernels, which wait for others
        return logits(ours)

    for found in on_ranks(size, home, run):
        assert torch.equal(found, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES[1:])])
def test_two_ranks_compute_what_one_does(
    saved: Callable[[str], Path], tmp_path: Path, kernels: str, dtype: str, name: str
) -> None:
    check(saved(name), tmp_path, 2, dtype=dtype, kernels=kernels)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_two_ranks_of_quantized_weights(
    saved: Callable[[str], Path], tmp_path: Path, kernels: str, quantization: str, name: str
) -> None:
    check(saved(name), tmp_path, 2, dtype="bfloat16", kernels=kernels, quantization=quantization)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-biases-mqa", "gpt2"])
def test_four_ranks(saved: Callable[[str], Path], tmp_path: Path, kernels: str, name: str) -> None:
    """More than KV heads; parts of a vocabulary of 97 that are not even."""
    check(saved(name), tmp_path, 4, kernels=kernels)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "gpt-oss"])
def test_ranks_of_several_nodes(saved: Callable[[str], Path], kernels: str, name: str, reduces: bool) -> None:
    """Who gather have one rank's bits; who add up add a residual once, and not once a rank."""
    expected = logits(tiny.build_ours(saved(name), kernels=kernels))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> torch.Tensor:
        own = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        group = NetworkGroup(own, "127.0.0.1", rank, 2)
        ours = tiny.build_ours(saved(name), group=group, reduces=reduces, kernels=kernels)
        group.agree(None)
        return logits(ours)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert torch.equal(first, second)
    if reduces:
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(first, expected)


def test_three_ranks_are_refused_by_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="self_attn' has 4 heads and 2 KV heads, which 3 ranks can't share"):
        on_ranks(3, tmp_path, lambda group: tiny.build_ours(saved("llama"), group=group))


def test_an_abort_ends_all(saved: Callable[[str], Path], tmp_path: Path, kernels: str) -> None:
    def run(group: Group) -> None:
        ours = tiny.build_ours(saved("llama"), group=group, kernels=kernels)
        group.agree(None)
        if group.rank == 1:
            raise ZeroDivisionError
        logits(ours)

    with pytest.raises(GroupAbortedError, match="rank 0 of 2 stops"):
        on_ranks(2, tmp_path, run)
