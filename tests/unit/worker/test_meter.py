"""The memory that a step takes: measured by small steps, true of large ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from driving import BLOCK_SIZE, Driver

from quire import LLM, SamplingParams
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


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_steps_are_longer_than_the_context(tiny_model: Path, kernels: str) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 1}
    llm = LLM(
        str(tiny_model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2,
        kernels=kernels,
        num_kv_blocks=8,
        speculative_config=speculative,
    )
    params = SamplingParams(temperature=0, max_tokens=4)
    assert len(llm.generate({"prompt_token_ids": [1]}, params)[0].outputs[0].token_ids) == 1


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
