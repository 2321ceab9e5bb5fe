"""Every kernel compiles for GPUs, here or not, and a product has one instruction however many rows there are."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

INSTRUCTIONS = {80: "mma.sync.", 89: "mma.sync.", 90: "wgmma.mma_async.", 100: "tcgen05.mma.", 120: "mma.sync."}


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(90, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (80, 89, 100, 120)),
    ],
)
def test_every_kernel_compiles(capability: int) -> None:
    """What was compiled before, in build/triton, is not again: Triton goes by the kernels' text."""
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compiling.py")), str(capability)],
        env=os.environ | {"TRITON_CACHE_DIR": str(root / "build/triton"), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    products: dict[tuple[str, str], set[str]] = defaultdict(set)
    for line in map(json.loads, done.stdout.splitlines()):
        if line["kernel"] in ("_linear", "_products"):
            kinds = [kind for kind in line["products"] if not kind.startswith("fma")] or line["products"]
            products[line["kernel"], re.findall(r"bf16|fp32|i8", line["x"])[0]] |= set(kinds)
    assert products.keys() == {("_linear", "bf16"), ("_linear", "fp32"), ("_linear", "i8"), ("_products", "bf16")}
    for (_, dtype), kinds in products.items():
        [kind] = kinds
        if dtype == "i8" and capability == 100:
            assert kind.startswith("mma.sync.")  # Triton has no other for integers there; their sums are exact by any
        else:
            assert kind.startswith("fma" if dtype == "fp32" else INSTRUCTIONS[capability])
