"""Blocks that go to the host and come back are the same, to the last bit, in every layer and group."""

from pathlib import Path

import pytest
import torch

from quire import EngineArgs
from quire.config.worker import WorkerConfig
from quire.protocol.cache import CacheGroup
from quire.protocol.step import Moves
from quire.worker.cache import KVCache
from quire.worker.devices.cpu import CpuDevice
from quire.worker.tiers import HostCache


@pytest.fixture
def device(tiny_model: Path) -> CpuDevice:
    model = EngineArgs(model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True).resolve().model
    return CpuDevice(WorkerConfig(model=model, block_size=8, max_num_seqs=2, max_num_batched_tokens=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_come_back_as_they_went(device: CpuDevice, dtype: torch.dtype) -> None:
    shapes = [(6, 2, 4), (4, 2, 8), (6, 3, 4)]
    caches = [torch.randint(-100, 100, shape).to(dtype) for shape in shapes]
    groups = [CacheGroup([0, 2]), CacheGroup([1], 8)]
    host = HostCache(device, caches, groups, [3, 2])
    assert [tuple(blocks.shape) for blocks in host.blocks] == [(3, 20 * dtype.itemsize), (2, 16 * dtype.itemsize)]
    kept = [cache.clone() for cache in caches]
    cache = KVCache(device.backend, caches, groups, host)
    cache.carry_out(Moves(out=[(0, 5, 2), (0, 1, 0), (1, 3, 1)]))
    for one in caches:
        one.zero_()
    cache.carry_out(Moves(in_=[(0, 2, 4), (0, 0, 1), (1, 1, 0)]))
    for layer in (0, 2):
        assert torch.equal(caches[layer][4], kept[layer][5])
        assert torch.equal(caches[layer][1], kept[layer][1])
        assert not caches[layer][[0, 2, 3, 5]].any()
    assert torch.equal(caches[1][0], kept[1][3])


def test_one_plan_moves_out_then_within_then_in(device: CpuDevice) -> None:
    caches = [torch.arange(4.0)[:, None, None].repeat(1, 2, 2)]
    groups = [CacheGroup([0])]
    cache = KVCache(device.backend, caches, groups, HostCache(device, caches, groups, [2]))
    cache.carry_out(Moves(out=[(0, 3, 1)], copies=[(0, 2, 3)], in_=[(0, 1, 2)]))
    assert caches[0][:, 0, 0].tolist() == [0.0, 1.0, 3.0, 2.0]


def test_the_speed_of_copies_is_measured(device: CpuDevice) -> None:
    assert device.copy_bytes_per_second() > 0
