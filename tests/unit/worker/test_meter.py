"""The memory that a step takes: measured by small steps, true of large ones."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from driving import BLOCK_SIZE, Driver

from quire.protocol.cache import LayerCache
from quire.worker.devices.meter import peak_bytes
from quire.worker.gather import INT, StepArrays


def test_peak_is_of_what_is_alive_at_once() -> None:
    def work() -> torch.Tensor:
        first = torch.empty(1000)
        part = torch.empty(500)[:1]  # a view keeps all of it
        del first
        return torch.cat([part, torch.empty(99)])

    kept, peak = peak_bytes(work)
    assert peak == 4 * (1000 + 500)
    assert kept.shape == (100,)


def one_step(num_tokens: int) -> StepArrays:
    positions = np.arange(num_tokens, dtype=INT)
    blocks = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=INT)[None]
    lengths = np.array([num_tokens], INT)
    return StepArrays(positions, positions, np.array([0, num_tokens], INT), lengths, [blocks], [positions], BLOCK_SIZE)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_small_steps_tell_what_a_large_one_takes(drive: Callable[..., Driver], kernels: str) -> None:
    worker = drive(kernels=kernels).executor.worker
    device, runner = worker.device, worker.runner
    layers = [LayerCache(2, 8)] * 2
    ids, step = device.upload(one_step(50), runner.cache.tensors)
    with torch.inference_mode():
        hidden, body = peak_bytes(lambda: runner.model(ids, step))
        _, head = peak_bytes(lambda: runner.model.compute_logits(hidden[:40]))
    meter = device.meter(runner.model, layers, 1)
    kept = meter.activation_bytes(50, 0) - meter.activation_bytes(0, 0)
    measured = meter.activation_bytes(50, 40)
    assert body + head > 0
    assert 0.9 * (body + head) <= measured
    assert kernels == "auto" or measured <= 1.3 * (body + head)
    assert kept > 0
