"""What a GGUF file says of itself: its metadata, its tensors, and both as a config.json would have them.

`quire.config.model` reads a `.gguf` model's configuration by it, `quire.text.gguf` its tokenizer, the worker its
tensors. Reads headers only, and holds every count and offset against the file's size before it is believed. (The gguf
package's own reader takes seconds for a large vocabulary, and believes counts.) Knows no torch; the package, of the
extra "gguf", tells the sizes of types.
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from quire.config.families import family_of
from quire.errors import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_FLOATS = {"F32": "float32", "F64": "float32", "F16": "float16"}  # all else runs in bfloat16


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place.

    Attributes:
        kind: ggml's name of its type: "Q4_K", "BF16", ...
        shape: outermost first, as torch has it.
        row_bytes: bytes of a row, which are the innermost dimension's.
        offset: of its first byte in `file`.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    num_bytes: int
    offset: int
    file: Path


@dataclass(frozen=True)
class GGUFFile:
    """A model's files: what the first says, and the tensors of all, in their order."""

    path: Path
    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files that `path`, one of them, is split into (model-00001-of-00003.gguf); itself where it is not split.

    Raises:
        ModelLoadError: its number is none, or others are missing.
    """
    if (found := _PART.search(path.name)) is None:
        return (path,)
    count = int(found[2])
    if not 1 <= int(found[1]) <= count:
        raise ModelLoadError(f"{path.name} names a part {int(found[1])} of {count}: fetch the files again.")
    parts = tuple(path.with_name(_PART.sub(f"-{i:05}-of-{count:05}.gguf", path.name)) for i in range(1, count + 1))
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(f"{path.name} is one of {count} parts, of which {missing[0]} is missing: fetch it too.")
    return parts


def weight_files(path: Path) -> list[Path]:
    """The files of the weights of a model that is a .gguf file, or a directory."""
    return list(gguf_parts(path)) if path.is_file() else sorted(path.glob("*.safetensors"))


def read_gguf(path: Path) -> GGUFFile:
    """Read the headers of a GGUF file, or of all parts that it is split into.

    Raises:
        ModelLoadError: a file is no GGUF of versions 2 or 3, is truncated, or contradicts itself; or the gguf package
            is missing. The message names the file, and the tensor or key.
    """
    parts = gguf_parts(path)
    read = [_read_part(part) for part in parts]
    tensors: dict[str, GGUFTensor] = {}
    for _, found in read:
        for tensor in found:
            if tensor.name in tensors:
                place = f"{tensors[tensor.name].file.name} and {tensor.file.name}"
                raise ModelLoadError(f"Tensor {tensor.name!r} is there twice, in {place}: fetch the files again.")
            tensors[tensor.name] = tensor
    metadata = read[0][0]
    if len(tensors) != (total := metadata.get("split.tensors.count", len(tensors))):
        raise ModelLoadError(f"{path.name} names {total} tensors in all parts, which hold {len(tensors)}.")
    return GGUFFile(path, parts, metadata, tensors)


class _Header:
    """Reads a header value by value; what lies beyond the end of the file is an error."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self.data, self.file = data, file
        self.offset = 4
        self.where = "its start"

    def error(self, complaint: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file}: {self.where} {complaint}: it is damaged or truncated; fetch it again.")

    def take(self, form: str, count: int = 1) -> tuple[Any, ...]:
        size = count * struct.calcsize("<" + form)
        if size > len(self.data) - self.offset:
            raise self.error(f"needs {size} bytes at {self.offset}, where the file has {len(self.data)} in all")
        values = struct.unpack_from(f"<{count}{form}", self.data, self.offset)
        self.offset += size
        return values

    def text(self) -> str:
        (text,) = self.take("s", *self.take("Q"))
        return text.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise self.error(f"has a value of type {kind}, which is none of GGUF's")
        of, count = (*self.take("I"), *self.take("Q"))
        if of == _STRING:
            if count * 8 > len(self.data) - self.offset:
                raise self.error(f"has {count} texts, more than the file's {len(self.data)} bytes")
            return [self.text() for _ in range(count)]
        if of not in _SCALARS:
            raise self.error(f"is a list of values of type {of}, which is not supported")
        return list(self.take(_SCALARS[of], count))


def gguf_in(folder: Path, patterns: Iterable[str] = ("*.gguf",)) -> Path | None:
    """The GGUF model among the files of a folder, by its first file; projectors of images are left alone.

    Raises:
        ModelLoadError: there are several.
    """
    found = {file for pattern in patterns for file in folder.glob(pattern) if not file.name.startswith("mmproj")}
    if len({_PART.sub(".gguf", file.name) for file in found}) > 1:
        names = ", ".join(sorted(file.name for file in found))
        raise ModelLoadError(f"{str(folder)!r} holds several GGUF models: give one of {names}.")
    return min(found, default=None)


def local_gguf(path: Path) -> Path | None:
    """The GGUF model that `path` is, or that a directory holds in place of one in Hugging Face layout."""
    if os.path.isdir(path):
        return None if (path / "config.json").is_file() else gguf_in(path)
    if path.suffix.lower() != ".gguf" or ":" in path.name:
        return None
    if not os.path.isfile(path):
        raise ModelLoadError(
            f"Model file {str(path)!r} does not exist; check the path, or give owner/name:file.gguf for one of the hub."
        )
    return path


def gguf_of_hub(file: str, name: str, download: Callable[[tuple[str, ...]], Path]) -> Path:
    """The file of a hub's repository that `file` stands for, a part of whose name it may be: "Q4_K_M".

    Args:
        name: the repository's, with the file's, for messages.
        download: fetches the files of some patterns into the folder that it tells.

    Raises:
        ModelLoadError: there is none, or several.
    """
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file)
    patterns = (f"*{file}*.gguf",) if stem == file else (f"{stem}.gguf", f"{stem}-*-of-*.gguf")
    if (found := gguf_in(download(patterns), patterns)) is None:
        raise ModelLoadError(f"{name!r}: the repository has no such GGUF file; see the names on its hub page.")
    return found


def _read_part(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """One file's metadata and tensors."""
    try:
        found = path.stat()
        return _read_file(path, found.st_size, found.st_ino, found.st_mtime_ns)
    except OSError as error:
        raise ModelLoadError(f"GGUF file {path.name} can't be read: {error.strerror}.") from error


@lru_cache(maxsize=1)  # configuration, tokenizer, types and weights ask in turn, and a vocabulary takes 0.15 s
def _read_file(path: Path, size: int, *_state: int) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """`_state` tells a file from what lay there before."""
    if not size:  # which can't be mapped
        raise ModelLoadError(f"GGUF file {path.name} is empty: fetch it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _read_header(_Header(data, path.name), path)


def _read_header(header: _Header, path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    if header.data[:4] != b"GGUF":
        raise ModelLoadError(f"{path.name} is no GGUF file: it does not start with b'GGUF'.")
    (version,) = header.take("I")
    if version not in (2, 3):
        raise ModelLoadError(
            f"{path.name} is GGUF of version {version}; versions 2 and 3 (of little-endian machines) are supported: "
            "fetch or convert the model anew."
        )
    num_tensors, num_values = header.take("Q", 2)
    metadata: dict[str, Any] = {}
    for index in range(num_values):
        header.where = f"entry {index} of {num_values} of the metadata"
        key = header.text()
        header.where = f"{key!r} of the metadata"
        if key in metadata:
            raise header.error("is there twice")
        metadata[key] = header.value(*header.take("I"))
    return metadata, _read_tensors(header, path, num_tensors, metadata.get("general.alignment", 32))


def _read_tensors(header: _Header, path: Path, num_tensors: int, alignment: Any) -> list[GGUFTensor]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ModelLoadError(f"{path.name} needs the gguf package; install it with pip install gguf.") from None
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise header.error(f"has general.alignment = {alignment!r}, which is no power of two")
    infos: list[GGUFTensor] = []
    end = 0
    for index in range(num_tensors):
        header.where = f"tensor {index} of {num_tensors}"
        name = header.text()
        header.where = f"tensor {name!r}"
        (num_dims,) = header.take("I")
        if not 1 <= num_dims <= 4:
            raise header.error(f"has {num_dims} dimensions, where 1 to 4 are possible")
        shape = header.take("Q", num_dims)[::-1]
        number, offset = (*header.take("I"), *header.take("Q"))
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise header.error(f"is of type {number}, which the gguf package does not know (a newer one may)") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row, ragged = divmod(shape[-1], block)
        if ragged or 0 in shape:
            raise header.error(f"has the shape {list(shape)}, whose rows are no whole blocks of {kind.name} ({block})")
        num_bytes = row * block_bytes * math.prod(shape[:-1])
        if offset != end:
            raise header.error(f"lies at {offset}, where the one before it ends at {end}")
        end = offset + -(-num_bytes // alignment) * alignment
        infos.append(GGUFTensor(name, kind.name, shape, row * block_bytes, num_bytes, offset, path))
    start = -(-header.offset // alignment) * alignment
    for info in infos:
        if start + info.offset + info.num_bytes > len(header.data):
            header.where = f"tensor {info.name!r} {list(info.shape)} of type {info.kind}"
            raise header.error(f"ends at {start + info.offset + info.num_bytes} of {len(header.data)} bytes")
    return [replace(info, offset=start + info.offset) for info in infos]


# ---- as config.json ----

# Names of the metadata, after the architecture's -> those of config.json.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Architectures of llama.cpp -> model_types of transformers; most have the same name.
# fmt: off
_SAME = (
    "arcee", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "glm4", "gpt2", "granite", "granitemoe", "llama",
    "olmo2", "olmoe", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
)
_MODEL_TYPES = {name: name for name in _SAME} | {
    "command-r": "cohere", "gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen2vl": "qwen2_vl",
    "qwen3moe": "qwen3_moe", "qwen3vl": "qwen3_vl_text", "qwen3vlmoe": "qwen3_moe",
}
# fmt: on
# What llama.cpp's code has where a file is silent.
_SILENT: dict[str, dict[str, Any]] = {
    "qwen2moe": {"norm_topk_prob": False},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"rope_local_base_freq": 10_000.0, "rope_theta": 1e6},
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), {"norm_topk_prob": True}),
}
_WHOLE_HEADS = {"gemma2": 46, "gemma3": 62}  # of 27B: layers of those whose scores are scaled by hidden size / heads


def gguf_config(path: Path, model: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The metadata of a .gguf file as config.json and generation_config.json say it; None for a directory.

    Raises:
        ModelLoadError: an architecture that is not there, or sizes that its own tensors contradict.
    """
    if not path.is_file():
        return None
    file = read_gguf(path)
    metadata, tensors, arch = file.metadata, file.tensors, str(file.metadata.get("general.architecture"))
    if arch not in _MODEL_TYPES:
        raise ModelLoadError(
            f"{model!r} is a GGUF file of architecture {arch!r}, which is not supported; supported are "
            f"{', '.join(_MODEL_TYPES)}."
        )
    architecture, config = family_of(_MODEL_TYPES[arch]).architecture, dict(_SILENT.get(arch, {}))
    config |= {ours: metadata[f"{arch}.{key}"] for key, ours in _KEYS.items() if f"{arch}.{key}" in metadata}
    if arch == "llama" and config.get("num_experts"):
        architecture = "MixtralForCausalLM"
    elif arch == "llama" and config.get("sliding_window"):
        architecture = "MistralForCausalLM"
    elif arch == "olmo2" and config.get("sliding_window"):
        architecture = "Olmo3ForCausalLM"
    elif "logits_scaling" in config and arch in ("command-r", "cohere2"):
        config["logit_scale"] = config.pop("logits_scaling")
    for key in ("token_embd.weight", "blk.0."):
        if not any(name.startswith(key) for name in tensors):
            raise ModelLoadError(f"{model!r} has no tensor {key!r}: it holds no model of text.")
    config |= {
        "architectures": [architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": _dtype(file),
    }
    if kinds := sorted({tensor.kind for tensor in tensors.values()} - {"F32", "F16", "BF16", "F64"}):
        config["quantization_config"] = {"quant_method": "gguf", "types": kinds}
    heads, size = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, list):  # one for each layer
        raise ModelLoadError(f"{model!r} has layers of different numbers of heads, which is not supported.")
    if type(heads) is int and type(size) is int and heads > 0:
        config.setdefault("head_dim", size // heads)
        if arch in _WHOLE_HEADS:
            whole = config.get("num_hidden_layers") == _WHOLE_HEADS[arch]
            config["query_pre_attn_scalar"] = size // heads if whole else config["head_dim"]
    config["sliding_window"] = config.get("sliding_window") or None  # 0 in Phi-4's files, which have none
    _check_sizes(config, file, model)
    _add_rope(config, file, arch)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return config, {"eos_token_id": [token for token in ends if token is not None]}


def _dtype(file: GGUFFile) -> str:
    """The type that most of the matrices' bytes are of; bfloat16 for blocks."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            kind = _FLOATS.get(tensor.kind, "bfloat16")
            sizes[kind] = sizes.get(kind, 0) + tensor.num_bytes
    return max(sizes, key=lambda kind: sizes[kind], default="float32")


def _check_sizes(config: dict[str, Any], file: GGUFFile, model: str) -> None:
    """Hold sizes of the metadata against tensors, so that nothing is allocated for a lie."""
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    said = {
        "embedding_length": (config.get("hidden_size"), file.tensors["token_embd.weight"].shape[-1]),
        "block_count": (config.get("num_hidden_layers"), len(blocks)),
    }
    if up := file.tensors.get("blk.0.ffn_up.weight"):
        merged = 2 if config["architectures"][0] in ("Phi3ForCausalLM", "Glm4ForCausalLM") else 1  # with the gate
        said["feed_forward_length"] = (config.get("intermediate_size"), up.shape[0] // merged)
    if experts := file.tensors.get("blk.0.ffn_up_exps.weight"):
        said["expert_count"] = (config.get("num_experts"), experts.shape[0])
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
        said["expert_feed_forward_length"] = (inner, experts.shape[-2])
    if query := file.tensors.get("blk.0.attn_q.weight"):
        heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
        if type(heads) is int and type(head_dim) is int:
            said["attention.head_count"] = (heads * head_dim, query.shape[0])
    for key, (stated, found) in said.items():
        if stated != found:
            raise ModelLoadError(
                f"{model!r} says {key} = {stated!r} in its metadata, where its tensors have {found}: fetch it again."
            )


def _add_rope(config: dict[str, Any], file: GGUFFile, arch: str) -> None:
    """The scaling of positions: by a kind and a factor, or by tables of factors, as Llama 3.1's and Phi-3's is."""
    get = {key.removeprefix(f"{arch}.rope."): value for key, value in file.metadata.items()}.get
    rotated, head_dim = get("dimension_count", config.get("head_dim")), config.get("head_dim")
    if type(rotated) is int and type(head_dim) is int and 0 < rotated <= head_dim:  # of all, too: GLM's default is half
        config["partial_rotary_factor"] = rotated / head_dim
    if table := file.tensors.get("rope_freqs.weight"):
        if type(head_dim) is int and table.shape != (size := (rotated or head_dim) // 2,):
            raise ModelLoadError(f"{table.file.name}: {table.name!r} has the shape {table.shape}, not ({size},).")
        config["rope_scaling"] = {"rope_type": "default", "factors": _floats(table)}
    elif long := file.tensors.get("rope_factors_long.weight"):
        short = file.tensors.get("rope_factors_short.weight", long)
        factors = {"long_factor": _floats(long), "short_factor": _floats(short)}
        amplitude = get("scaling.attn_factor")
        config["rope_scaling"] = {"rope_type": "longrope", **factors, "attention_factor": amplitude}
    elif (kind := get("scaling.type", "none")) != "none" and (factor := get("scaling.factor")):
        config["rope_scaling"] = {"rope_type": kind, "factor": factor}
    if "rope_scaling" in config and (original := get("scaling.original_context_length")):
        config["rope_scaling"]["original_max_position_embeddings"] = original


def _floats(tensor: GGUFTensor) -> list[float]:
    if tensor.kind != "F32":
        raise ModelLoadError(f"{tensor.file.name}: tensor {tensor.name!r} is of type {tensor.kind}; it must be F32.")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
