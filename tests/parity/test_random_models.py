"""Models that dice make against transformers: what no published checkpoint has shown, config.json may say tomorrow.

Sizes, heads, biases, activations, windows, ways of rotation and of routing are drawn for each family; prompts are
computed whole or in chunks, by torch or by the kernels. QUIRE_NIGHTLY=1 makes many of them.
"""

import importlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelLoadError
from quire.ops.native.library import TORCH

transformers = pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

ROUNDS = 100 if os.environ.get("QUIRE_NIGHTLY") == "1" else 5
OLD_LENGTH = {"original_max_position_embeddings": 64}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | OLD_LENGTH,
    {"rope_type": "yarn", "factor": 4.0} | OLD_LENGTH,
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1, "beta_fast": 16.0} | OLD_LENGTH,
]
GELUS = ["gelu", "gelu_new", "gelu_pytorch_tanh"]
Drawn = dict[str, Any]
Dice = random.Random
pytestmark = pytest.mark.slow


def llama(dice: Dice) -> Drawn:
    """What all of Llama's kin have."""
    heads = dice.choice([1, 2, 3, 4, 6])
    found: Drawn = tiny.LLAMA | {
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([count for count in (1, 2, 3, 6) if heads % count == 0]),
        "hidden_size": heads * dice.choice([8, 12, 16, 20]),
        "intermediate_size": dice.choice([20, 52, 64]),
        "num_hidden_layers": dice.choice([1, 2, 3, 4]),
        "tie_word_embeddings": dice.random() < 0.4,
        "rms_norm_eps": dice.choice([1e-6, 1e-5, 1e-3]),
        "hidden_act": dice.choice(["silu", *GELUS]),
    }
    found |= {"rope_scaling": dict(dice.choice(ROPES))} if dice.random() < 0.5 else {}
    return found | ({"rope_theta": dice.choice([300.0, 1e6])} if dice.random() < 0.4 else {})


def own_heads(dice: Dice) -> Drawn:
    found = llama(dice)
    return found | {"head_dim": dice.choice([8, 12, 16, 20, found["hidden_size"] // found["num_attention_heads"]])}


def biased(dice: Dice) -> Drawn:
    return own_heads(dice) | {name: dice.random() < 0.4 for name in ("attention_bias", "mlp_bias")}


def windowed(dice: Dice) -> Drawn:
    return own_heads(dice) | {"sliding_window": dice.choice([None, 7, 40])}


def phi3(dice: Dice) -> Drawn:
    found = llama(dice) | {"sliding_window": dice.choice([None, 7, 40]), "rope_scaling": None}
    rotated = 0.5 if found["hidden_size"] // found["num_attention_heads"] % 4 == 0 else 1.0
    return found | {"partial_rotary_factor": dice.choice([1.0, rotated])}


def layer_types(dice: Dice, found: Drawn) -> Drawn:
    drawn = [dice.choice(["full_attention", "sliding_attention"]) for _ in range(found["num_hidden_layers"])]
    has_windows = found.get("use_sliding_window", True)
    return found | ({"layer_types": drawn} if has_windows and dice.random() < 0.3 else {})


def switched(dice: Dice) -> Drawn:
    """With windows as Qwen has them."""
    found = own_heads(dice) | {"use_sliding_window": dice.random() < 0.5}
    return found | {"sliding_window": dice.choice([9, 33]), "max_window_layers": dice.choice([0, 1, 2, 28])}


def qwen2(dice: Dice) -> Drawn:
    return layer_types(dice, switched(dice))


def qwen3(dice: Dice) -> Drawn:
    return qwen2(dice) | {"attention_bias": dice.random() < 0.4}


def mixture(dice: Dice) -> Drawn:
    return {
        "num_experts": dice.choice([2, 6]),
        "num_experts_per_tok": dice.choice([1, 2]),
        "moe_intermediate_size": dice.choice([12, 20]),
        "norm_topk_prob": dice.random() < 0.5,
        "decoder_sparse_step": dice.choice([1, 1, 2, 3]),
        "mlp_only_layers": dice.choice([[], [], [0]]),
    }


def qwen2_moe(dice: Dice) -> Drawn:
    shared = {"shared_expert_intermediate_size": dice.choice([12, 40]), "qkv_bias": dice.random() < 0.6}
    found = switched(dice) | mixture(dice) | shared
    return layer_types(dice, found | {"hidden_size": found["num_attention_heads"] * found["head_dim"]})


def qwen3_moe(dice: Dice) -> Drawn:
    return switched(dice) | mixture(dice) | {"attention_bias": dice.random() < 0.4}


def mixtral(dice: Dice) -> Drawn:
    return windowed(dice) | {"num_local_experts": dice.choice([2, 5]), "num_experts_per_tok": dice.choice([1, 2])}


def gpt_oss(dice: Dice) -> Drawn:
    found = own_heads(dice) | {"num_local_experts": dice.choice([2, 5]), "num_experts_per_tok": dice.choice([1, 2])}
    del found["hidden_act"]
    found |= {"sliding_window": dice.choice([7, 40]), "attention_bias": dice.random() < 0.6}
    return layer_types(dice, found)


def granite(dice: Dice) -> Drawn:
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    return biased(dice) | {name: dice.choice([0.2, 1.0, 3.0]) for name in names}


def granitemoe(dice: Dice) -> Drawn:
    return granite(dice) | {"num_local_experts": dice.choice([2, 5]), "num_experts_per_tok": dice.choice([1, 2])}


def ministral3(dice: Dice) -> Drawn:
    found = own_heads(dice) | {"rope_parameters": dict(ROPES[2]) | {"rope_theta": dice.choice([300.0, 1e6])}}
    found["rope_parameters"]["llama_4_scaling_beta"] = dice.choice([0.1, 1.0])
    return {key: value for key, value in found.items() if key not in ("rope_scaling", "rope_theta")}


def granitehybrid(dice: Dice) -> Drawn:
    found = granite(dice) | {"num_local_experts": 0, "shared_intermediate_size": dice.choice([20, 60])}
    found["layer_types"] = ["full_attention"] * found["num_hidden_layers"]
    return found | {"position_embedding_type": dice.choice([None, "rope"]), "mamba_n_heads": 1}


def helium(dice: Dice) -> Drawn:
    found = llama(dice)
    return found | {"head_dim": found["hidden_size"] // found["num_attention_heads"]}  # o_proj is square


def smollm3(dice: Dice) -> Drawn:
    found = biased(dice) | {"use_sliding_window": dice.random() < 0.5, "sliding_window": dice.choice([9, 33])}
    drawn = [dice.choice([0, 1]) for _ in range(found["num_hidden_layers"])]
    return found | dice.choice([{"no_rope_layers": drawn}, {"no_rope_layer_interval": dice.choice([1, 2, 4])}])


def seed_oss(dice: Dice) -> Drawn:
    return biased(dice) | {"attention_out_bias": dice.random() < 0.4}


def olmo2(dice: Dice) -> Drawn:
    return llama(dice) | {"attention_bias": dice.random() < 0.4}


def olmo3(dice: Dice) -> Drawn:
    return layer_types(dice, olmo2(dice)) | {"rope_theta": 5e5, "sliding_window": dice.choice([5, 24, 70])}


def olmoe(dice: Dice) -> Drawn:
    names = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
    return olmo2(dice) | {name: drawn for name, drawn in mixture(dice).items() if name in names}


def cohere(dice: Dice) -> Drawn:
    found = llama(dice) | {"attention_bias": dice.random() < 0.4, "layer_norm_eps": dice.choice([1e-5, 1e-3])}
    return found | {"logit_scale": dice.choice([0.0625, 1.0, 2.0])}


def cohere2(dice: Dice) -> Drawn:
    return layer_types(dice, cohere(dice)) | {"sliding_window": dice.choice([5, 24, 70])}


def arcee(dice: Dice) -> Drawn:
    return biased(dice) | {"head_dim": None, "hidden_act": dice.choice(["relu2", "relu", "gelu"])}


def starcoder2(dice: Dice) -> Drawn:
    found = llama(dice) | {"use_bias": dice.random() < 0.6, "sliding_window": dice.choice([None, 7, 40])}
    return found | {"norm_epsilon": dice.choice([1e-5, 1e-3]), "hidden_act": dice.choice(["relu2", "relu", *GELUS])}


def ernie(dice: Dice) -> Drawn:
    return own_heads(dice) | {"use_bias": dice.random() < 0.5}


def ernie_moe(dice: Dice) -> Drawn:
    found = ernie(dice) | {"use_bias": False, "moe_intermediate_size": dice.choice([12, 20])}
    found |= {"moe_num_experts": dice.choice([3, 7]), "moe_k": dice.choice([1, 2, 3])}
    found |= {"moe_num_shared_experts": dice.choice([0, 1, 2]), "moe_layer_start_index": dice.choice([0, 1])}
    return found | {"moe_layer_end_index": dice.choice([-1, 0]), "moe_layer_interval": dice.choice([1, 2])}


def glm_moe(dice: Dice) -> Drawn:
    found = glm(dice) | {"moe_intermediate_size": dice.choice([12, 20]), "n_routed_experts": dice.choice([3, 7])}
    found |= {"num_experts_per_tok": dice.choice([1, 2, 3]), "n_shared_experts": dice.choice([1, 2])}
    found |= {"first_k_dense_replace": dice.choice([0, 1]), "norm_topk_prob": dice.random() < 0.6}
    return found | {"routed_scaling_factor": dice.choice([1.0, 2.5]), "use_qk_norm": dice.random() < 0.5}


def exaone4(dice: Dice) -> Drawn:
    found = own_heads(dice) | {"sliding_window": dice.choice([5, 24, 70])}
    full = {"sliding_window": None, "layer_types": ["full_attention"] * found["num_hidden_layers"]}
    return layer_types(dice, found) if dice.random() < 0.7 else found | full


def glm(dice: Dice) -> Drawn:
    found = llama(dice) | {"head_dim": dice.choice([8, 16, 20]), "attention_bias": dice.random() < 0.6}
    return found | {"rope_scaling": None, "partial_rotary_factor": dice.choice([0.5, 1.0])}


def gemma(dice: Dice) -> Drawn:
    found = own_heads(dice) | {"head_dim": dice.choice([8, 12, 16, 20]), "attention_bias": dice.random() < 0.3}
    del found["hidden_act"]
    return {name: value for name, value in found.items() if not name.startswith("rope_")}


def later_gemma(dice: Dice) -> Drawn:
    """The second; the third has no caps on its scores."""
    return layer_types(dice, gemma(dice)) | {
        "hidden_activation": dice.choice(GELUS),
        "query_pre_attn_scalar": dice.choice([8, 16, 100]),
        "sliding_window": dice.choice([5, 24, 70]),
        "attn_logit_softcapping": dice.choice([1.5, 50.0, None]),
        "final_logit_softcapping": dice.choice([None, 2.0, 30.0]),
    }


def opt(dice: Dice) -> Drawn:
    size = dice.choice([24, 48])
    return tiny.OPT | {
        "hidden_size": size,
        "word_embed_proj_dim": dice.choice([size, 16]),
        "num_attention_heads": dice.choice([1, 3, 6]),
        "tie_word_embeddings": dice.random() < 0.6,
        "do_layer_norm_before": dice.random() < 0.6,
        "activation_function": dice.choice(["relu", *GELUS]),
        "enable_bias": dice.random() < 0.7,
        "layer_norm_elementwise_affine": dice.random() < 0.8,
        "_remove_final_layer_norm": dice.random() < 0.2,
    }


def gpt2(dice: Dice) -> Drawn:
    return tiny.GPT2 | {
        "n_embd": 4 * dice.choice([8, 12, 20]),
        "n_layer": dice.choice([1, 2, 3]),
        "n_inner": dice.choice([None, 40]),
        "activation_function": dice.choice(["relu", *GELUS]),
        "scale_attn_weights": dice.random() < 0.8,
        "scale_attn_by_inverse_layer_idx": dice.random() < 0.3,
        "layer_norm_epsilon": dice.choice([1e-5, 1e-3]),
        "tie_word_embeddings": dice.random() < 0.6,
    }


DRAWS: dict[str, Callable[[Dice], Drawn]] = {
    "llama": biased,
    "mistral": windowed,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "qwen3-moe": qwen3_moe,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "ministral3": ministral3,
    "granitehybrid": granitehybrid,
    "helium": helium,
    "granitemoe": granitemoe,
    "smollm3": smollm3,
    "seed-oss": seed_oss,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "cohere": cohere,
    "cohere2": cohere2,
    "ernie4.5": ernie,
    "arcee": arcee,
    "starcoder2": starcoder2,
    "exaone4": exaone4,
    "glm": glm,
    "glm4": glm,
    "glm4-moe": glm_moe,
    "ernie4.5-moe": ernie_moe,
    "gemma": gemma,
    "gemma2": later_gemma,
    "gemma3": later_gemma,
    "opt": opt,
    "gpt2": gpt2,
}


def test_every_family_is_drawn() -> None:
    assert {tiny.CASES[name][1] for name in DRAWS} == {model for _, model, _ in tiny.CASES.values()}


@pytest.mark.parametrize("kernels", [TORCH, "native"], indirect=True)
@pytest.mark.parametrize("name", DRAWS)
def test_logits(name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_class, model_class, _ = tiny.CASES[name]
    for seed in range(ROUNDS):
        dice = Dice(f"{name} {seed}")
        drawn, prompt = DRAWS[name](dice), [dice.randrange(3, 97) for _ in range(dice.choice([1, 30, 110]))]
        monkeypatch.setitem(tiny.CASES, f"{name} {seed}", (config_class, model_class, drawn))
        theirs = tiny.build_theirs(f"{name} {seed}")
        ours = tiny.build_ours(tiny.save(theirs, tmp_path / str(seed)), "float32", kernels, max_model_len=256)
        found = tiny.Paged(ours, dice.choice([8, 16])).prefill(0, prompt, dice.choice([7, 10_000]))
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
        # What rounding becomes on its way through some layers of large weights.
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert error < 0.01, (seed, drawn, len(prompt), float(error))


def test_what_is_not_supported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = tiny.LLAMA | {"hidden_act": "relu"}
    monkeypatch.setitem(tiny.CASES, "refused", ("LlamaConfig", "LlamaForCausalLM", refused))
    directory = tiny.save(tiny.build_theirs("refused"), tmp_path)
    with pytest.raises(ModelLoadError, match="activation function 'relu' is not supported"):
        tiny.build_ours(directory)
