"""Safetensors checkpoints: one file, or shards with an index; every promise is checked before a file is mapped.

A `TensorSource`. The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian header length N, N
bytes of JSON, then the tensors' bytes without gaps. Every length and offset is held against the file's own size, so
that a truncated or lying file is an error with names and numbers. Must not know models.
"""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.config.model import parse_json
from quire.errors import ModelLoadError
from quire.utils.hub import describe_unsupported_files
from quire.worker.weights.source import TensorSpec

_INDEX_FILE = "model.safetensors.index.json"
_WINDOW_BYTES = 256 * 2**20  # a file is unmapped and mapped again after this much, to give its resident pages back
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `num_bytes` bytes from `begin`, which counts from the end of the header."""

    name: str
    dtype: str  # in the format's names: "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class SafetensorsSource:
    """The tensors of a directory's *.safetensors, in file order.

    Args:
        directory: the checkpoint's.
        model: its name, for messages.

    Raises:
        ModelLoadError: no weights, or files that contradict the index, each other or themselves.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self._files = _checked_files(directory, model)
        self.num_files = len(self._files)
        self.specs = [_spec(entry, path) for path, entries in self._files.items() for entry in entries]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; one is only good until the next is asked for."""
        for path, entries in self._files.items():
            for window in _windows([entry for entry in entries if entry.name not in skip]):
                current = window[0]
                try:
                    with safe_open(path, framework="pt") as file:
                        for current in window:
                            yield _spec(current, path), file.get_tensor(current.name)
                except (SafetensorError, OSError) as error:
                    place = f"{current.name!r} {list(current.shape)}"
                    raise ModelLoadError(f"{path.name} can't be read at {place}: {error}.") from error


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of `path` in the order of their bytes, which fill the file from header to end.

    Raises:
        ModelLoadError: the file is truncated, or its header contradicts itself or the file's size.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise _broken(path, f"its header claims {header_bytes} bytes, the file has {file_bytes}")
            text = file.read(header_bytes)
    except OSError as error:
        raise ModelLoadError(f"{path.name} can't be read: {error.strerror}.") from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its __metadata__ is not a map of strings")
    entries = sorted(
        (_entry(path, name, value) for name, value in header.items()), key=lambda e: (e.begin, e.num_bytes)
    )
    end = 0
    for entry in entries:
        if entry.begin != end:
            relation = (
                "overlaps the tensor before it" if entry.begin < end else "leaves a gap after the tensor before it"
            )
            raise _broken(
                path, f"tensor {entry.name!r} begins at byte {entry.begin} and {relation}, which ends at {end}"
            )
        end += entry.num_bytes
    data_bytes = file_bytes - 8 - header_bytes
    if end != data_bytes:
        last = f"tensor {entries[-1].name!r} ends" if entries else "its tensors end"
        raise _broken(path, f"{last} at byte {end} of the data, of which the file holds {data_bytes} bytes")
    return entries


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    """One checked entry: known dtype, whole non-negative sizes, and a byte span that the shape explains."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"tensor {name!r} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ModelLoadError(f"{path}: tensor {name!r} has dtype {dtype!r}, which is not supported.")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != num_bytes:
        raise _broken(path, f"tensor {name!r}, {dtype} {shape}, needs {num_bytes} bytes but spans {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), begin, num_bytes)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return result


def _broken(path: Path, complaint: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is truncated or corrupt: {complaint}. Fetch it again.")


def _spec(entry: TensorEntry, path: Path) -> TensorSpec:
    return TensorSpec(entry.name, entry.dtype, entry.shape, entry.num_bytes, path.name)


def _checked_files(directory: Path, model: str) -> dict[Path, list[TensorEntry]]:
    """The safetensors files to read, each with its tensors in file order; every promise of theirs is checked."""
    index = _read_index(directory, model)
    if index is None:
        ignored = ("consolidated", "adapter_")
        paths = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(ignored))
        if not paths:
            hint = describe_unsupported_files(directory) or "Fetch model.safetensors, or use load_format='dummy'."
            raise ModelLoadError(f"Model {model!r} has no *.safetensors weights. {hint}")
    else:
        paths = sorted({directory / file for file in index.values()})
    files = {path: read_header(path) for path in paths}
    home: dict[str, str] = {}
    for path, entries in files.items():
        for entry in entries:
            if entry.name in home:
                raise ModelLoadError(
                    f"Tensor {entry.name!r} of {model!r} is in both {home[entry.name]} and {path.name}: remove "
                    "the file that does not belong to the checkpoint."
                )
            home[entry.name] = path.name
    for tensor, file in (index or {}).items():
        if home.get(tensor) != file:
            truth = f"it is in {home[tensor]}" if tensor in home else "no shard holds it"
            raise ModelLoadError(
                f"{_INDEX_FILE} of {model!r} places tensor {tensor!r} in {file}, but {truth}: fetch both again."
            )
    return files


def _read_index(directory: Path, model: str) -> dict[str, str] | None:
    """The index's map from tensor to shard file, whose files all exist; None where the checkpoint has no index."""
    path = directory / _INDEX_FILE
    complaint = f"{_INDEX_FILE} of {model!r}"
    try:
        index = parse_json(path, repr(model))
    except FileNotFoundError:
        return None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{complaint} has no 'weight_map' from tensors to files; fetch it again.")
    for tensor, file in weight_map.items():
        # A plain file name only: an index must not lead out of the model's directory.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ModelLoadError(f"{complaint} places tensor {tensor!r} in {file!r}, which is no *.safetensors name.")
    missing = sorted(file for file in set(weight_map.values()) if not (directory / file).is_file())
    if missing:
        raise ModelLoadError(f"{complaint} names {len(missing)} missing shards: {_first(missing)}. Fetch them.")
    return weight_map


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


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
