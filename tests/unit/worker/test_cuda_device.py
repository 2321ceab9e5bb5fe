"""What a GPU can't do here is said before anything is loaded: with the reason, the numbers and what to do instead."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, EngineArgs
from quire.config.worker import WorkerConfig
from quire.errors import ConfigError
from quire.kvcache.capacity import CacheRequest, plan_cache
from quire.protocol.cache import CacheGroup, CacheReport
from quire.worker.devices import stream
from quire.worker.devices.cpu import CpuDevice
from quire.worker.devices.cuda import CudaDevice
from quire.worker.devices.graphs import TOKENS
from quire.worker.devices.select import make_device
from quire.worker.gather import StepArrays
from quire.worker.worker import Place, Worker
from tests.host_stream import TOTAL, HostStream
from tests.kernels import uninstall


@pytest.fixture
def config(tiny_model: Path) -> Any:
    """Makes a worker's configuration."""
    model = EngineArgs(model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True).resolve().model

    def make(**options: Any) -> WorkerConfig:
        given = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "kernels": "torch", **options}
        return WorkerConfig(model=model, **given)

    return make


def test_a_build_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="device='cuda': torch .* is a build without CUDA. Install one"):
        LLM(model="demo", device="cuda")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no GPU: no NVIDIA driver .* CUDA 13.0.* device='cpu' does without"):
        stream.CudaStream()


def test_too_old_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P40")
    with pytest.raises(ConfigError, match="Tesla P40 has compute capability 6.1, below 8.0: too old. Use device='cpu'"):
        stream.CudaStream()


@pytest.mark.parametrize(("quantization", "advice"), [(None, "quantization='int8' or 'int4', or "), ("gptq", "")])
def test_weights_that_do_not_fit(config: Any, quantization: str | None, advice: str) -> None:
    """Of a quantized checkpoint no fewer bits can be made."""
    device = CudaDevice(config(quantization=quantization), HostStream())
    layers = iter([torch.nn.Linear(1024, 2**20, bias=False, device="meta")])

    def build() -> Any:
        if (layer := next(layers, None)) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory") from KeyError(layer)
        return torch.nn.Linear(1024, 2**20, bias=False)

    left = "the weights take 4.0 GiB, and 2.0 of the GPU's 4.0 GiB are free"
    with pytest.raises(ConfigError, match=f"{left}. Take {advice}device='cpu'"):
        device.place(build)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 2}, "one rank so far, and not 2"),
        (
            {"kernels": "auto", "kv_cache_dtype": "fp8"},
            "fp8 needs compute capability 8.9 .* this GPU has 8.0: take 'int8'",
        ),
        ({"kernels": "avx2"}, "kernels='avx2' are a CPU's"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' needs Triton's kernels"),
    ],
)
def test_options_that_a_gpu_can_not_have(config: Any, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("triton")
    stream = HostStream()
    stream.capability = (8, 0)
    try:
        with pytest.raises(ConfigError, match=message):
            CudaDevice(config(**options), stream)
    finally:
        uninstall()


def test_what_a_cpu_can_not_have(config: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' is for GPUs; a CPU has 'int8'"):
        CpuDevice(config(kv_cache_dtype="fp8", kernels="auto"))


def test_the_device_is_chosen(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(make_device(config()), CpuDevice)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(make_device(config(device="cpu")), CpuDevice)
    monkeypatch.setattr("quire.worker.devices.cuda.CudaStream", HostStream)
    assert isinstance(make_device(config()), CudaDevice)
    assert isinstance(make_device(config(device="cuda")), CudaDevice)


def test_a_gpu_that_is_not_nvidias_is_not_taken_unasked(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for AMD's says that there is a GPU, and calls it "cuda"."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(make_device(config()), CpuDevice)
    with pytest.raises(ConfigError, match="a build without CUDA. Install one .* or leave out device"):
        make_device(config(device="cuda"))


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2], [0, 0, 2], [0, 1, 1, 2]])
def test_rows_are_taken_as_often_as_they_are_named(config: Any, rows: list[int]) -> None:
    """Several nodes of a tree go on from one, and may be as many as stood beside that."""
    hidden = torch.arange(6.0).view(3, 2)
    for device in (CpuDevice(config()), CudaDevice(config(), HostStream())):
        assert torch.equal(device.take_rows(hidden, rows), hidden[rows])


def test_a_step_is_of_this_gpu_in_whichever_thread(config: Any) -> None:
    device = CudaDevice(config(), (stream := HostStream()))
    with device.computing():
        assert stream.num_entered == 1


def test_the_start_runs_what_is_compiled_for_numbers_of_rows(config: Any) -> None:
    """Single tokens, whole prompts, and draws; nothing that is larger than what requests bring."""
    place = Place(CudaDevice(given := config(max_num_batched_tokens=300, load_format="dummy"), HostStream()))
    worker = Worker(given, place)
    worker.load(progress=False)
    meter = place.device.meter(worker._runnable, worker._layers, 1)
    seen: list[StepArrays] = []
    drawn: list[int] = []
    watched: Any = dataclasses.replace(
        meter,
        upload=lambda arrays: (seen.append(arrays), meter.upload(arrays))[1],
        draw=lambda logits: drawn.append(len(logits)),
    )
    assert watched.activation_bytes(300, 4) > 0
    assert {1, 4, 65, 129, 257, 300} == {len(arrays.input_ids) for arrays in seen}
    assert {(1,), (1, 1, 1, 1), (65,), (96, 33), (96, 96, 65)} <= {tuple(arrays.seq_lens) for arrays in seen}
    assert all(arrays.seq_lens.max() <= given.model.max_model_len for arrays in seen)
    assert max(drawn) == drawn[-1] == 4


def test_a_step_that_does_not_fit(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(given := config(load_format="dummy"), HostStream())
    worker = Worker(given, Place(device))
    worker.load(progress=False)

    def full(step: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(device.stream, "peak_bytes", full, raising=False)
    with pytest.raises(ConfigError, match="room for the largest step: lower max_num_batched_tokens or max_num_seqs"):
        worker.cache_report()


def test_graphs_have_memory_of_their_own(config: Any) -> None:
    """What a captured step takes is left free beside what the largest step takes."""
    device = CudaDevice(given := config(max_num_batched_tokens=300, load_format="dummy"), HostStream())
    worker = Worker(given, Place(device))
    worker.load(progress=False)
    plain: Any = device.meter(worker._runnable, worker._layers, 1)
    assert plain.captured == 0, "plain torch has no graphs"
    counted = dataclasses.replace(plain, peak_bytes=lambda step: len(step.args[0]) if hasattr(step, "args") else 0)
    needed = [dataclasses.replace(counted, captured=n).activation_bytes(300, 4) for n in (0, 100, 2048)]
    assert [each - needed[0] for each in needed] == [0, 100, 300]
    device.kernels = "triton"
    graphed: Any = device.compile(worker.model)
    assert device.meter(graphed, worker._layers, 1).captured == TOKENS[-1]


def test_a_share_of_a_gpu_is_of_all_its_memory() -> None:
    report = CacheReport(
        total_bytes=1000, available_bytes=700, activation_bytes=100, groups=[CacheGroup([0])], block_bytes=[10]
    )
    request = CacheRequest(block_size=16, max_model_len=160, max_num_seqs=100, max_num_batched_tokens=64)
    assert plan_cache(request, report).num_blocks == [(920 - 300 - 100) // 10]


def test_a_share_of_a_gpu_is_one_engines_own() -> None:
    """As vLLM's: two engines with 0.45 each have 0.9 of a GPU. But all together leave what one alone would leave."""
    report = CacheReport(
        total_bytes=1000, available_bytes=350, activation_bytes=100, groups=[CacheGroup([0])], block_bytes=[10],
        other_bytes=450,
    )  # fmt: skip
    request = CacheRequest(block_size=16, max_model_len=160, max_num_seqs=100, max_num_batched_tokens=64)
    for share, most in ((0.45, 450 + 450), (0.6, 920), (None, 920), (0.98, 980)):
        own = dataclasses.replace(request, gpu_memory_utilization=share)
        assert plan_cache(own, report).num_blocks == [(most - 650 - 100) // 10]


def test_what_others_have_of_a_gpu_is_seen_before_the_model_comes(config: Any) -> None:
    stream = HostStream()
    place = Place(CudaDevice(given := config(load_format="dummy"), stream))
    stream.free_bytes = lambda: 1 << 30  # type: ignore[method-assign]
    worker = Worker(given, place)
    worker.load(progress=False)
    report = worker.cache_report()
    assert (report.other_bytes, report.available_bytes) == (TOTAL // 2, 1 << 30)
