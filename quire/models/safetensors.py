"""Safetensors checkpoints: one file, or shards with an index; every promise is checked before a tensor is read.

A `TensorSource`. The safetensors package holds each header against itself and the file's size; what files say of each
other is checked here, so that a truncated, missing or lying one is an error with its name. Must not know models.
"""

import math
from collections.abc import Collection, Iterator
from itertools import accumulate, groupby
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.config.config_json import describe_unsupported_files, parse_json
from quire.errors import ModelLoadError
from quire.models.quantized import split_name
from quire.models.weights import TensorSpec

_INDEX_FILE = "model.safetensors.index.json"
_WINDOW_BYTES = 256 * 2**20  # a file is unmapped and mapped again after this much, to give its resident pages back
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class SafetensorsSource:
    """The tensors of a directory's *.safetensors, in file order, but each module's together.

    Args:
        directory: the checkpoint's.
        model: its name, for messages.

    Raises:
        ModelLoadError: no weights, or files that contradict the index, each other or themselves.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self._files = _checked_files(directory, model)
        self.num_files = len(self._files)
        self.specs = [spec for specs in self._files.values() for spec in specs]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; one is only good until the next is asked for."""
        for path, specs in self._files.items():
            for window in _windows([spec for spec in specs if spec.name not in skip]):
                current = window[0]
                try:
                    with safe_open(path, framework="pt") as file:
                        for current in window:
                            yield current, file.get_tensor(current.name)
                except (SafetensorError, OSError) as error:
                    place = f"{current.name!r} {list(current.shape)}"
                    raise ModelLoadError(f"{path.name} can't be read at {place}: {error}.") from error


def read_header(path: Path) -> list[TensorSpec]:
    """The tensors of `path` in the order of their bytes, which fill the file from header to end.

    Raises:
        ModelLoadError: the file is truncated, its header contradicts itself or the file's size, or a type is unknown.
    """
    specs: list[TensorSpec] = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                one = file.get_slice(name)
                dtype, shape = one.get_dtype(), tuple(one.get_shape())
                if dtype not in _DTYPE_BYTES:
                    raise ModelLoadError(f"{path}: tensor {name!r} has dtype {dtype!r}, which is not supported.")
                specs.append(TensorSpec(name, dtype, shape, math.prod(shape) * _DTYPE_BYTES[dtype], path.name))
    except OSError as error:
        raise ModelLoadError(f"{path.name} can't be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        size = path.stat().st_size
        raise ModelLoadError(f"{path} is truncated or corrupt: {error} ({size} bytes). Fetch it again.") from error
    return specs


def _by_module(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Files are ordered by type: a matrix's scales may be far from its codes, which should not wait for them."""
    modules: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        modules.setdefault(split_name(spec.name)[0], []).append(spec)
    return [spec for module in modules.values() for spec in module]


def _checked_files(directory: Path, model: str) -> dict[Path, list[TensorSpec]]:
    """The safetensors files to read, each with its tensors in file order; every promise of theirs is checked."""
    if (index := _read_index(directory, model)) is None:
        ignored = ("consolidated", "adapter_")
        paths = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(ignored))
        if not paths:
            hint = describe_unsupported_files(directory) or "Fetch model.safetensors, or use load_format='dummy'."
            raise ModelLoadError(f"Model {model!r} has no *.safetensors weights. {hint}")
    else:
        paths = sorted({directory / file for file in index.values()})
    files = {path: _by_module(read_header(path)) for path in paths}
    home: dict[str, str] = {}
    for path, specs in files.items():
        for spec in specs:
            if spec.name in home:
                raise ModelLoadError(
                    f"Tensor {spec.name!r} of {model!r} is in both {home[spec.name]} and {path.name}: remove "
                    "the file that does not belong to the checkpoint."
                )
            home[spec.name] = path.name
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
        raise ModelLoadError(f"{complaint} names {len(missing)} missing shards: {first_names(missing)}. Fetch them.")
    return weight_map


def _windows(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Cut a file's tensors, in order, into runs of about _WINDOW_BYTES."""
    starts = accumulate((spec.num_bytes for spec in specs), initial=0)
    for _, window in groupby(zip(starts, specs, strict=False), key=lambda pair: pair[0] // _WINDOW_BYTES):
        yield [spec for _, spec in window]


def first_names(names: list[str]) -> str:
    """Some of `names`, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
