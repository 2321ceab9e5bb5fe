"""Operations go to kernels where some are installed for the device, and nowhere else."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops.table import OPERATIONS, op
from tests.kernels import uninstall


def test_a_kernel_takes_the_tensors_of_its_device_only() -> None:
    def twice(x: Tensor, factor: float) -> Tensor:
        return x * factor

    operation = op(twice)
    try:
        operation.kernel, operation.kernel_device = (lambda x, factor: "kernel"), "meta"
        assert operation(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
        assert operation(torch.ones(2, device="meta"), 3.0) == "kernel"
        operation.kernel_device = "cpu"
        assert operation(torch.ones(2), 3.0) == "kernel"
    finally:
        del OPERATIONS["twice"]


def test_install_and_uninstall() -> None:
    from quire.ops.triton import KERNELS, install

    assert KERNELS.keys() <= OPERATIONS.keys()
    install("meta")
    try:
        assert {name for name, operation in OPERATIONS.items() if operation.kernel is not None} == KERNELS.keys()
        assert torch.equal(ops.relu(torch.tensor([[-1.0, 2.0]])), torch.tensor([[0.0, 2.0]]))
    finally:
        uninstall()
    assert all(operation.kernel is None for operation in OPERATIONS.values())


def test_products_by_the_vendor() -> None:
    from quire.ops.triton import install

    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    install("cpu", fast_gemm=True)
    try:
        assert torch.equal(ops.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
        assert ops.linear(x.half(), weight.half(), None, torch.float32).dtype == torch.float32
        expected = ops.silu_and_mul(ops.linear(x, weight[:4]))
        assert torch.equal(ops.gated_linear(x, ops.silu_and_mul, weight[:4]), expected)
    finally:
        uninstall()


@pytest.mark.slow
def test_operations_import_no_triton() -> None:
    code = "import sys, quire.ops, quire.layers.moe, quire.quantization.registry; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_kernels_wait_for_those_before() -> None:
    """Launched early, a kernel may read what others write only when it has waited: without a GPU nothing shows that.

    Weights are no kernel's to write.
    """
    launched, waiting = set[str](), set[str]()
    for path in (Path(ops.__file__).parent / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                launched.add(re.findall(r"_\w+", ast.unparse(node.args[0]))[0])
            elif isinstance(node, ast.FunctionDef):
                before, waits, _ = ast.unparse(node).partition("\n    begin_kernel()\n")
                read = set(re.findall(r"tl\.load\((\w+)", before))
                if waits and read <= {"weight"} and "tl.store" not in before:
                    waiting.add(node.name)
    assert {"_linear", "_attend", "_combine", "_norm", "_products"} <= launched
    assert launched <= waiting, launched - waiting
