"""Where the tensors of a GGUF file belong in a model: names, and what llama.cpp's conversion has changed in them.

Names are given as the modules here have them; the family's
`CheckpointFormat` makes the checkpoint's of them. `GGUFSource` is the worker's.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.config.gguf import GGUFFile, GGUFTensor, read_gguf
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.weights import CheckpointFormat, TensorSpec
from quire.quantization.base import CheckpointSlot

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # the configuration has it
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_MLP = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{part: f"mlp.{name}" for part, name in _MLP.items()},
    **{f"{part}_shexp": f"mlp.shared_expert.{name}" for part, name in _MLP.items()},
}
_IN_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICHES = ("gemma2", "gemma3", "olmo2", "glm4", "exaone4")  # of what they have
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 16 * 2**20  # bytes that are dequantized at once, to float32
# In the rows of each head of queries and keys.
_HALVES_INTERLEAVED = ("arcee", "llama", "granite", "granitemoe", "smollm3")
_OTHER_NAMES = {  # of architectures
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    **dict.fromkeys(("arcee", "gpt2", "starcoder2"), {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    **dict.fromkeys(("phi3", "glm4"), {"ffn_up": "mlp.gate_up_proj"}),
}


@dataclass(frozen=True)
class Piece:
    """One tensor of the model's checkpoint, as a part of one of the file's.

    Attributes:
        name: in the checkpoint's terms.
        shape: as the model asks for it.
        first_row, num_rows: the rows of the file's tensor that it is.
        num_heads: of how many heads the rows are, each with its halves interleaved by the conversion; else 0.
        shift: what is added to its values.
        turned: stored the other way around than the model's checkpoints are.
    """

    name: str
    tensor: GGUFTensor
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    num_heads: int = 0
    shift: float = 0.0
    turned: bool = False

    @property
    def start(self) -> int:
        """Offset of its first byte in the file."""
        return self.tensor.offset + self.first_row * self.tensor.row_bytes

    @property
    def spec(self) -> TensorSpec:
        """The tensor before it is read."""
        size = self.num_rows * self.tensor.row_bytes
        return TensorSpec(self.name, self.tensor.kind, self.shape, size, self.tensor.file.name)

    def values(self, rows: np.ndarray, dtype: torch.dtype | None) -> Tensor:
        """The tensor that the model asks for.

        Args:
            rows: its own in the file, uint8 [num_rows, bytes], which may be changed.
            dtype: of what is dequantized; floats stay of their type. None: blocks stay as they are, rows of bytes.

        Raises:
            NotImplementedError: the gguf package can't dequantize such blocks.
        """
        if self.num_heads:
            parts = rows.reshape(self.num_heads, -1, 2, rows.size // self.shape[0])
            rows = parts.swapaxes(1, 2).reshape(rows.shape)
        if dtype is None:
            found = torch.from_numpy(np.ascontiguousarray(rows))
            return found.t() if self.turned else found
        found = _dequantized(rows, self.tensor.kind, dtype)
        found = found.add_(self.shift) if self.shift else found
        return found.reshape(self.shape[::-1]).t() if self.turned else found.reshape(self.shape)


def _dequantized(rows: np.ndarray, kind: str, dtype: torch.dtype) -> Tensor:
    if kind in _FLOATS:
        return torch.from_numpy(np.ascontiguousarray(rows)).view(_FLOATS[kind])
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    step = max(1, _CHUNK // rows.shape[1])
    parts = (dequantize(rows[at : at + step], GGMLQuantizationType[kind]) for at in range(0, len(rows), step))
    return torch.cat([torch.from_numpy(part).to(dtype) for part in parts])


def gguf_pieces(file: GGUFFile, config: ModelConfig, form: CheckpointFormat) -> list[Piece]:
    """What the tensors of `file` are in a model, in their order.

    Raises:
        ModelLoadError: a tensor that has no place in such a model, or whose rows are no heads.
    """
    return [_changed(piece, config, form, _arch(file)) for piece in _all_pieces(file)]


class GGUFTypes(dict[str, str]):
    """The types of the matrices of a file that are in blocks, by the names of their layers or of parts of these."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(
            (piece.name.removesuffix(".weight"), piece.tensor.kind)
            for piece in _all_pieces(file)
            if piece.tensor.kind not in _FLOATS and len(piece.tensor.shape) > 1
        )
        self.kinds = sorted(set(self.values()))


def _arch(file: GGUFFile) -> str:
    return str(file.metadata["general.architecture"])


def _all_pieces(file: GGUFFile) -> Iterator[Piece]:
    """The parts of all tensors, by their names in the modules."""
    arch = _arch(file)
    names = _IN_LAYER | (_IN_SANDWICH if arch in _SANDWICHES else {}) | _OTHER_NAMES.get(arch, {})
    for tensor in file.tensors.values():
        if tensor.name not in _IGNORED:
            yield from _pieces(tensor, names, arch)


def _pieces(tensor: GGUFTensor, names: dict[str, str], arch: str) -> Iterator[Piece]:
    """The parts of a tensor, by their names in the modules."""
    rows = math.prod(tensor.shape[:-1])
    stem, _, kind = tensor.name.rpartition(".")
    if stem in _WHOLE:
        yield Piece(f"{_WHOLE[stem]}.{kind}", tensor, tensor.shape, 0, rows)
        return
    found = _BLOCK.fullmatch(tensor.name)
    layer, part, expert, kind = found.groups() if found else ("", "", None, "")
    projection = _MLP.get(part.removesuffix("_exps"))
    if part.endswith("_exps") and projection and len(tensor.shape) == 3:
        count, height, width = tensor.shape
        for index in range(count):
            name = f"model.layers.{layer}.mlp.experts.{index}.{projection}.{kind}"
            yield Piece(name, tensor, (height, width), index * height, height)
    elif expert is not None and projection:  # as Mixtral was converted at first
        yield Piece(f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{kind}", tensor, tensor.shape, 0, rows)
    elif expert is None and part in names:
        shape = (1, *tensor.shape) if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
        yield Piece(f"model.layers.{layer}.{names[part]}.{kind}", tensor, shape, 0, rows)
    else:
        raise ModelLoadError(
            f"{tensor.file.name}: tensor {tensor.name!r} {list(tensor.shape)} has no place in a model of {arch!r}."
        )


def _changed(piece: Piece, config: ModelConfig, form: CheckpointFormat, arch: str) -> Piece:
    """A piece with what is to be undone, under its name in the checkpoint."""
    heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads} if arch in _HALVES_INTERLEAVED else {}
    num_heads = next((count for part, count in heads.items() if part in piece.name), 0)
    rows = piece.shape[0]
    if num_heads and rows % (2 * num_heads):
        raise ModelLoadError(
            f"{piece.tensor.file.name}: tensor {piece.tensor.name!r} {list(piece.shape)} is not of {num_heads} heads."
        )
    name = form.checkpoint_name(piece.name)
    turned = name.endswith(form.transposed)
    shape = piece.shape[::-1] if turned else piece.shape
    shift = -1.0 if arch.startswith("gemma") and piece.name.endswith("norm.weight") else 0.0
    return replace(piece, name=name, shape=shape, num_heads=num_heads, shift=shift, turned=turned)


class GGUFSource:
    """The tensors of a .gguf model, in file order, under the names of its family's checkpoints.

    Raises:
        ModelLoadError: see `read_gguf` and `gguf_pieces`.
    """

    def __init__(
        self, config: ModelConfig, form: CheckpointFormat, dtype: torch.dtype, slots: Mapping[str, CheckpointSlot]
    ) -> None:
        """`slots`: what the model asks for; blocks stay so where it takes them. `dtype`: of what is dequantized."""
        file = read_gguf(config.path)
        self._dtype, self._slots = dtype, slots
        self._pieces = {piece.spec.name: piece for piece in gguf_pieces(file, config, form)}
        self.num_files = len(file.parts)
        self.specs = [piece.spec for piece in self._pieces.values()]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`."""
        for spec in self.specs:
            if spec.name not in skip:
                try:
                    yield spec, self._read(self._pieces[spec.name])
                except (OSError, ValueError, NotImplementedError) as error:
                    place = f"{spec.file} can't be read at {spec.name!r} {list(spec.shape)} of type {spec.dtype}"
                    raise ModelLoadError(f"{place}: {error}.") from error

    def _read(self, piece: Piece) -> Tensor:
        rows = np.memmap(piece.tensor.file, np.uint8, "c", piece.start, (piece.num_rows, piece.tensor.row_bytes))
        slot = self._slots.get(piece.name)
        raw = slot is not None and torch.uint8 in slot.form.dtypes
        return piece.values(rows, None if raw else self._dtype)  # which may change them: the file stays as it is
