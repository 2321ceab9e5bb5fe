"""Engines on a GPU, or where there is none on the CPU in its place: captures are replayed then.

There, kernels are Triton's, interpreted, which takes long, where a test asks for that; in the others plain torch's.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quire import EngineArgs, LLMEngine
from quire.config.worker import WorkerConfig
from quire.ops.native.library import TORCH
from quire.worker import worker
from quire.worker.devices.base import Device
from quire.worker.devices.cpu import CpuDevice
from quire.worker.devices.cuda import CudaDevice
from quire.worker.devices.meter import DeviceMeter
from tests.host_stream import HostDevice, HostStream
from tests.kernels import uninstall

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

Build = Callable[..., LLMEngine]
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 199, "hidden_size": 40,
    "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


@dataclass
class Devices:
    """How `device="cuda"` is made, and what was made."""

    interpreted: bool
    made: list[CudaDevice] = field(default_factory=list)

    def make(self, config: WorkerConfig) -> Device:
        if config.device == "cpu":
            return CpuDevice(config)
        if HAS_GPU:
            self.made.append(CudaDevice(config))
        else:
            is_plain = self.interpreted or config.kernels == TORCH
            self.made.append((CudaDevice if is_plain else HostDevice)(config, HostStream()))
        return self.made[-1]


@contextmanager
def unrehearsed() -> Iterator[None]:
    """Engines made meanwhile compute no step beforehand, which takes most of the time where kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(DeviceMeter, "activation_bytes", lambda *_: 0)
        yield


KINDS = [pytest.param("compiled")] if HAS_GPU else ["stand-in", pytest.param("interpreted", marks=pytest.mark.nightly)]


@pytest.fixture(params=KINDS)
def devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    """Makes the devices of the engines of a test."""
    pytest.importorskip("triton")
    made = Devices(request.param == "interpreted")
    monkeypatch.setattr(worker, "make_device", made.make)
    yield made
    uninstall()


@pytest.fixture
def build(devices: Devices, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Makes engines of a model with random weights: `build(**options)`, on the device unless asked for."""

    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    tiny = str(path)

    def make(**options: Any) -> LLMEngine:
        given = {
            "model": tiny, "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda",
            "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 128,
            "block_size": 16, "enable_prefix_caching": False, "debug": True,
        }  # fmt: skip
        return LLMEngine.from_engine_args(EngineArgs(**(given | options)))

    return make
