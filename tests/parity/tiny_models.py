"""Tiny random models of every family, as transformers builds them, and a paged runner for ours.

Used by the parity tests only. `CASES` names the configurations; each is built once per session.
"""

import random
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionBatch
from quire.attention.registry import select_backend
from quire.attention.step import Step, Taps
from quire.config.model import ModelConfig
from quire.models.compiled import CompiledModel
from quire.models.registry import DTYPES, CausalLM, build_model
from quire.models.sharding import Sharding
from quire.models.sources import block_types, open_source
from quire.ops.gather import Meeting
from quire.ops.native.library import TORCH, Target, default_target
from quire.protocol.cache import group_layers
from quire.quantization.packed import Packing
from quire.quantization.registry import select_formats

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXTRAL = LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
QWEN_MOE = LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
OLMOE = LLAMA | {"num_experts": 6, "num_experts_per_tok": 2}
GPT_OSS = LLAMA | {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "truncate": False,
        "rope_theta": 150000.0,
    },
}
GEMMA = LLAMA | {"head_dim": 16, "tie_word_embeddings": True}
OPT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.35,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL = LLAMA | {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.5}}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "num_attention_heads": 2,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.2, 1.3, 1.5, 2.0, 2.5],
        "long_factor": [1.5, 2.0, 4.0, 7.0, 11.0, 15.0],
    },
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
GRANITE_HYBRID = LLAMA | GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 44}
GRANITE_HYBRID |= {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", "mamba_n_heads": 1}
GRANITE_MOE = LLAMA | GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2}

ERNIE_MOE = LLAMA | {"num_hidden_layers": 3, "moe_intermediate_size": 20, "moe_num_experts": 6, "moe_k": 2}
ERNIE_MOE |= {"moe_num_shared_experts": 2}
GLM_MOE = LLAMA | {"num_hidden_layers": 3, "moe_intermediate_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 2}
GLM_MOE |= {"n_shared_experts": 1}

# name -> (config class, model class, arguments of the config); the first of a family has its bare name.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "llama-tied-mha": (
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 12},
    ),
    "llama-biases-mqa": (
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    ),
    "llama-theta": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_theta": 500.0}),
    "llama-linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    ),
    "llama-yarn": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_scaling": YARN}),
    "llama-yarn-mscale": (
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 8, "truncate": False}},
    ),
    "llama-llama3": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"rope_scaling": LLAMA3}),
    "mistral": ("MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": 24}),
    "mistral-full": ("MistralConfig", "MistralForCausalLM", LLAMA | {"sliding_window": None, "head_dim": 16}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", LLAMA),
    "phi3-window": (
        "Phi3Config",
        "Phi3ForCausalLM",
        LLAMA | {"sliding_window": 24, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "phi3-longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        LLAMA | LONGROPE | {"original_max_position_embeddings": 64},
    ),
    "phi3-longrope-short": (
        "Phi3Config",
        "Phi3ForCausalLM",
        LLAMA | LONGROPE | {"max_position_embeddings": 1024, "original_max_position_embeddings": 256},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", LLAMA),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        LLAMA | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA | {"head_dim": 16}),
    "qwen3-window-tied": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        LLAMA
        | {
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 33,
            "max_window_layers": 1,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MIXTRAL),
    "mixtral-window": (
        "MixtralConfig",
        "MixtralForCausalLM",
        MIXTRAL | {"sliding_window": 24, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", QWEN_MOE | {"shared_expert_intermediate_size": 40}),
    "qwen2-moe-dense-layers": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        QWEN_MOE | {"decoder_sparse_step": 2, "qkv_bias": False, "norm_topk_prob": True, "num_hidden_layers": 3},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN_MOE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-dense-layers": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        QWEN_MOE | {"mlp_only_layers": [0], "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
    "gpt-oss-wide": (  # so that gates are clamped, and 2880 columns are no multiple of 64 either
        "GptOssConfig",
        "GptOssForCausalLM",
        GPT_OSS
        | {
            "hidden_size": 96,
            "num_experts_per_tok": 4,
            "initializer_range": 0.22,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "seed-oss": ("SeedOssConfig", "SeedOssForCausalLM", LLAMA | {"head_dim": 16}),
    "seed-oss-biases": (
        "SeedOssConfig",
        "SeedOssForCausalLM",
        LLAMA | {"head_dim": 8, "attention_out_bias": True, "attention_bias": False, "mlp_bias": True},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", LLAMA | {"num_hidden_layers": 4}),
    "smollm3-windows": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        LLAMA | {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 24, "attention_bias": True},
    ),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", LLAMA),
    "arcee-biases": (
        "ArceeConfig",
        "ArceeForCausalLM",
        LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        LLAMA | {"sliding_window": 24, "tie_word_embeddings": True},
    ),
    "starcoder2-windowless": ("Starcoder2Config", "Starcoder2ForCausalLM", LLAMA | {"norm_epsilon": 1e-3}),
    "starcoder2-plain": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        LLAMA | {"use_bias": False, "hidden_act": "relu", "norm_epsilon": 1e-3, "num_key_value_heads": 4},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", LLAMA),
    "olmo2-biases": (
        "Olmo2Config",
        "Olmo2ForCausalLM",
        LLAMA | {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 12, "rope_scaling": LLAMA3},
    ),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", LLAMA | {"num_hidden_layers": 4, "sliding_window": 24}),
    "olmo3-yarn": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        LLAMA
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 40,
            "rope_scaling": YARN | {"attention_factor": 1.2},
        },
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", OLMOE),
    "olmoe-biases": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        OLMOE
        | {
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_scaling": LLAMA3,
        },
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", LLAMA | GRANITE),
    "granite-biases": (
        "GraniteConfig",
        "GraniteForCausalLM",
        LLAMA | GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM", MINISTRAL),
    "granitehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE_HYBRID),
    "granitehybrid-still": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        GRANITE_HYBRID | {"position_embedding_type": None, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "helium": ("HeliumConfig", "HeliumForCausalLM", LLAMA | {"head_dim": 8}),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", GRANITE_MOE),
    "granitemoe-biases": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        GRANITE_MOE | {"num_experts_per_tok": 3, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GEMMA),
    "gemma-legacy-gelu": ("GemmaConfig", "GemmaForCausalLM", GEMMA | {"hidden_act": "gelu", "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA | {"sliding_window": 24, "query_pre_attn_scalar": 10}),
    "gemma2-caps": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        GEMMA
        | {
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "sliding_window": 70,
            "num_hidden_layers": 3,
            "attention_bias": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA | {"sliding_window": 24, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    ),
    "gemma3-ropes": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "sliding_window": 40,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,  # without effect
            "tie_word_embeddings": False,
        },
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
    "opt-350m": ("OPTConfig", "OPTForCausalLM", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt-untied-gelu": (
        "OPTConfig",
        "OPTForCausalLM",
        OPT | {"tie_word_embeddings": False, "activation_function": "gelu", "enable_bias": False},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", LLAMA | {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        LLAMA | {"num_hidden_layers": 4, "sliding_window": 24, "logit_scale": 0.25, "tie_word_embeddings": True},
    ),
    "cohere2-biases": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        LLAMA
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 40,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "layer_norm_eps": 1e-3,
        },
    ),
    "ernie4.5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "ernie4.5-biases": (
        "Ernie4_5Config",
        "Ernie4_5ForCausalLM",
        LLAMA | {"head_dim": 12, "use_bias": True, "num_key_value_heads": 1, "rope_scaling": LLAMA3},
    ),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", ERNIE_MOE),
    "ernie4.5-moe-dense-layers": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        ERNIE_MOE
        | {"num_hidden_layers": 4, "moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2}
        | {"moe_num_shared_experts": 0, "moe_k": 3, "tie_word_embeddings": True},
    ),
    "exaone4": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        LLAMA | {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 16},
    ),
    "exaone4-full": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        LLAMA | {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_scaling": LLAMA3},
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", LLAMA | {"head_dim": 16}),
    "glm4-moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", GLM_MOE | {"head_dim": 16, "routed_scaling_factor": 1.8}),
    "glm4-moe-norms": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        GLM_MOE
        | {"head_dim": 12, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}
        | {"first_k_dense_replace": 0, "n_shared_experts": 2, "partial_rotary_factor": 1.0},
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", LLAMA | {"head_dim": 16}),
    "glm4-whole-heads": (
        "Glm4Config",
        "Glm4ForCausalLM",
        LLAMA | {"head_dim": 12, "partial_rotary_factor": 1.0, "num_key_value_heads": 1, "attention_bias": False},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2-inverse-scale": (
        "GPT2Config",
        "GPT2LMHeadModel",
        GPT2
        | {
            "n_inner": 40,
            "n_head": 2,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
}

VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 32}
QWEN3_VISION = QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 20}
MROPE = LLAMA | {
    "intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}


def _seeing(
    name: str, text: dict[str, Any], senses: dict[str, Any], kind: str = "vision"
) -> tuple[str, str, dict[str, Any]]:
    """A model that sees, or hears, besides."""
    arguments = {"text_config": text, f"{kind}_config": senses, "initializer_range": 0.25}
    return f"{name}Config", f"{name}ForConditionalGeneration", arguments | {"tie_word_embeddings": name == "Gemma3"}


# As CASES; of each, the language model is run alone.
SEEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3-sees": _seeing("Gemma3", GEMMA | {"sliding_window": 24, "num_hidden_layers": 6}, VISION),
    "internvl": _seeing("InternVL", LLAMA | {"model_type": "qwen2"}, VISION | {"image_size": [28, 28]}),
    "llava": _seeing("Llava", LLAMA | {"model_type": "llama"}, CLIP),
    "llava-next": _seeing("LlavaNext", LLAMA | {"model_type": "mistral"}, CLIP),
    "llava-onevision": _seeing("LlavaOnevision", LLAMA | {"model_type": "qwen2"}, CLIP),
    "mistral3": _seeing(
        "Mistral3", LLAMA | {"model_type": "mistral", "head_dim": 16}, VISION | {"model_type": "pixtral", "head_dim": 8}
    ),
    "ministral3-sees": _seeing(
        "Mistral3", MINISTRAL | {"model_type": "ministral3"}, VISION | {"model_type": "pixtral", "head_dim": 8}
    ),
    "qwen2-audio": _seeing("Qwen2Audio", LLAMA | {"model_type": "qwen2"}, AUDIO, "audio"),
    "qwen2-vl": _seeing("Qwen2VL", MROPE, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}),
    "qwen2.5-vl": _seeing("Qwen2_5_VL", MROPE, QWEN_VISION),
    "qwen3-vl": _seeing("Qwen3VL", MROPE | {"head_dim": 8}, QWEN3_VISION),
    "qwen3-vl-moe": _seeing(
        "Qwen3VLMoe", QWEN_MOE | {"head_dim": 8, "rope_parameters": MROPE["rope_parameters"]}, QWEN3_VISION
    ),
    "voxtral": _seeing("Voxtral", LLAMA | {"model_type": "llama"}, AUDIO, "audio"),
}
WITH_EXPERTS = (
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "gpt-oss",
    "olmoe",
    "granitemoe",
    "glm4-moe",
    "ernie4.5-moe",
)
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "granite",
    "granitehybrid",
    "ministral3",
    "smollm3",
    "arcee",
    "starcoder2",
    "olmo2",
    "glm4",
    "exaone4",
    "cohere2",
    *WITH_EXPERTS,
    "gemma",
    "gemma2",
    "gemma3",
    "opt",
    "gpt2",
)


def build_theirs(name: str) -> Any:
    """The transformers model of a case, fp32, seeded; biases and norms are random too, as zeros hide errors."""
    import transformers

    config_class, model_class, arguments = (CASES | SEEING)[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, config_class)(**deepcopy(arguments))  # which writes into what it is given
    model = getattr(transformers, model_class)(config).eval().requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 or parameter_name.endswith("_bias"):
            parameter.normal_(1.0 if parameter_name.endswith("weight") else 0.0, 0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("_bias"):
            buffer.normal_(0.0, 0.2)
    return model


def save(model: Any, directory: Path) -> Path:
    """Write a transformers model in Hugging Face layout."""
    model.save_pretrained(directory)
    return directory


def checkpoint(directory: Path) -> Iterable[tuple[str, Tensor]]:
    """Names and tensors of a saved model."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors").items()


@dataclass(frozen=True)
class Ours:
    """Our model of a saved one, loaded."""

    model: CausalLM
    run: CausalLM | CompiledModel  # the model itself, or its recording
    backend: AttentionBackend


def build_ours(
    directory: Path,
    dtype: str = "float32",
    kernels: str = TORCH,
    tapped: tuple[int, ...] = (),
    *,
    group: Meeting | None = None,
    reduces: bool = False,
    quantization: str | None = None,
    **options: Any,
) -> Ours:
    """Our model of a saved one, on plain torch or recorded for the level of compiled kernels in use.

    `group`: whose ranks share it, and sum up parts where it `reduces`; ranks that are threads of one process need
    different numbers of threads.
    """
    config = ModelConfig.from_pretrained(str(directory), dtype=dtype, **options)
    native = kernels != TORCH
    backend = select_backend("native" if native else "reference")
    packing = Packing(DTYPES[config.dtype], zeros) if native else None
    formats = select_formats(quantization, packing, block_types(config, "auto"))
    model = build_model(config, backend, formats, Sharding(group, reduces=reduces))
    model.load_weights((spec.name, tensor) for spec, tensor in open_source(model, config, "auto").stream(()))
    assert not model.missing_weights
    target = None if group is None or not native else Target(default_target().level, group.rank + 1)
    return Ours(model, CompiledModel(model, target, tapped) if native else model, backend)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@dataclass
class Paged:
    """Runs sequences through the paged path of a model; blocks are scattered, unwritten ones hold NaN."""

    ours: Ours
    block_size: int = 16
    num_sequences: int = 1
    max_len: int = 160
    seed: int = 0
    taps: tuple[int, ...] = ()
    tapped: list[list[Tensor]] = field(default_factory=list)  # of each step
    computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        per_sequence = -(-self.max_len // self.block_size)
        blocks = list(range(1, self.num_sequences * per_sequence + 1))
        random.Random(self.seed).shuffle(blocks)
        self.tables = torch.tensor(blocks).view(self.num_sequences, per_sequence)
        model, backend = self.ours.model, self.ours.backend
        self.caches = []
        for layer in model.cache_layers:
            shape = backend.kv_cache_shape(len(blocks) + 1, self.block_size, layer.num_kv_heads, layer.head_dim)
            self.caches.append(torch.full(shape, torch.nan, dtype=model.dtype))
        self.num_groups = len(group_layers(model.cache_layers))
        self.computed = [0] * self.num_sequences

    @torch.inference_mode()
    def step(self, tokens: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute the next tokens of some sequences; logits [tokens, V] of each."""
        spans = [(s, self.computed[s], self.computed[s] + len(new)) for s, new in tokens.items()]
        rows = torch.tensor([0] + [high - low for _, low, high in spans]).cumsum(0)
        positions = torch.cat([torch.arange(low, high) for _, low, high in spans])
        owner = torch.repeat_interleave(torch.tensor(list(tokens)), rows.diff())
        size = self.block_size
        batch = AttentionBatch(
            query_start_loc=rows,
            seq_lens=torch.tensor([high for _, _, high in spans]),
            block_tables=self.tables[list(tokens)].contiguous(),
            slot_mapping=self.tables[owner, positions // size] * size + positions % size,
            block_size=size,
        )
        ids = torch.tensor([token for new in tokens.values() for token in new])
        taps = Taps(self.taps) if self.taps else None
        step = Step(positions, self.caches, [self.ours.backend.build(batch)] * self.num_groups, taps=taps)
        hidden = self.ours.run(ids, step)
        if taps is not None:
            self.tapped.append(taps.hidden)
        logits = self.ours.run.compute_logits(hidden)
        for s, _, high in spans:
            self.computed[s] = high
        return {s: logits[rows[i] : rows[i + 1]] for i, s in enumerate(tokens)}

    def prefill(self, sequence: int, tokens: list[int], chunk: int = 10_000) -> Tensor:
        """Logits [tokens, V] of a prompt computed in chunks."""
        parts = [self.step({sequence: tokens[i : i + chunk]})[sequence] for i in range(0, len(tokens), chunk)]
        return torch.cat(parts)

    def greedy(self, sequence: int, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens that greedy decoding appends."""
        last = self.prefill(sequence, prompt)[-1]
        found: list[int] = []
        while True:
            found.append(int(last.argmax()))
            if len(found) == num_tokens:
                return found
            last = self.step({sequence: found[-1:]})[sequence][-1]
