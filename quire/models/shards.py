"""What safetensors files say of themselves and of each other, read without torch: one file, or shards with an index.

`SafetensorsSource` reads the tensors, and a server of several models (`quire.entrypoints.server.room`) what they take.
The safetensors package holds each header against itself and the file's size; what files say of each other is checked
here, so that a truncated, missing or lying one is an error with its name.
"""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.config.config_json import describe_unsupported_files, parse_json
from quire.errors import ModelLoadError
from quire.models.spec import TensorSpec

_INDEX_FILE = "model.safetensors.index.json"
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def read_header(path: Path) -> list[TensorSpec]:
    """The tensors of `path` in the order of their bytes, which fill the file from header to end.

    Raises:
        ModelLoadError: the file is truncated, its header contradicts itself or the file's size, or a type is unknown.
    """
    specs: list[TensorSpec] = []
    try:
        with safe_open(path, framework="numpy") as file:
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


def checked_files(directory: Path, model: str) -> dict[Path, list[TensorSpec]]:
    """The safetensors files to read, each with its tensors in file order; every promise of theirs is checked."""
    if (index := _read_index(directory, model)) is None:
        ignored = ("consolidated", "adapter_")
        paths = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(ignored))
        if not paths:
            hint = describe_unsupported_files(directory) or "Fetch model.safetensors, or use load_format='dummy'."
            raise ModelLoadError(f"Model {model!r} has no *.safetensors weights. {hint}")
    else:
        paths = sorted({directory / file for file in index.values()})
    files = {path: read_header(path) for path in paths}
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
    if not isinstance(weight_map := index.get("weight_map"), dict) or not weight_map:
        raise ModelLoadError(f"{complaint} has no 'weight_map' from tensors to files; fetch it again.")
    for tensor, file in weight_map.items():
        # A plain file name only: an index must not lead out of the model's directory.
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ModelLoadError(f"{complaint} places tensor {tensor!r} in {file!r}, which is no *.safetensors name.")
    missing = sorted(file for file in set(weight_map.values()) if not (directory / file).is_file())
    if missing:
        raise ModelLoadError(f"{complaint} names {len(missing)} missing shards: {first_names(missing)}. Fetch them.")
    return weight_map


def first_names(names: list[str]) -> str:
    """Some of `names`, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
