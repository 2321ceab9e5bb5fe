"""Fills a model with the weights of its checkpoint, or with random ones for measurements.

Called once by the worker. Finds the safetensors files, checks what they promise (`safetensors_header`) before any is
mapped, and streams tensor by tensor into the model's own parameters, so that the peak is the model plus one window of
mapped file. Must not know the names or layouts of a family: `load_weights` of the model owns those.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quire.config.model import LOAD_FORMATS, ModelConfig
from quire.errors import ConfigError, ModelLoadError
from quire.utils.hub import describe_unsupported_files
from quire.worker.safetensors_header import TensorEntry, read_header

ProgressCallback = Callable[[int, int], None]  # (bytes done, bytes in all), after each tensor

_INDEX_FILE = "model.safetensors.index.json"
_WINDOW_BYTES = 256 * 2**20  # a file is unmapped and mapped again after this much, to give its resident pages back
_DUMMY_STD = 0.02
# Random elements drawn per parameter, then repeated. A prime, so that no two rows of a weight begin at the same
# element: equal rows would tie the logits of different tokens.
_DUMMY_PERIOD = 262_139
# Elements per copy: a longer one is split among threads, which is slower by far while other work has the cores.
_DUMMY_PIECE = 32_767


@dataclass(frozen=True)
class LoadReport:
    """What loading took, for the start-up log."""

    num_files: int  # 0 for dummy weights
    num_bytes: int  # tensor bytes read from the files; for dummy weights the parameters' own
    seconds: float


class _LoadsWeights(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]: ...


class _HasShapes(_LoadsWeights, Protocol):
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
            (config.seed, parameter name) always.
        progress: True draws a bar on stderr; a callable is told instead.

    Raises:
        ModelLoadError: no weights, a truncated or lying file, a tensor missing, twice, or of the wrong shape; the
            message names the file and the tensor.
        ConfigError: unknown load_format.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {load_format!r}.")
    start = time.perf_counter()
    if load_format == "dummy":
        num_bytes = _fill_with_random(cast(_HasShapes, model), config.seed)
        return LoadReport(0, num_bytes, time.perf_counter() - start)
    files = _checked_files(config)
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    with _progress_callback(progress, total) as report:
        loaded = _stream(model, files, report)
    missing = [name for name, _ in model.named_parameters() if name not in loaded]
    if missing:
        # A merged parameter lacks only some of its tensors; the model knows which, by their names in the checkpoint.
        missing = sorted(getattr(model, "missing_weights", ()) or missing)
        raise ModelLoadError(
            f"The checkpoint of {config.model!r} lacks {len(missing)} of the model's tensors: {_first(missing)}. It "
            f"is incomplete, or not of the architecture {config.architecture} that its config.json names."
        )
    return LoadReport(len(files), total, time.perf_counter() - start)


def _checked_files(config: ModelConfig) -> dict[Path, list[TensorEntry]]:
    """The safetensors files to read, each with its tensors in file order; every promise of theirs is checked."""
    index = _read_index(config)
    if index is None:
        ignored = ("consolidated", "adapter_")
        paths = sorted(path for path in config.path.glob("*.safetensors") if not path.name.startswith(ignored))
        if not paths:
            hint = describe_unsupported_files(config.path) or "Fetch model.safetensors, or use load_format='dummy'."
            raise ModelLoadError(f"Model {config.model!r} has no *.safetensors weights. {hint}")
    else:
        paths = sorted({config.path / file for file in index.values()})
    files = {path: read_header(path) for path in paths}
    home: dict[str, str] = {}
    for path, entries in files.items():
        for entry in entries:
            if entry.name in home:
                raise ModelLoadError(
                    f"Tensor {entry.name!r} of {config.model!r} is in both {home[entry.name]} and {path.name}: remove "
                    "the file that does not belong to the checkpoint."
                )
            home[entry.name] = path.name
    for tensor, file in (index or {}).items():
        if home.get(tensor) != file:
            truth = f"it is in {home[tensor]}" if tensor in home else "no shard holds it"
            raise ModelLoadError(
                f"{_INDEX_FILE} of {config.model!r} places tensor {tensor!r} in {file}, but {truth}: fetch both again."
            )
    return files


def _read_index(config: ModelConfig) -> dict[str, str] | None:
    """The index's map from tensor to shard file, whose files all exist; None where the checkpoint has no index."""
    path = config.path / _INDEX_FILE
    complaint = f"{_INDEX_FILE} of {config.model!r}"
    try:
        index = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelLoadError(f"{complaint} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{complaint} is not valid JSON ({error}); fetch it again.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{complaint} has no 'weight_map' from tensors to files; fetch it again.")
    for tensor, file in weight_map.items():
        # A plain file name only: an index must not lead out of the model's directory.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ModelLoadError(f"{complaint} places tensor {tensor!r} in {file!r}, which is no *.safetensors name.")
    missing = sorted(file for file in set(weight_map.values()) if not (config.path / file).is_file())
    if missing:
        raise ModelLoadError(f"{complaint} names {len(missing)} missing shards: {_first(missing)}. Fetch them.")
    return weight_map


def _stream(model: nn.Module, files: dict[Path, list[TensorEntry]], report: ProgressCallback) -> set[str]:
    """Hand every tensor to the model; a misfit is reported with the tensor and the file that the model was given."""
    current, current_file = "no tensor", ""
    filled: set[str] = getattr(model, "filled_weights", set())

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current, current_file
        done, total = 0, sum(entry.num_bytes for entries in files.values() for entry in entries)
        for path, entries in files.items():
            current_file = path.name
            for window in _windows(entries):
                try:
                    with safe_open(path, framework="pt") as file:
                        for entry in window:
                            if entry.name in filled:
                                done += entry.num_bytes
                                continue
                            current = f"{entry.name!r} {list(entry.shape)} of {path.name}"
                            yield entry.name, file.get_tensor(entry.name)
                            done += entry.num_bytes
                            report(done, total)
                except (SafetensorError, OSError) as error:
                    raise ModelLoadError(f"{path.name} can't be read at {current}: {error}.") from error

    try:
        with torch.no_grad():
            return cast(_LoadsWeights, model).load_weights(tensors())
    except ModelLoadError as error:
        if current_file in str(error):
            raise
        raise ModelLoadError(f"{current_file}: {error}") from error
    except RuntimeError as error:  # torch's word for shapes that don't match
        raise ModelLoadError(f"Tensor {current} does not fit the model that config.json describes: {error}") from error


def _windows(entries: list[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Cut a file's tensors, in order, into runs of about _WINDOW_BYTES."""
    window: list[TensorEntry] = []
    window_end = _WINDOW_BYTES
    for entry in entries:
        window.append(entry)
        if entry.begin + entry.num_bytes >= window_end:
            yield window
            window = []
            window_end = entry.begin + entry.num_bytes + _WINDOW_BYTES
    if window:
        yield window


def _fill_with_random(model: _HasShapes, seed: int) -> int:
    """Random tensors in place of a checkpoint's: N(0, 0.02), but ones for the scales of norms (vectors, `*weight`).

    Each tensor has a generator of its own, keyed by seed and name, so its values depend on nothing else. Returns their
    bytes.
    """
    num_bytes = 0

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes
        for name, shape in model.checkpoint_shapes().items():
            tensor = _random_tensor(f"{seed}/{name}", shape, model.dtype)
            num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    with torch.no_grad():
        model.load_weights(tensors())
    return num_bytes


def _random_tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(shape) == 1 and key.endswith("weight"):
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    flat = torch.empty(math.prod(shape), dtype=dtype)
    period = torch.empty(min(flat.numel(), _DUMMY_PERIOD)).normal_(0.0, _DUMMY_STD, generator=generator)
    pieces = period.to(flat.dtype).split(_DUMMY_PIECE)
    for part in flat.split(_DUMMY_PERIOD):
        for target, piece in zip(part.split(_DUMMY_PIECE), pieces, strict=False):
            target.copy_(piece[: target.numel()])
    return flat.view(shape)


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


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
