"""Memory that is touched ahead of its use: while nothing is computed, and by a step in all layers at once."""

import ctypes
import gc
import mmap
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import ops
from quire.attention.native import NativeBackend
from quire.ops import AttentionSpec
from quire.ops.batch import AttentionBatch
from quire.ops.native.builder import ProgramBuilder
from quire.ops.native.library import library, prefault
from quire.ops.native.program import Caches, StepData
from quire.ops.native.structs import Type
from quire.worker.pages import huge_pages
from tests.pages import own_bytes
from tests.waiting import wait_until

_VERSION = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
pytestmark = pytest.mark.skipif(
    library() is None or platform.system() != "Linux" or _VERSION < (5, 14), reason="needs Linux 5.14 and kernels"
)


def resident(tensor: torch.Tensor) -> float:
    """The share of a tensor's pages that are in memory."""
    count = -(-tensor.numel() // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), found)
    assert not failed, ctypes.get_errno()
    return sum(page & 1 for page in found) / count


def wait_until_resident(tensor: torch.Tensor) -> None:
    wait_until(lambda: resident(tensor) >= 1, failure="nothing touches it")


def test_touched_by_and_by_with_its_contents() -> None:
    tensors = [huge_pages((9 << 20,), torch.uint8) for _ in range(3)]
    for tensor in tensors:
        tensor[5 << 20] = 7
        assert resident(tensor) < 1
        prefault(tensor, 0)
    for tensor in tensors:
        wait_until_resident(tensor)
        assert tensor[5 << 20] == 7
        assert tensor.sum() == 7


@pytest.mark.slow
def test_what_was_freed_is_left_alone(tmp_path: Path) -> None:
    """Neither memory that is gone is touched, nor a file's copy that came to lie in its place."""
    for _ in range(20):
        prefault(huge_pages((32 << 20,), torch.uint8), 0)
        gc.collect()
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 << 20))
    with path.open("rb") as file:
        copies = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    tensor = torch.frombuffer(copies, dtype=torch.uint8)
    prefault(tensor, 0)
    last = huge_pages((4 << 20,), torch.uint8)
    prefault(last, 0)
    wait_until_resident(last)  # regions take turns: what came before has had one
    assert own_bytes(tensor) == 0


def test_a_step_touches_all_layers_as_far_as_it_writes(level: str) -> None:
    """Before its first layer: what lies before in the caches, too, and nothing behind; the contents stay."""
    spec = AttentionSpec(2, 1, 32, 1.0)
    builder = ProgramBuilder(torch.float32)
    qkv = builder.input(128)
    for layer in range(2):
        qkv = ops.prepare(qkv, replace(spec, layer=layer))
    program = builder.finish(ops.attend(qkv, spec))
    shape = NativeBackend().kv_cache_shape(4096, 16, 1, 32)  # of 4 KB a block
    caches = [huge_pages(shape, torch.float32) for _ in range(2)]
    memory = [cache.view(torch.uint8).view(-1) for cache in caches]
    for each in memory:
        each[100] = 7
    for block, filled in ((1023, 4 << 20), (5, 4 << 20), (2047, 8 << 20)):
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, 1]),
            seq_lens=torch.tensor([1]),
            block_tables=torch.tensor([[block]]),
            slot_mapping=torch.tensor([16 * block]),
            block_size=16,
        )
        step = StepData(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), batch)
        program.run([torch.ones(1, 128), torch.empty(1, 64)], step, Caches(caches, Type.F32))
        for each in memory:
            assert resident(each[:filled]) == 1
            assert resident(each[filled + (2 << 20) :]) == 0
            assert each[100] == 7
