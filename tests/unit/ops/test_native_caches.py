"""What the kernels make of a machine's caches: sizes as Linux describes them, and results that don't depend on them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native.library import library, loaded_library

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")

KIB, MIB = 1 << 10, 1 << 20
FIRST, CODE, SECOND, LAST = ("1", "Data"), ("1", "Instruction"), ("2", "Unified"), ("3", "Unified")


def cache_of(folder: Path) -> int:
    return loaded_library().quire_cache_of(os.fsencode(folder))


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ([(*FIRST, "48K", "0"), (*CODE, "32K", "0"), (*SECOND, "1024K", "0"), (*LAST, "32768K", "0-7")], MIB),
        ([(*FIRST, "32K", "0,8"), (*CODE, "32K", "0,8"), (*SECOND, "2M", "0,8"), (*LAST, "36M", "0-15")], 2 * MIB),
        ([(*FIRST, "32K", "16"), (*CODE, "64K", "16"), (*SECOND, "2048K", "16-19")], 512 * KIB),  # four slow cores
        ([(*FIRST, "32K", "0-1"), (*SECOND, "4096K", "0-3,8-11")], MIB),
        ([(*FIRST, "64K", "0")], 0),
        ([], 0),
        ([(*FIRST, "", ""), (*SECOND, "", "")], 0),
    ],
)
def test_a_core_s_part_of_the_second_level(
    tmp_path: Path, caches: list[tuple[str, str, str, str]], expected: int
) -> None:
    for i, described in enumerate(caches):
        (tmp_path / f"index{i}").mkdir()
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), described, strict=True):
            (tmp_path / f"index{i}" / name).write_text(value + "\n")
    assert cache_of(tmp_path) == expected


_DIGEST = """
import ctypes, hashlib, sys
sys.path.insert(0, "tests/unit/ops")
import torch
from native_cases import DENSE, Product, Threads, draw, packed
from quire.ops.native.library import loaded_library
digest, cache = hashlib.sha256(), loaded_library().quire_cache_of
with Threads(2):
    for type in DENSE:
        product = Product(packed(draw(700, 1000, seed=1), type), torch.bfloat16)
        for rows in (97, 600):
            digest.update(product(draw(rows, 1000, dtype=torch.bfloat16)).float().numpy().tobytes())
print(cache(None), digest.hexdigest())
"""


@pytest.mark.slow
def test_results_do_not_depend_on_the_cache() -> None:
    found: list[list[str]] = []
    for size in (1, 256 * KIB, 640 * KIB, 1 << 40):
        environment = os.environ | {"QUIRE_L2_CACHE": str(size), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST], env=environment, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip
        found.append(done.stdout.split())
    assert [int(size) for size, _ in found] == [256 * KIB, 256 * KIB, 640 * KIB, 4 * MIB]
    assert len({digest for _, digest in found}) == 1
