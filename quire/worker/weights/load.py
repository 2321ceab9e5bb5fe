"""Fills a model with the weights of its checkpoint, or with random ones for measurements.

Called once by the worker. Chooses the source and streams it tensor by tensor into the model's own parameters, so that
the peak is the model plus one window of mapped file. Must not know the names or layouts of a family (`load_weights` of
the model owns those), nor a file format (the sources do).
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from quire.config.model import LOAD_FORMATS, ModelConfig
from quire.errors import ConfigError, ModelLoadError
from quire.worker.weights.dummy import DummySource
from quire.worker.weights.safetensors import SafetensorsSource
from quire.worker.weights.source import TensorSource, first_names

ProgressCallback = Callable[[int, int], None]  # (bytes done, bytes in all), after each tensor


@dataclass(frozen=True)
class LoadReport:
    """What loading took, for the start-up log."""

    num_files: int  # 0 for dummy weights
    num_bytes: int  # tensor bytes of the files; for dummy weights the parameters' own
    seconds: float


class _LoadsWeights(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]: ...


class _HasShapes(Protocol):
    dtype: torch.dtype

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]: ...


def load_model_weights(
    model: nn.Module, config: ModelConfig, load_format: str = "auto", progress: bool | ProgressCallback = True
) -> LoadReport:
    """Fill `model`, in place, from `config.path`.

    Args:
        model: has `load_weights(iterable of (checkpoint name, tensor)) -> names of the parameters filled`, and casts
            on copying. A tensor is only good until the next one is asked for.
        load_format: "auto" and "safetensors" read *.safetensors; "dummy" fills with random weights, the same for one
            (config.seed, parameter name) always; "none" leaves the model as it is, to plan.
        progress: True draws a bar on stderr; a callable is told instead.

    Raises:
        ModelLoadError: no weights, a truncated or lying file, a tensor missing, twice, or of the wrong shape; the
            message names the file and the tensor.
        ConfigError: unknown load_format.
    """
    if load_format == "none":
        return LoadReport(0, 0, 0.0)
    start = time.perf_counter()
    source = open_source(model, config, load_format)
    total = sum(spec.num_bytes for spec in source.specs)
    with _progress_callback(progress if source.num_files else False, total) as report:
        loaded = _stream(model, source, report)
    missing = [name for name, _ in model.named_parameters() if name not in loaded]
    if missing:
        # A merged parameter lacks only some of its tensors; the model knows which, by their names in the checkpoint.
        missing = sorted(getattr(model, "missing_weights", ()) or missing)
        raise ModelLoadError(
            f"The checkpoint of {config.model!r} lacks {len(missing)} of the model's tensors: {first_names(missing)}. "
            f"It is incomplete, or not of the architecture {config.architecture} that its config.json names."
        )
    return LoadReport(source.num_files, total, time.perf_counter() - start)


def open_source(model: nn.Module, config: ModelConfig, load_format: str) -> TensorSource:
    """What `load_format` reads the weights of `config.path` from.

    Raises:
        ModelLoadError: see `load_model_weights`. ConfigError: unknown load_format.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {load_format!r}.")
    if load_format == "dummy":
        shaped = cast(_HasShapes, model)
        return DummySource(shaped.checkpoint_shapes(), shaped.dtype, config.seed)
    return SafetensorsSource(config.path, config.model)


def _stream(model: nn.Module, source: TensorSource, report: ProgressCallback) -> set[str]:
    """Hand every tensor to the model; a misfit is reported with the tensor and the file that the model was given."""
    current, current_file = "no tensor", ""
    filled: Collection[str] = getattr(model, "filled_weights", ())

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current, current_file
        total = sum(spec.num_bytes for spec in source.specs)
        done = sum(spec.num_bytes for spec in source.specs if spec.name in filled)
        for spec, tensor in source.stream(filled):
            current, current_file = f"{spec.name!r} {list(spec.shape)} of {spec.file}", spec.file
            yield spec.name, tensor
            done += spec.num_bytes
            report(done, total)

    try:
        with torch.no_grad():
            return cast(_LoadsWeights, model).load_weights(tensors())
    except ModelLoadError as error:
        if current_file in str(error):
            raise
        raise ModelLoadError(f"{current_file}: {error}") from error
    except RuntimeError as error:  # torch's word for shapes that don't match
        raise ModelLoadError(f"Tensor {current} does not fit the model that config.json describes: {error}") from error


@contextmanager
def _progress_callback(progress: bool | ProgressCallback, total: int) -> Iterator[ProgressCallback]:
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        from tqdm import tqdm  # not needed by a silent start

        with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024) as bar:
            yield lambda done, total: cast(None, bar.update(done - bar.n))
