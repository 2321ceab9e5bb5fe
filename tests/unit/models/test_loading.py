"""Building models and filling them: names, shapes, ties, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from unpacking import unpacked

from quire.attention.registry import select_backend
from quire.config.families import BY_ARCHITECTURE, FAMILIES
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.models import settings
from quire.models.registry import CausalLM, build_model
from quire.protocol.cache import LayerCache
from quire.quantization.base import QuantizationMethod
from quire.quantization.packed import Packed, Packing
from quire.quantization.registry import uniform
from quire.worker.weights.load import load_model_weights

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "torch_dtype": "float32",
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 13,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 13,
    "hidden_size": 8,
    "word_embed_proj_dim": 4,
    "do_layer_norm_before": False,
    "ffn_dim": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def zeros(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def make(tmp_path: Path):
    """Build a model from the contents of a config.json."""

    def build(config: dict[str, Any], method: QuantizationMethod | None = None, **options: Any) -> CausalLM:
        (tmp_path / "config.json").write_text(json.dumps(config))
        model_config = ModelConfig.from_pretrained(str(tmp_path), load_format="dummy", **options)
        build.config = model_config  # type: ignore[attr-defined]
        return build_model(model_config, select_backend("reference"), method and uniform(method))

    return build


def tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """A whole checkpoint for LLAMA's shape."""
    shapes = {"model.embed_tokens.weight": (13, 8), "model.norm.weight": (8,), "lm_head.weight": (13, 8)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (8,)
        for name, rows in (("q", 8), ("k", 4), ("v", 4), ("o", 8)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, 8)
        for name, shape in (("gate", (12, 8)), ("up", (12, 8)), ("down", (8, 12))):
            shapes[f"{layer}mlp.{name}_proj.weight"] = shape
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_a_whole_checkpoint_fills_every_parameter_in_place(make) -> None:
    model = make(LLAMA)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    weights = tensors(LLAMA)
    assert model.missing_weights == set(weights)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    model.load_weights((weights | extra).items())
    assert model.missing_weights == set()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    parameters = dict(model.named_parameters())
    layer = "model.layers.1."
    merged = torch.cat([weights[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(parameters[f"{layer}self_attn.qkv_proj.weight"], merged)
    merged = torch.cat([weights[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(parameters[f"{layer}mlp.gate_up_proj.weight"], merged)
    assert torch.equal(parameters["lm_head.weight"], weights["lm_head.weight"])


def test_shard_by_shard_without_prefix_and_cast(make) -> None:
    model = make(LLAMA, dtype="bfloat16")
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors(LLAMA).items()}
    shards = [dict(list(weights.items())[i::3]) for i in range(3)]
    for place, shard in enumerate(shards):
        model.load_weights(shard.items())
        assert len(model.missing_weights) == sum(map(len, shards[place + 1 :]))
    assert model.dtype == torch.bfloat16
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert torch.equal(model.state_dict()["model.norm.weight"], weights["norm.weight"].bfloat16())


def test_missing_tensors_are_named_as_the_checkpoint_names_them(make) -> None:
    model, weights = make(LLAMA), tensors(LLAMA)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        del weights[name]
    model.load_weights(weights.items())
    assert model.missing_weights == {"model.layers.1.self_attn.k_proj.weight", "model.norm.weight"}


def test_matrices_that_are_there_already_need_no_loading(make) -> None:
    """With weights that an earlier start packed, only the vectors are missing."""
    weights = tensors(LLAMA)
    vectors = {name: tensor for name, tensor in weights.items() if tensor.dim() == 1}
    model = make(LLAMA, method=Packed(None, Packing(torch.float32, zeros, filled=True)))
    assert model.filled_weights == weights.keys() - vectors.keys()
    assert model.missing_weights == set(vectors)
    model.load_weights(vectors.items())
    assert not model.missing_weights
    fresh = make(LLAMA, method=Packed(None, Packing(torch.float32, zeros)))
    assert fresh.filled_weights == set()
    assert fresh.missing_weights == set(weights)


def test_misfits_are_refused(make) -> None:
    model = make(LLAMA)
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight', for which .* no place"):
        model.load_weights([("model.layers.2.mlp.up_proj.weight", torch.ones(12, 8))])
    with pytest.raises(ModelLoadError, match=r"'self_attn\.q_proj\.bias'|q_proj\.bias"):
        model.load_weights([("model.layers.0.self_attn.q_proj.bias", torch.ones(8))])
    with pytest.raises(ModelLoadError, match=r"k_proj\.weight' has the shape \(8, 8\) .* implies \(4, 8\)"):
        model.load_weights([("model.layers.0.self_attn.k_proj.weight", torch.ones(8, 8))])
    # The merged layer itself is no tensor of a checkpoint.
    with pytest.raises(ModelLoadError, match="qkv_proj"):
        model.load_weights([("model.layers.0.self_attn.qkv_proj.weight", torch.ones(16, 8))])


def test_tied_head_has_no_parameters_and_ignores_a_stored_copy(make) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    model = make(config)
    weights = tensors(config)
    stray = weights.pop("lm_head.weight")
    assert model.missing_weights == set(weights)
    model.load_weights({**weights, "lm_head.weight": stray}.items())
    assert not [name for name, _ in model.named_parameters() if "lm_head" in name]
    hidden = torch.eye(8)
    assert torch.equal(model.compute_logits(hidden), weights["model.embed_tokens.weight"].t())


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_matrices_are_transposed_and_masks_ignored(make, prefix: str) -> None:
    model = make(GPT2)
    shapes = {"wte.weight": (13, 8), "wpe.weight": (32, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    for name, shape in (
        ("attn.c_attn", (8, 24)),
        ("attn.c_proj", (8, 8)),
        ("mlp.c_fc", (8, 32)),
        ("mlp.c_proj", (32, 8)),
    ):
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    for name in ("ln_1", "ln_2"):
        shapes |= {f"h.0.{name}.weight": (8,), f"h.0.{name}.bias": (8,)}
    weights = {prefix + name: torch.randn(shape) for name, shape in shapes.items()}
    masks = {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 32, 32), f"{prefix}h.0.attn.masked_bias": torch.ones(())}
    assert {"transformer." + name for name in shapes} == model.missing_weights
    model.load_weights((weights | masks).items())
    assert not model.missing_weights
    found = model.state_dict()["model.layers.0.mlp.fc1.weight"]
    assert torch.equal(found, weights[f"{prefix}h.0.mlp.c_fc.weight"].t())
    with pytest.raises(ModelLoadError, match=r"shape \(24, 8\) .* implies \(8, 24\)"):
        model.load_weights([("h.0.attn.c_attn.weight", torch.ones(24, 8))])


def test_opt_names(make) -> None:
    model = make(OPT)
    layer = "model.decoder.layers.0."
    names = {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"}
    names |= {"model.decoder.project_in.weight", "model.decoder.project_out.weight"}
    modules = [f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")]
    modules += ["self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"]
    names |= {f"{layer}{module}.{tensor}" for module in modules for tensor in ("weight", "bias")}
    assert model.missing_weights == names
    assert "model.decoder.final_layer_norm.weight" in make(OPT | {"do_layer_norm_before": True}).missing_weights


def test_unknown_architecture_lists_the_supported_ones(make) -> None:
    with pytest.raises(ModelLoadError, match="'BertModel'.*not supported; supported are ArceeForCausalLM, Cohere2For"):
        make(LLAMA | {"architectures": ["BertModel"]})
    assert len(BY_ARCHITECTURE) == len(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("llama", {"rms_norm_eps": "small"}),
        ("llama", {"partial_rotary_factor": 2.0}),
        ("llama", {"partial_rotary_factor": "half"}),
        ("llama", {"head_dim": 5, "rotated": 0}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}, "rope parameters": 0}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast": 0}),
        ("gpt2", {"layer_norm_epsilon": [1]}),
        ("opt", {"word_embed_proj_dim": "wide"}),
        ("mixtral", {"num_local_experts": "many"}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("qwen2_moe", {"decoder_sparse_step": 0}),
        ("qwen2_moe", {"shared_expert_intermediate_size": -1}),
        ("qwen3_moe", {"mlp_only_layers": 1}),
        ("qwen3_moe", {"moe_intermediate_size": 0}),
        ("olmo2", {"rms_norm_eps": "small"}),
        ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": "many"}, "factor": 0}),
        ("granitemoe", {"residual_multiplier": 0}),
        ("granitemoe", {"num_experts_per_tok": 9}),
        ("granitemoehybrid", {"num_local_experts": 4, "layer_types": ["attention"]}),
        ("granitemoehybrid", {"num_local_experts": 0, "layer_types": None}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("olmoe", {"num_experts_per_tok": 65}),
        ("glm", {"partial_rotary_factor": 2.0}),
        ("glm4", {"head_dim": 6, "partial_rotary_factor": 0.5}),
        ("cohere", {"use_qk_norm": True}),
        ("cohere", {"logit_scale": 0}),
        ("cohere2", {"layer_norm_eps": "small"}),
        ("gemma2", {"query_pre_attn_scalar": -1}),
        ("gemma2", {"attn_logit_softcapping": 0}),
        ("gemma2", {"final_logit_softcapping": "none"}),
    ],
)
def test_what_cannot_be_is_told_by_its_key(make, model_type: str, change: dict[str, Any]) -> None:
    config = LLAMA | {"head_dim": 4, "model_type": model_type, "architectures": None} | change
    with pytest.raises(ModelLoadError) as caught:
        make(config)
    assert any(key in str(caught.value) for key in change)


def test_facts_that_size_the_cache(make) -> None:
    model = make(LLAMA)
    assert (model.cache_layers, model.vocab_size) == ([LayerCache(1, 4)] * 2, 13)
    assert model.dtype == torch.float32
    assert not model.training


def test_dummy_weights_are_the_same_in_every_format(make, level: str) -> None:
    """They are made as a checkpoint's tensors are, by those names: merged layers and packed ones get the same."""
    models = [
        make(GPT2),
        make(
            GPT2,
            method=Packed(None, Packing(torch.float32, lambda shape, dtype, name: torch.zeros(shape, dtype=dtype))),
        ),
    ]
    for model in models:
        load_model_weights(model, make.config, load_format="dummy", progress=False)
        assert not model.missing_weights
    for path, plain in models[0].named_modules():
        packed = models[1].get_submodule(path)
        if isinstance(plain, Linear | Embedding):
            kept = packed.method.matrix(packed.weights, packed.shape)
            assert torch.equal(unpacked(kept), plain.weights["weight"]), path
        if isinstance(plain, Linear):
            assert torch.equal(packed.weights["bias"], plain.weights["bias"])
            assert plain.weights["weight"].std() > 0.01


def test_layers_know_their_names_and_packed_weights_are_kept_by_them(make) -> None:
    asked: list[str] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        asked.append(name)
        return torch.zeros(shape, dtype=dtype)

    for config in (LLAMA, GPT2, OPT):
        asked.clear()
        model = make(config, method=Packed("int8", Packing(torch.float32, allocate)))
        layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear | Embedding)]
        assert all(module.name == path for path, module in layers)
        assert sorted(asked) == sorted(f"{path}.{tensor}" for path, _ in layers for tensor in ("packed", "scales"))


def test_attention_layers_say_what_they_keep_and_know_their_group(make) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
    model = make(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | windows)
    assert model.cache_layers == [LayerCache(1, 4), LayerCache(1, 4, 8), LayerCache(1, 4, 8)]
    specs = [layer.self_attn.spec for layer in model.model.layers]
    assert [(spec.layer, spec.group, spec.window) for spec in specs] == [(0, 0, None), (1, 1, 8), (2, 1, 8)]


def test_tensors_of_a_strange_type_are_refused(make) -> None:
    with pytest.raises(ModelLoadError, match=r"norm\.weight' is of type int32 .* one of float32, float16"):
        make(LLAMA).load_weights([("model.norm.weight", torch.ones(8, dtype=torch.int32))])


def test_without_a_model_type_defaults_are_the_architectures() -> None:
    """config.json need not name one; what it leaves unsaid is then as transformers' class of that name has it."""
    config: Any = SimpleNamespace(hf_config={"architectures": ["GraniteMoeForCausalLM"]}, model="a")
    assert settings.count(config, "num_experts_per_tok", 8) == 2
