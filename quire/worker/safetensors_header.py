"""Reads and checks the header of a safetensors file, before anything maps the file.

Called by the weight loader. The format (https://huggingface.co/docs/safetensors): 8 bytes of little-endian header
length N, N bytes of JSON, then the tensors' bytes without gaps. Every length and offset is held against the file's
own size, so that a truncated or lying file is an error with names and numbers. Must not know torch.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError

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
        raise ModelLoadError(f"{path.name}: tensor {name!r} has dtype {dtype!r}, which is not supported.")
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
    return ModelLoadError(f"{path.name} is truncated or corrupt: {complaint}. Fetch it again.")
