"""Where the tensors of quantized safetensors checkpoints belong: which of them make up a matrix, and what that is here.

The worker asks `find_matrices` before it builds a model, by which each matrix gets its type, and streams the tensors
through a `QuantizedSource`: it gives matrices as the kernels' blocks where the model takes those, else in the model's
type. What a matrix is, tensors' names and shapes say; so modules that a checkpoint ignores are plain without a word.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.models import packings
from quire.models.packings import Numbers
from quire.models.weights import CheckpointFormat, TensorSource, TensorSpec
from quire.quantization.base import CheckpointSlot

logger = logging.getLogger(__name__)

Parts = Mapping[str, TensorSpec]
Forms = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]  # by part: its shape, and types that it may have
Reader = Callable[[Mapping[str, Tensor]], Numbers]
_FLOATS = ("F32", "F16", "BF16")
# Of activations and caches, or said by other tensors.
_UNUSED = frozenset(
    ("input_scale", "output_scale", "input_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale", "activation_scale")
    + ("input_global_scale", "weight_shape", "weight_format", "g_idx", "weight.quant_map")
)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of a checkpoint.

    Attributes:
        name: of its module.
        shape: (out, in) features.
        parts: its tensors by the ends of their names.
        read: makes numbers of those.
        group: columns that share a scale; 0 where these lie apart.
        kind: of codes: "U4", "U8", "F8", "C4" or, where activations have eight bits, too, "W8", as the kernels' types
            begin.
    """

    name: str
    shape: tuple[int, int]
    parts: Parts
    read: Reader
    group: int
    kind: str

    @property
    def type(self) -> str | None:
        """The kernels' type of blocks that keeps it as it is; None where it has to be dequantized."""
        num_columns = self.shape[1]
        if self.kind == "W8":
            return "W8A8"
        if num_columns % 32 or not self.group:
            return None
        if self.kind != "C4" and (self.group % 128 == 0 or self.group >= num_columns):
            return f"{self.kind}_128"
        return f"{self.kind}_32" if self.group % 32 == 0 and self.kind != "F8" else None


def find_matrices(source: TensorSource, stated: Mapping[str, Any]) -> dict[str, QuantizedMatrix]:
    """Every quantized matrix of a checkpoint by the name of its weight, `stated` being its quantization_config.

    Raises:
        ModelLoadError: tensors that are missing, or not of the shapes that the others imply; it names them.
    """
    modules: dict[str, dict[str, TensorSpec]] = {}
    for spec in source.specs:
        module, part = split_name(spec.name)
        modules.setdefault(module, {})[part] = spec
    read = _READERS.get(stated["quant_method"], lambda module: None)  # plain, in place of a GGUF file's
    texts = {spec.name for parts in modules.values() for part, spec in parts.items() if "quant_state" in part}
    others = {spec.name for spec in source.specs} - texts
    states = {spec.name: tensor.clone() for spec, tensor in source.stream(others)} if texts else {}
    found: dict[str, QuantizedMatrix] = {}
    for module, parts in modules.items():
        if (matrix := read(_Module(module, parts, stated, states))) is not None:
            found[f"{module}.weight"] = matrix
    return found


def split_name(name: str) -> tuple[str, str]:
    """The module of a tensor and the rest of its name."""
    module, dot, rest = name.partition(".weight.")
    if dot:
        return module, f"weight.{rest}"
    for end in ("blocks", "scales"):  # of MXFP4
        if name.endswith(f"_{end}"):
            return name.removesuffix(f"_{end}").removesuffix(".weight"), end
    return name.rpartition(".")[0], name.rpartition(".")[2]


class BlockTypes:
    """The type of each matrix that is kept in blocks, by its layer's name in the model."""

    def __init__(self, matrices: Mapping[str, QuantizedMatrix], form: CheckpointFormat) -> None:
        self._form = form
        self._types = {form.canonical(name): matrix.type for name, matrix in matrices.items() if matrix.type}
        self.kinds = sorted(set(self._types.values()))

    def get(self, layer: str, default: str, /) -> str:
        """Its type, or `default`."""
        return self._types.get(self._form.checkpoint_name(f"{layer}.weight"), default)


class QuantizedSource:
    """The tensors of a quantized checkpoint, its matrices as the model asks for them.

    Args:
        slots: what the model asks for.
        dtype: of what is dequantized.
    """

    def __init__(
        self,
        source: TensorSource,
        matrices: Mapping[str, QuantizedMatrix],
        slots: Mapping[str, CheckpointSlot],
        form: CheckpointFormat,
        dtype: torch.dtype,
    ) -> None:
        self._source, self._matrices, self._slots, self._form, self._dtype = source, matrices, slots, form, dtype
        self._owners = {spec.name: name for name, one in matrices.items() for spec in one.parts.values()}
        self.num_files = source.num_files
        self.specs: list[TensorSpec] = []
        listed: set[str] = set()
        for spec in source.specs:
            if (name := self._owners.get(spec.name)) is None and split_name(spec.name)[1] not in _UNUSED:
                self.specs.append(spec)
            elif name is not None and name not in listed:
                listed.add(name)
                parts = matrices[name].parts.values()
                size = sum(part.num_bytes for part in parts)
                self.specs.append(TensorSpec(name, spec.dtype, matrices[name].shape, size, spec.file))
        dense = [name for name in matrices if form.canonical(name) in slots and not self._kept(name)]
        if dense:
            logger.info("%d matrices can't be kept in blocks here and are dequantized (%s, ...)", len(dense), dense[0])

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; a matrix when the last of its own tensors has been read."""
        specs = {spec.name: spec for spec in self.specs if spec.name not in skip}
        unread = {spec.name for spec in self._source.specs if self._owners.get(spec.name, spec.name) not in specs}
        waiting: dict[str, dict[str, Tensor]] = {}
        for spec, tensor in self._source.stream(unread):
            if (name := self._owners.get(spec.name)) is None:
                if not self._is_empty_bias(spec.name, tensor):
                    yield spec, tensor
                continue
            matrix, held, part = self._matrices[name], waiting.setdefault(name, {}), split_name(spec.name)[1]
            if len(held) + 1 < len(matrix.parts):
                held[part] = tensor.clone()
                continue
            yield specs[name], self._made(name, matrix, waiting.pop(name) | {part: tensor})

    def _is_empty_bias(self, name: str, tensor: Tensor) -> bool:
        """Tools of old add zeros as a bias to layers that have none."""
        owned = name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in self._matrices
        return owned and self._form.canonical(name) not in self._slots and not tensor.any()

    def _kept(self, name: str) -> str | None:
        """The type of blocks in which the model takes a matrix; None where it takes numbers."""
        slot = self._slots.get(self._form.canonical(name))
        return self._matrices[name].type if slot is not None and slot.form.dtypes == (torch.uint8,) else None

    def _made(self, name: str, matrix: QuantizedMatrix, tensors: Mapping[str, Tensor]) -> Tensor:
        kind = self._kept(name)
        try:
            numbers = matrix.read(tensors)
            if kind is None:
                made = numbers.dense(self._dtype)
            elif kind == "W8A8":
                made = numbers.whole_rows()
            else:
                made = numbers.blocks(kind.startswith("U8"), int(kind.rpartition("_")[2]))
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
            what = f"{next(iter(matrix.parts.values())).file}: the weights of {matrix.name!r} {list(matrix.shape)}"
            raise ModelLoadError(f"{what} can't be read: {error}.") from error
        return made.t() if name.endswith(self._form.transposed) else made


@dataclass(frozen=True)
class _Module:
    """One module's tensors, and what the checkpoint says of its quantization."""

    name: str
    parts: Parts
    stated: Mapping[str, Any]
    states: Mapping[str, Tensor]

    def matrix(self, shape: tuple[int, int], forms: Forms, read: Reader, group: int, kind: str) -> QuantizedMatrix:
        """The matrix of these parts, each held against its shape and its types."""
        for part, (wanted, types) in forms.items():
            if (spec := self.parts.get(part)) is None:
                one = next(iter(self.parts.values()))
                raise ModelLoadError(f"{one.file}: module {self.name!r} is quantized, but lacks a tensor {part!r}.")
            if spec.shape != wanted or spec.dtype not in types:
                raise ModelLoadError(
                    f"{spec.file}: tensor {spec.name!r} is {spec.dtype} {list(spec.shape)}; the others of a matrix of "
                    f"{shape[0]} x {shape[1]}, and what config.json says, imply {' or '.join(types)} {list(wanted)}."
                )
        return QuantizedMatrix(self.name, shape, {part: self.parts[part] for part in forms}, read, group, kind)

    @property
    def scheme(self) -> Mapping[str, Any]:
        """Of compressed-tensors, what is said of such modules."""
        groups = (self.stated.get("config_groups") or {}).values()
        targeted = [(target, group) for group in groups for target in group["targets"]]
        for target, group in targeted:
            if re.match(target[3:], self.name) if target.startswith("re:") else target == self.name:
                return group
        return next((group for target, group in targeted if target == "Linear"), targeted[0][1] if targeted else {})

    def group(self, size: Any, num_columns: int) -> int:
        """Columns of a group; all where none are named."""
        return num_columns if not isinstance(size, int) or size <= 0 else min(size, num_columns)

    def flat(self, part: str) -> TensorSpec:
        """A tensor that has to be a matrix itself."""
        spec = self.parts[part]
        if len(spec.shape) != 2 or 0 in spec.shape:
            raise ModelLoadError(
                f"{spec.file}: tensor {spec.name!r} has the shape {list(spec.shape)}; it must be a matrix."
            )
        return spec


def _gptq(module: _Module) -> QuantizedMatrix | None:
    if "qweight" not in module.parts:
        return None
    words, num_rows = module.flat("qweight").shape
    bits, index = module.stated["bits"], module.parts.get("g_idx")
    if index is not None and index.shape and index.shape[0] in (words * 32 // each for each in (2, 3, 4, 8)):
        bits = words * 32 // index.shape[0]  # some modules may have others
    num_columns = words * 32 // bits
    group = module.group(module.stated["group_size"], num_columns)
    num_groups = -(-num_columns // group)
    own = (*module.parts.get("scales", module.parts["qweight"]).shape, 0)[0]
    if module.stated.get("dynamic") and own not in (0, num_groups) and num_columns % own == 0:
        group, num_groups = num_columns // own, own  # as its rules have it for some modules
    forms = {
        "qweight": ((words, num_rows), ("I32",)),
        "qzeros": ((num_groups, num_rows * bits // 32), ("I32",)),
        "scales": ((num_groups, num_rows), _FLOATS),
    } | ({"g_idx": ((num_columns,), ("I32",))} if index is not None else {})
    read = partial(packings.read_gptq, bits=bits, group=group, plus_one=module.stated["version"] != "gptq_v2")
    scattered = module.stated.get("desc_act") and num_groups > 1
    return module.matrix((num_rows, num_columns), forms, read, 0 if scattered else group, "U8" if bits == 8 else "U4")


def _awq(module: _Module) -> QuantizedMatrix | None:
    if "qweight" not in module.parts:
        return None
    first, second = module.flat("qweight").shape
    gemv = module.stated["version"] == "gemv"
    num_rows, num_columns = (first, second * 8) if gemv else (second * 8, first)
    group = module.group(module.stated["group_size"], num_columns)
    num_groups = -(-num_columns // group)
    shapes = {"qzeros": (num_groups, second), "scales": (num_groups, num_rows)}
    if gemv:
        padding = {64: 2, 32: 4}.get(group, 1)
        words = -(-(num_columns // group) // 8)
        words = -(-words // padding) * padding
        shapes = {"qzeros": (num_rows, words), "scales": (num_rows, words * 8)}
    forms = {"qweight": ((first, second), ("I32",)), "scales": (shapes["scales"], _FLOATS)}
    if module.stated.get("zero_point", True):
        forms["qzeros"] = (shapes["qzeros"], ("I32",))
    read = partial(packings.read_awq, group=group, gemv=gemv)
    return module.matrix((num_rows, num_columns), forms, read, group, "U4")


def _fp8(module: _Module) -> QuantizedMatrix | None:
    if (weight := module.parts.get("weight")) is None or weight.dtype not in ("F8_E4M3", "I8"):
        return None
    num_rows, num_columns = module.flat("weight").shape
    name = next((name for name in ("weight_scale", "weight_scale_inv", "SCB") if name in module.parts), "weight_scale")
    scale = module.parts.get(name)
    shape = () if scale is None else scale.shape
    rows, group = num_rows, num_columns
    if shape in ((num_rows,), (num_rows, 1)) and num_rows > 1:
        rows = 1
    elif len(shape) == 2 and shape != (1, 1):
        rows, group = _scale_block(module, num_columns, shape[1])
        shape = -(-num_rows // rows), -(-num_columns // group)
    elif shape not in ((), (1,), (1, 1)):
        shape = (num_rows, 1)
    forms = {"weight": (weight.shape, (weight.dtype,)), name: (shape, _FLOATS)}
    if "weight_zero_point" in module.parts:
        forms["weight_zero_point"] = (module.parts["weight_zero_point"].shape, ("I8",))
    read = partial(packings.read_bytes, rows=rows, group=group)
    kind = "F8" if weight.dtype != "I8" else "U8"
    if kind == "U8" and group == num_columns and "weight_zero_point" not in forms and _rounds_activations(module):
        kind = "W8"
    return module.matrix((num_rows, num_columns), forms, read, group, kind)


def _rounds_activations(module: _Module) -> bool:
    """To integers of eight bits; each token's scale is its own here, whatever was measured."""
    stated = module.scheme.get("input_activations") or {}
    return stated.get("num_bits") == 8 and stated.get("type", "int") == "int"


def _scale_block(module: _Module, num_columns: int, num_groups: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    arguments = module.scheme.get("weights", {})
    stated = module.stated.get("weight_block_size") or arguments.get("block_structure")
    if isinstance(stated, list) and len(stated) == 2 and all(type(size) is int and size > 0 for size in stated):
        return stated[0], stated[1]
    size = arguments.get("group_size")
    if size or num_groups == 0 or num_columns % num_groups:
        return 1, module.group(size, num_columns)
    return 1, num_columns // num_groups


def _compressed(module: _Module) -> QuantizedMatrix | None:
    if (packed := module.parts.get("weight_packed")) is None:
        return _fp8(module)
    num_rows, words = module.flat("weight_packed").shape
    if packed.dtype == "U8":
        scale = "weight_scale"
        forms = {"weight_packed": (packed.shape, ("U8",)), scale: ((num_rows, words // 16), ("U8", "F8_E8M0"))}
        read = partial(packings.read_mxfp4, num_columns=words * 2, codes="weight_packed", exponents=scale)
        return module.matrix((num_rows, words * 2), forms, read, 32, "C4")
    arguments = module.scheme.get("weights", {})
    bits = arguments.get("num_bits", 4)
    num_columns = words * 32 // bits
    group = module.group(arguments.get("group_size"), num_columns)
    num_groups = -(-num_columns // group)
    forms = {"weight_packed": (packed.shape, ("I32",)), "weight_scale": ((num_rows, num_groups), _FLOATS)}
    zeros, scattered = module.parts.get("weight_zero_point"), "weight_g_idx" in module.parts
    if zeros is not None:
        whole = zeros.dtype == "I8"
        forms["weight_zero_point"] = ((num_rows if whole else -(-num_rows * bits // 32), num_groups), ("I8", "I32"))
    elif not arguments.get("symmetric", True):
        forms["weight_zero_point"] = ((num_rows, num_groups), ("I8", "I32"))  # which is missing
    if scattered:
        forms["weight_g_idx"] = ((num_columns,), ("I32", "I64"))
    read = partial(packings.read_packed, bits=bits, num_columns=num_columns, group=group)
    return module.matrix((num_rows, num_columns), forms, read, 0 if scattered else group, f"U{bits}")


def _bitsandbytes(module: _Module) -> QuantizedMatrix | None:
    if (state := next((part for part in module.parts if part.startswith("weight.quant_state.")), None)) is None:
        return _fp8(module) if "SCB" in module.parts else None
    spec = module.parts[state]
    try:
        found = packings.four_bits_state(module.states[spec.name])
        num_rows, num_columns = (int(size) for size in found["shape"])
        blocksize = int(found["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{spec.file}: tensor {spec.name!r} describes no matrix: {error}.") from error
    count = num_rows * num_columns
    num_blocks, nested = -(-count // blocksize), found.get("nested_blocksize")
    forms = {
        "weight": ((-(-count // 2), 1), ("U8",)),
        "weight.absmax": ((num_blocks,), ("U8" if nested else "F32",)),
        state: (spec.shape, ("U8",)),
    }
    if nested:
        forms["weight.nested_absmax"] = ((-(-num_blocks // int(nested)),), ("F32",))
        forms["weight.nested_quant_map"] = ((256,), ("F32",))
    read = partial(packings.read_four_bits, shape=(num_rows, num_columns))
    return module.matrix((num_rows, num_columns), forms, read, 0 if num_columns % blocksize else blocksize, "C4")


def _mxfp4(module: _Module) -> QuantizedMatrix | None:
    if (blocks := module.parts.get("blocks")) is None:
        return None
    if len(blocks.shape) != 3 or 0 in blocks.shape or blocks.shape[2] != 16:
        raise ModelLoadError(
            f"{blocks.file}: tensor {blocks.name!r} has the shape {list(blocks.shape)}, not [rows, groups of 32, 16]: "
            "experts in one tensor are not supported."
        )
    num_rows, num_groups = blocks.shape[:2]
    forms = {"blocks": (blocks.shape, ("U8",)), "scales": ((num_rows, num_groups), ("U8", "F8_E8M0"))}
    read = partial(packings.read_mxfp4, num_columns=num_groups * 32)
    return module.matrix((num_rows, num_groups * 32), forms, read, 32, "C4")


_READERS: dict[str, Callable[[_Module], QuantizedMatrix | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
