"""The fingerprint of KV blocks differs with everything that decides their bytes, and with nothing else."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from quire import EngineArgs
from quire.config.worker import WorkerConfig
from quire.protocol.cache import LayerCache
from quire.worker.fingerprint import kv_fingerprint

LAYERS = [LayerCache(2, 16), LayerCache(2, 16, 8)]


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> WorkerConfig:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(5000))
    model = EngineArgs(model=str(tmp_path / "model"), skip_tokenizer_init=True).resolve().model
    return WorkerConfig(model=model, block_size=8, max_num_seqs=2, max_num_batched_tokens=8)


def of(config: WorkerConfig, kernels: str = "torch", layers: list[LayerCache] = LAYERS, **changes: object) -> bytes:
    return kv_fingerprint(dataclasses.replace(config, **changes), kernels, layers)  # type: ignore[arg-type]


def test_what_decides_a_blocks_bytes_is_in_it(config: WorkerConfig) -> None:
    model = config.model
    found = [
        of(config),
        of(config, quantization="int8"),
        of(config, kv_cache_dtype="int8"),
        of(config, block_size=16),
        of(config, load_format="dummy"),
        of(config, layers=LAYERS[:1]),
        of(config, draft=model),
        of(config, model=dataclasses.replace(model, seed=7)),
        of(config, model=dataclasses.replace(model, rope_parameters={"rope_type": "default", "rope_theta": 5.0})),
    ]
    weights = model.path / "model.safetensors"
    weights.write_bytes(bytes(4999) + b"x")
    found.append(of(config))
    assert len(set(found)) == len(found)
    assert all(len(each) == 32 for each in found)


def test_the_rest_is_not(config: WorkerConfig) -> None:
    changes = {"max_num_seqs": 9, "max_num_batched_tokens": 99, "kv_cache_dir": "x", "debug": True, "swaps": True}
    shorter = dataclasses.replace(config.model, max_model_len=17, model="another name")
    assert of(config, **changes) == of(config) == of(config, model=shorter)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_the_longest_context_is_where_rotations_follow_from_it(config: WorkerConfig, kind: str) -> None:
    model = dataclasses.replace(config.model, rope_parameters={"rope_type": kind, "factor": 2.0})
    shorter = dataclasses.replace(model, max_model_len=17)
    assert of(config, model=model) != of(config, model=shorter) != of(config, draft=shorter) != of(config, draft=model)


def test_other_kernels_are_others(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [of(config)]
    library = tmp_path / "kernels.so"
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", str(library))
    for content in (b"one", b"other"):
        library.write_bytes(content)
        found += [of(config, "avx2"), of(config, "portable")]
    monkeypatch.setattr(torch, "__version__", "9.9")
    found.append(of(config))
    assert len(set(found)) == 6


def test_a_gpu_of_another_kind_is_another(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on a GPU is the compiled kernels', which need not be there; torch brings the Triton that it is for."""
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", "there is none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found: list[bytes] = []
    for name in ("NVIDIA A100", "NVIDIA H100"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        found += [of(config, "triton"), of(config)]
    monkeypatch.setattr(torch, "__version__", "9.9")
    found.append(of(config, "triton"))
    assert len(set(found)) == 5
