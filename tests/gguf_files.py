"""Writes GGUF files from checkpoints in Hugging Face layout, as llama.cpp's converter does, for tests.

Names come from the gguf package's own map, not from Quire's. `convert` gives the model, `add_tokenizer` the tokenizer
of a tokenizer.json.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gpt2": "gpt2", "phi3": "phi3", "granite": "granite", "smollm3": "smollm3", "seed_oss": "seed_oss",
    "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4",
    "exaone4": "exaone4", "cohere": "command-r", "cohere2": "cohere2", "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "arcee": "arcee", "starcoder2": "starcoder2", "ernie4_5": "ernie4_5", "qwen3_vl_moe": "qwen3vlmoe",
}  # fmt: skip


def convert(
    directory: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    *,
    dequantized: bool = False,
    split: int = 0,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write the model in `directory` to `path`, its matrices as `kind` (F16 where their rows are no whole blocks).

    `kind` may be a function of GGUF's names. `dequantized`: in its place BF16 of the very same values. `split`: tensors
    in each file. `change`: adds to the metadata.
    """
    config = json.loads((directory / "config.json").read_text())
    config |= {key: value for key, value in config.get("text_config", {}).items() if key != "model_type"}
    arch = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, arch, split_max_tensors=split)
    _add_config(writer, config, arch)
    change(writer)
    names = gguf.get_tensor_name_map(_model_arch(arch), config.get("num_hidden_layers") or config["n_layer"])
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(directory / "model.safetensors").items()}
    for name, values in _joined_experts(tensors).items():
        name = name.replace("language_model.", "")
        if "visual." in name:  # in a file of its own
            continue
        stem, _, suffix = name.rpartition(".")
        theirs = names.get_name(stem)
        assert theirs is not None, f"no GGUF name for {name}"
        own = kind if isinstance(kind, Kind) else kind(theirs)
        _add_tensor(writer, f"{theirs}.{suffix}", _as_converted(name, values, config, arch), own, dequantized)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    for kind_of_text in ("long", "short"):
        if factors := (config.get("rope_parameters") or {}).get(f"{kind_of_text}_factor"):
            writer.add_tensor(f"rope_factors_{kind_of_text}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else next(iter(sorted(path.parent.glob(f"{path.stem}-*.gguf"))))


def _model_arch(arch: str) -> MODEL_ARCH:
    return next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, kind: Kind, dequantized: bool) -> None:
    if values.ndim == 1 or kind == Kind.F32:
        writer.add_tensor(name, values)
        return
    whole = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
    kind = kind if whole else Kind.F16
    if dequantized:
        values, kind = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind), Kind.BF16
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _joined_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of a layer in one tensor, under names that the gguf package knows."""
    joined: dict[str, list[np.ndarray]] = {}
    whole: dict[str, np.ndarray] = {}  # of those that have been together, as transformers writes Qwen3-VL-MoE's
    for name, values in tensors.items():
        name = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj")  # GraniteMoE's
        parts = name.split(".")
        if parts[-2] == "experts":
            halves = ("gate_proj", "up_proj") if parts[-1] == "gate_up_proj" else parts[-1:]
            own = np.split(values, len(halves), axis=1)
            whole |= {f"{name.rpartition('.')[0]}.{half}.weight": x for half, x in zip(halves, own, strict=True)}
            continue
        if "experts" in parts:
            del parts[parts.index("experts") + 1]
        joined.setdefault(".".join(parts), []).append(values)
    return whole | {name: np.stack(found) if "experts" in name else found[0] for name, found in joined.items()}


def _as_converted(name: str, values: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    if arch in ("arcee", "llama", "granite", "granitemoe", "smollm3") and (count := heads.get(name.split(".")[-2])):
        values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        values = values + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        values = values.T
    if name.endswith("shared_expert_gate.weight"):
        values = values[0]
    return np.ascontiguousarray(values)


def _add_config(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    def get(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    size, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head")
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    for add, value in (
        (writer.add_block_count, get("num_hidden_layers", "n_layer")),
        (writer.add_context_length, get("max_position_embeddings", "n_positions")),
        (writer.add_embedding_length, size),
        (writer.add_feed_forward_length, get("intermediate_size") or 4 * size),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, get("num_key_value_heads")),
        (writer.add_key_length, get("head_dim")),
        (writer.add_layer_norm_rms_eps, get("rms_norm_eps")),
        (writer.add_layer_norm_eps, get("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")),
        (writer.add_rope_freq_base, rope.get("rope_theta")),
        (writer.add_embedding_scale, get("embedding_multiplier")),
        (writer.add_attention_scale, get("attention_multiplier")),
        (writer.add_residual_scale, get("residual_multiplier")),
        (writer.add_logit_scale, get("logits_scaling", "logit_scale")),
        (writer.add_expert_count, get("num_experts", "num_local_experts")),
        (writer.add_expert_used_count, get("num_experts_per_tok")),
        (writer.add_expert_feed_forward_length, get("moe_intermediate_size")),
        (writer.add_expert_shared_feed_forward_length, get("shared_expert_intermediate_size")),
        (writer.add_attn_logit_softcapping, get("attn_logit_softcapping")),
        (writer.add_final_logit_softcapping, get("final_logit_softcapping")),
        (writer.add_sliding_window, get("sliding_window") if config.get("use_sliding_window", True) else None),
        (writer.add_bos_token_id, get("bos_token_id")),
        (writer.add_eos_token_id, get("eos_token_id")),
    ):
        if value is not None:
            add(value[0] if isinstance(value, list) else value)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "longrope":
        stretch, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch / original) / math.log(original)))
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if portion := rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int((get("head_dim") or size // heads) * portion))


def _llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    rope, head_dim = config["rope_parameters"], config.get("head_dim") or 8
    old = rope["original_max_position_embeddings"]
    lows, highs = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
    factors = []
    for wavelength in 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        if wavelength < highs:
            factors.append(1.0)
        elif wavelength > lows:
            factors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add_tokenizer(writer: GGUFWriter, file: Path, pre: str = "gpt-2", **settings: Any) -> None:
    """Add the tokenizer of a tokenizer.json; `settings`: of tokenizer.ggml, such as add_bos_token.

    Scores are what SentencePiece gives its BPE: minus the place among the merges.
    """
    spec = json.loads(file.read_text())
    model, added = spec["model"], {token["id"]: token for token in spec["added_tokens"]}
    tokens = {index: token for token, index in model["vocab"].items()}
    tokens |= {index: token["content"] for index, token in added.items()}
    texts, kinds, scores = [], [], []
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    for index in range(max(tokens) + 1):
        text = tokens.get(index, f"[PAD{index}]")
        texts.append(text)
        scores.append(float(-ranks.get(text, 10**6)))
        if index not in tokens:
            kinds.append(gguf.TokenType.UNUSED)
        elif index in added:
            kinds.append(gguf.TokenType.CONTROL if added[index]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            is_byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x")
            kinds.append(gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL)
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    for key, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)


def torch_of(values: np.ndarray) -> torch.Tensor:
    """A copy as a tensor."""
    return torch.from_numpy(np.array(values))
