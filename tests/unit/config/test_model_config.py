"""ModelConfig reads what every family and both generations of transformers write, and names what it can't read."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config.config_json import describe_unsupported_files
from quire.config.engine_args import EngineArgs
from quire.config.model import ModelConfig
from quire.errors import ConfigError, ModelLoadError, NotYetSupportedError, QuireError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(directory: Path, config: Any, generation: Any = None) -> Path:
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def load(directory: Path, config: Any, generation: Any = None, **kwargs: Any) -> ModelConfig:
    return ModelConfig.from_pretrained(write(directory, config, generation), **kwargs)


def test_llama_facts(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA | {"num_key_value_heads": 4}, seed=7)
    assert (config.model, config.path) == (str(tmp_path), tmp_path)
    assert (config.architecture, config.model_type, config.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (512, 64, 172, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 8)
    assert (config.derived_max_model_len, config.max_model_len, set(config.layer_windows)) == (256, 256, {None})
    assert (config.eos_token_ids, config.tie_word_embeddings, config.seed) == ((2,), False, 7)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.generation_defaults == {}


def test_key_value_heads_default_to_all_heads(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA).num_kv_heads == 8
    assert load(tmp_path, LLAMA | {"num_key_value_heads": None}).num_kv_heads == 8


def test_gpt2_names(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 99}
    config = load(tmp_path, gpt2)
    assert config.architecture == "GPT2LMHeadModel"  # from model_type: the file names none
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (48, 4, 4, 12)
    assert (config.num_layers, config.derived_max_model_len, config.intermediate_size) == (2, 128, 192)
    assert config.tie_word_embeddings
    assert config.dtype == "float32"
    assert load(tmp_path, gpt2 | {"n_inner": 100, "tie_word_embeddings": False}).intermediate_size == 100
    assert not load(tmp_path, gpt2 | {"tie_word_embeddings": False}).tie_word_embeddings


def test_opt_names(tmp_path: Path) -> None:
    opt = LLAMA | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 96}
    del opt["intermediate_size"]
    config = load(tmp_path, opt | {"word_embed_proj_dim": 32})
    assert (config.intermediate_size, config.hidden_size, config.tie_word_embeddings) == (96, 64, True)
    assert config.hf_config["word_embed_proj_dim"] == 32


def test_explicit_head_dim_and_qwen3_default(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA | {"head_dim": 32}).head_dim == 32
    assert load(tmp_path, LLAMA | {"hidden_size": 65, "head_dim": 32}).head_dim == 32
    assert load(tmp_path, LLAMA | {"model_type": "qwen3"}).head_dim == 128


def test_modern_rope_parameters_and_dtype(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    read = load(tmp_path, config | {"dtype": "float16", "rope_parameters": rope}, device="cuda")
    assert read.rope_parameters == rope
    assert read.dtype == "float16"
    assert read.derived_max_model_len == 256  # llama3's max_position_embeddings is the scaled length


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        ({"type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "linear", "factor": 2.5}, 640),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_legacy_rope_scaling_and_derived_length(tmp_path: Path, scaling: Any, length: int) -> None:
    config = load(tmp_path, LLAMA | {"rope_scaling": scaling, "rope_theta": 500.0})
    assert config.derived_max_model_len == config.max_model_len == length
    assert config.rope_parameters["rope_theta"] == 500.0
    assert config.rope_parameters["rope_type"] == (scaling or {}).get(
        "type", (scaling or {}).get("rope_type", "default")
    )
    assert "type" not in config.rope_parameters


def test_sliding_window_of_mistral(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert load(tmp_path, mistral | {"sliding_window": 32}).layer_windows == (32, 32, 32)
    assert load(tmp_path, mistral | {"sliding_window": None}).layer_windows == (None, None, None)
    assert set(load(tmp_path, mistral).layer_windows) == {4096}  # what transformers assumes


def test_sliding_window_of_qwen_is_off_unless_used(tmp_path: Path) -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 1}
    assert set(load(tmp_path, qwen).layer_windows) == {None}
    assert load(tmp_path, qwen | {"use_sliding_window": False}).layer_windows == (None, None, None)
    used = load(tmp_path, qwen | {"use_sliding_window": True})
    assert used.layer_windows == (None, 32, 32)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert load(tmp_path, qwen | {"use_sliding_window": True, "layer_types": kinds}).layer_windows == (32, None, 32)
    with pytest.raises(ModelLoadError, match="2 layer_types for 3 layers"):
        load(tmp_path, qwen | {"use_sliding_window": True, "layer_types": kinds[:2]})


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [("auto", "bfloat16"), ("half", "float16"), ("float", "float32"), ("float16", "float16"), ("float32", "float32")],
)
def test_dtype(tmp_path: Path, asked: str, resolved: str) -> None:
    assert load(tmp_path, LLAMA, dtype=asked).dtype == resolved


def test_dtype_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auto, float32, float, float16, half, bfloat16; got 'fp8'"):
        load(tmp_path, LLAMA, dtype="fp8")
    with pytest.raises(ConfigError, match="'float64' is not supported"):
        load(tmp_path, LLAMA | {"torch_dtype": "float64"})
    assert load(tmp_path, LLAMA | {"torch_dtype": "float64"}, dtype="half").dtype == "float16"
    assert load(tmp_path, LLAMA | {"torch_dtype": "torch.float16"}, device="cuda").dtype == "float16"
    assert load(tmp_path, LLAMA | {"torch_dtype": None}).dtype == "float32"


@pytest.mark.parametrize(
    ("device", "has_driver", "asked", "resolved"),
    [
        ("auto", False, "auto", "bfloat16"),
        ("cpu", True, "auto", "bfloat16"),
        ("auto", True, "auto", "float16"),
        ("cuda", False, "auto", "float16"),
        ("cpu", False, "float16", "float16"),
    ],
)
def test_float16_stays_where_it_has_kernels_or_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, has_driver: bool, asked: str, resolved: str
) -> None:
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: has_driver if path == "/dev/nvidiactl" else exists(path))
    write(tmp_path, LLAMA | {"torch_dtype": "float16"})
    assert ModelConfig.from_pretrained(tmp_path, dtype=asked, device=device).dtype == resolved
    assert EngineArgs(str(tmp_path), dtype=asked, device=device).resolve().model.dtype == resolved  # pyright: ignore[reportArgumentType]


def test_max_model_len(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA, max_model_len=100)
    assert (config.max_model_len, config.derived_max_model_len) == (100, 256)
    with pytest.raises(ConfigError, match=r"max_model_len = 257 .* 256 tokens"):
        load(tmp_path, LLAMA, max_model_len=257)
    for bad in (0, -2, True, 1.5, "4k"):
        with pytest.raises(ConfigError, match="max_model_len must be"):
            EngineArgs(max_model_len=bad)


def test_length_missing_from_the_file(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert load(tmp_path, config).max_model_len == 2048
    assert load(tmp_path, config, max_model_len=5000).max_model_len == 5000


def test_end_of_sequence_ids_are_merged(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA, {"eos_token_id": [2, 1]}).eos_token_ids == (2, 1)
    assert load(tmp_path, LLAMA | {"eos_token_id": [9, 8]}, {"eos_token_id": 7}).eos_token_ids == (9, 8, 7)
    assert load(tmp_path, LLAMA | {"eos_token_id": None, "bos_token_id": None}, {}).eos_token_ids == ()


def test_generation_defaults_are_sampling_values_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generation = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": "high",
        "max_new_tokens": 64,
        "do_sample": True,
        "_from_model_config": True,
    }
    with caplog.at_level(logging.WARNING):
        config = load(tmp_path, LLAMA, generation)
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 64}
    assert "repetition_penalty" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1.0), ("top_p", 7), ("top_k", 1.5), ("max_new_tokens", 0)]
)
def test_a_generation_default_that_no_request_may_have_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: float
) -> None:
    """Else every request that says nothing of it would be refused for it."""
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, LLAMA, {name: value, "min_p": 0.1}).generation_defaults == {"min_p": 0.1}
    assert f"{name} = {value} ignored: {name.replace('_new', '')} must be" in caplog.text


def test_overrides(tmp_path: Path) -> None:
    overrides = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "eos_token_id": 5}
    config = load(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "default"}}, hf_overrides=overrides)
    assert (config.derived_max_model_len, config.eos_token_ids) == (512, (5,))
    assert config.hf_config["eos_token_id"] == 5
    with pytest.raises(ConfigError, match="hf_overrides must be an object"):
        EngineArgs(hf_overrides=["eos_token_id"])


def test_an_overridden_scaling_keeps_the_base_of_the_frequencies(tmp_path: Path) -> None:
    """The very remedy that a too long max_model_len names, for what transformers 5 writes."""
    stated = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = load(tmp_path, LLAMA | {"rope_parameters": stated}, hf_overrides={"rope_scaling": scaling})
    assert config.rope_parameters == scaling | {"rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    own = scaling | {"rope_theta": 5.0}
    config = load(tmp_path, LLAMA | {"rope_parameters": stated}, hf_overrides={"rope_scaling": own})
    assert config.rope_parameters["rope_theta"] == 5.0
    # What belonged to the checkpoint's own scaling is not part of another.
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    config = load(tmp_path, LLAMA | {"rope_parameters": llama3}, hf_overrides={"rope_scaling": linear})
    assert config.rope_parameters == linear | {"rope_theta": 5e5}


def test_an_override_that_loses_the_base_is_refused(tmp_path: Path) -> None:
    config = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ConfigError, match=r"rope_theta = 1000000\.0, by one without: add 'rope_theta': 1000000\.0"):
        load(tmp_path, config, hf_overrides={"rope_parameters": scaling})
    kept = load(tmp_path, config, hf_overrides={"rope_parameters": scaling, "rope_theta": 5.0})
    assert kept.rope_parameters == scaling | {"rope_theta": 5.0}
    kept = load(tmp_path, LLAMA | {"rope_theta": 7.0}, hf_overrides={"rope_parameters": scaling})
    assert kept.rope_parameters == scaling | {"rope_theta": 7.0}


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", float, 1j, float("nan"), "\ud800"])
def test_an_override_that_is_no_json_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="hf_overrides must hold what JSON can"):
        load(tmp_path, LLAMA, hf_overrides={"rope_theta": 5.0, "x": [value]})


@pytest.mark.parametrize(
    ("name", "key", "length"), [("opt", "max_position_embeddings", 2048), ("gpt2", "n_positions", 1024)]
)
@pytest.mark.parametrize("named", [True, False])
def test_learned_positions_end_where_their_table_does(
    tmp_path: Path, name: str, key: str, length: int, named: bool
) -> None:
    architecture = {"opt": "OPTForCausalLM", "gpt2": "GPT2LMHeadModel"}[name]
    config = LLAMA | {"architectures": [architecture], "model_type": name if named else None}
    del config["max_position_embeddings"]
    assert load(tmp_path, config, max_model_len=100).derived_max_model_len == length
    assert load(tmp_path, config | {key: 64}).max_model_len == 64
    message = (
        f"max_model_len = 9000 is more than the {length} positions that the model has learned: lower it to {length}"
    )
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, config, max_model_len=9000)
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert load(tmp_path, config, hf_overrides=scaled).derived_max_model_len == length


def test_text_part_of_a_multi_modal_config(tmp_path: Path) -> None:
    whole = {
        "architectures": ["SomeVisionModel"],
        "model_type": "some_vision",
        "text_config": LLAMA,
        "dtype": "float16",
    }
    config = load(tmp_path, whole)
    assert (config.architecture, config.model_type, config.hidden_size) == ("SomeVisionModel", "llama", 64)
    assert "text_config" not in config.hf_config


@pytest.mark.parametrize("architecture", ["Mistral3ForConditionalGeneration", "VoxtralForConditionalGeneration"])
def test_the_text_of_models_that_see_and_hear_is_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str
) -> None:
    caplog.set_level("INFO")
    config = load(tmp_path, {"architectures": [architecture], "model_type": "mistral3", "text_config": LLAMA})
    assert (config.architecture, config.model_type) == ("LlamaForCausalLM", "llama")
    assert "it takes text alone" in caplog.text


@pytest.mark.parametrize("text", [{"model_type": "mllama_text_model"}, {"architectures": ["MllamaForCausalLM"]}])
def test_of_a_text_of_no_family_the_whole_is_named(tmp_path: Path, text: dict[str, Any]) -> None:
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mllama"}
    config = load(tmp_path, whole | {"text_config": LLAMA | {"model_type": None} | text})
    assert config.architecture == "Mistral3ForConditionalGeneration"


def test_a_text_among_what_all_have(tmp_path: Path) -> None:
    """As Qwen2.5-VL was first published; its rotation has three axes, along which text goes alike."""
    whole = LLAMA | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    config = load(tmp_path, whole | {"vision_config": {"hidden_size": 3}, "rope_scaling": rope})
    assert (config.architecture, config.hidden_size) == ("Qwen2ForCausalLM", 64)
    assert config.rope_parameters["rope_type"] == "mrope"
    assert config.derived_max_model_len == LLAMA["max_position_embeddings"]


def test_experts_of_a_model_that_sees(tmp_path: Path) -> None:
    """As Qwen3-VL-30B-A3B is published, but for its sizes."""
    text = LLAMA | {"architectures": None, "model_type": "qwen3_vl_moe_text", "num_experts": 8, "rope_theta": 5e6}
    text |= {"num_key_value_heads": 4}
    text |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"}}
    text |= {"tie_word_embeddings": True}  # as transformers writes it, by default, and does not look at
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
    config = load(tmp_path, whole | {"text_config": text, "tie_word_embeddings": False, "vision_config": {"depth": 27}})
    assert (config.architecture, config.model_type) == ("Qwen3VLMoeForCausalLM", "qwen3_vl_moe_text")
    assert (config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]) == ("default", 5e6)
    assert not config.tie_word_embeddings


def test_heads_are_tied_as_the_whole_says(tmp_path: Path) -> None:
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "tie_word_embeddings": True}
    config = load(
        tmp_path, whole | {"text_config": LLAMA | {"model_type": "gemma3_text", "tie_word_embeddings": False}}
    )
    assert config.tie_word_embeddings


def test_code_of_the_checkpoint_is_never_looked_at(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    assert load(tmp_path, LLAMA | {"auto_map": auto_map, "trust_remote_code": True}).architecture == "LlamaForCausalLM"
    assert "modeling_evil" not in sys.modules


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": None}, "no 'hidden_size' or 'n_embd'"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_hidden_layers": 2**31 - 1}, "a whole number from 1 to 10000"),
        ({"vocab_size": -5}, "vocab_size = -5"),
        ({"num_key_value_heads": 3}, "8 attention heads, which 3"),
        ({"num_attention_heads": 7}, "hidden_size = 64, which 7"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings = 'long'"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor = -1"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor = 'two'"),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"rope_theta": 10**400}, "rope_theta = 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor = 1e+308"),
        ({"rope_scaling": {"type": 3, "factor": 1.0}}, "rope_type = 3"),
        ({"vocab_size": 10**400}, "vocab_size = 1000"),
        ({"architectures": [], "model_type": "llama"}, "which architecture"),
        ({"architectures": None, "model_type": "new"}, "which architecture"),
        ({"architectures": [3]}, "which architecture"),
    ],
)
def test_contradictory_config(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, LLAMA | change)
    assert complaint in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_infinity_is_no_factor(tmp_path: Path) -> None:
    text = json.dumps(LLAMA | {"rope_scaling": {"type": "linear", "factor": float("inf")}})
    with pytest.raises(ModelLoadError, match="factor = inf"):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "[" * 100_000, "1" * 10_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_names_the_file(tmp_path: Path, file: str, text: str) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelLoadError, match=file.replace(".", r"\.")):
        ModelConfig.from_pretrained(tmp_path)


def test_missing_config_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json.*Hugging Face layout"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "model.Q4_K_M.gguf").touch()
    with pytest.raises(ModelLoadError, match="GGUF"):
        ModelConfig.from_pretrained(tmp_path)


def test_rope_by_layer_type_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(NotYetSupportedError, match="per layer type"):
        load(tmp_path, LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}})


GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 32}


def test_layers_with_a_window_may_rotate_otherwise(tmp_path: Path) -> None:
    older = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    for change in (older, {"rope_parameters": newer}):
        config = load(tmp_path, GEMMA3 | change)
        assert config.rope_parameters == newer["full_attention"]
        assert config.window_rope_parameters == newer["sliding_attention"]
        assert config.derived_max_model_len == LLAMA["max_position_embeddings"], "it is the stretched length already"
    bare = load(tmp_path, GEMMA3)
    assert (bare.rope_parameters["rope_theta"], bare.window_rope_parameters) == (
        1e6,
        {"rope_type": "default", "rope_theta": 1e4},
    )
    assert load(tmp_path, LLAMA).window_rope_parameters is None
    for broken, words in (({"full_attention": {}, "chunked_attention": {}}, "chunked"), ({"full_attention": 3}, "=")):
        with pytest.raises((ModelLoadError, NotYetSupportedError), match=words):
            load(tmp_path, GEMMA3 | {"rope_parameters": newer | broken})


def test_layers_with_a_window_may_rotate_unscaled(tmp_path: Path) -> None:
    olmo3 = LLAMA | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4}
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    for theta in (5e5, 3e4):
        plain, scaled = {"rope_type": "default", "rope_theta": theta}, scaling | {"rope_theta": theta}
        both = {"sliding_attention": plain, "full_attention": scaled}
        for change in ({"rope_theta": theta, "rope_scaling": scaling}, {"rope_parameters": both}):
            config = load(tmp_path, olmo3 | change)
            assert (config.rope_parameters, config.window_rope_parameters) == (scaled, plain)
            assert config.derived_max_model_len == 512
    config = load(tmp_path, {key: value for key, value in olmo3.items() if key != "rope_theta"})
    assert config.rope_parameters == config.window_rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert config.layer_windows == (4096, 4096, 4096, None)


def test_cohere_names_its_length_otherwise(tmp_path: Path) -> None:
    cohere = LLAMA | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}
    assert load(tmp_path, cohere | {"model_max_length": 131_072}).derived_max_model_len == 131_072
    with pytest.raises(ModelLoadError, match="model_max_length = '128k'"):
        load(tmp_path, cohere | {"model_max_length": "128k"})


def test_windows_of_gemma(tmp_path: Path) -> None:
    assert load(tmp_path, GEMMA3 | {"sliding_window_pattern": 2}).layer_windows == (32, None, 32)
    gemma2 = GEMMA3 | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    assert load(tmp_path, gemma2).layer_windows == (32, None, 32)


@pytest.mark.parametrize("value", [0, -1, "six", 1.5])
@pytest.mark.parametrize("key", ["sliding_window", "sliding_window_pattern"])
def test_windows_that_cannot_be_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{key} = "):
        load(tmp_path, GEMMA3 | {key: value})


def test_layers_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotYetSupportedError, match="'chunked_attention'"):
        load(tmp_path, LLAMA | {"layer_types": ["full_attention", "chunked_attention", "full_attention"]})
    with pytest.raises(ModelLoadError, match="layer_types = 'sliding_attention'"):
        load(tmp_path, GEMMA3 | {"layer_types": "sliding_attention"})


def test_unknown_load_format() -> None:
    with pytest.raises(ConfigError, match="'bitsandbytes', 'dummy', got 'pt'"):
        EngineArgs(load_format="pt")


@pytest.mark.parametrize(
    "name", ["safetensors", "fastsafetensors", "runai_streamer", "mistral", "gguf", "bitsandbytes"]
)
def test_a_load_format_of_vllms_reads_what_there_is(name: Any) -> None:
    """The checkpoint tells its form itself."""
    assert EngineArgs(model="demo", load_format=name).resolve().model == EngineArgs(model="demo").resolve().model


def test_unreadable_shapes_of_an_unknown_architecture_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'MambaForCausalLM' is not one"):
        load(tmp_path, {"architectures": ["MambaForCausalLM"], "hidden_size": 64, "vocab_size": 8})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
config_keys = st.sampled_from(
    [*LLAMA, "head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window"]
    + ["use_sliding_window", "layer_types", "text_config", "dtype", "quantization_config", "tie_word_embeddings"]
)
rope_kinds = st.sampled_from(["linear", "yarn", "default", 3])
rope_values = st.fixed_dictionaries({"rope_type": rope_kinds, "factor": json_values})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.dictionaries(config_keys, json_values | rope_values, max_size=4))
def test_any_config_is_read_or_refused_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    try:
        config = load(tmp_path, LLAMA | change)
    except QuireError:
        return
    assert config.max_model_len >= 1
    assert config.num_heads % config.num_kv_heads == 0
    assert len(config.layer_windows) == config.num_layers


EXPECTED = {
    "llama-3-8b": ("LlamaForCausalLM", 4096, 32, 8, 128, 8192, False),
    "qwen2-0_5b": ("Qwen2ForCausalLM", 1024, 16, 16, 64, 32768, True),
    "qwen2-7b": ("Qwen2ForCausalLM", 3584, 28, 4, 128, 32768, False),
    "qwen3-0.6b": ("Qwen3ForCausalLM", 1024, 16, 8, 128, 32768, True),
    "qwen3-4b": ("Qwen3ForCausalLM", 2560, 32, 8, 128, 40960, True),
    "qwen3-8b": ("Qwen3ForCausalLM", 4096, 32, 8, 128, 40960, False),
    "qwen3-30b": ("Qwen3MoeForCausalLM", 2048, 32, 4, 128, 40960, False),
}


def test_real_configs(shared_data: Path) -> None:
    seen = {}
    for directory in sorted((shared_data / "configs").iterdir()):
        if directory.name == "deepseek-r1":
            quantization = ModelConfig.from_pretrained(directory).hf_config["quantization_config"]
            assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
            continue
        c = ModelConfig.from_pretrained(directory)
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        seen[directory.name] = (c.architecture, c.hidden_size, *heads, c.derived_max_model_len, c.tie_word_embeddings)
        assert set(c.layer_windows) == {None}
    assert seen == EXPECTED


def test_stories260k(shared_data: Path) -> None:
    config = ModelConfig.from_pretrained(shared_data / "models" / "stories260K")
    assert (config.num_layers, config.head_dim, config.dtype) == (5, 8, "float32")
    assert config.eos_token_ids == (2, 1)
    assert config.tie_word_embeddings


def test_import_is_light() -> None:
    code = (
        "import sys, quire.config.model\n"
        "heavy = {'torch', 'numpy', 'huggingface_hub', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "OPT", "GPT2"])
def test_defaults_agree_with_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = getattr(transformers, f"{family}Config")()
    reference.save_pretrained(tmp_path)
    config = ModelConfig.from_pretrained(tmp_path)
    for ours, theirs in {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "derived_max_model_len": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(config, ours) == getattr(reference, theirs), ours
    assert config.num_kv_heads == getattr(reference, "num_key_value_heads", reference.num_attention_heads)
    assert max(config.layer_windows, key=lambda window: window or 0) == getattr(reference, "sliding_window", None)
    if hasattr(reference, "rope_parameters"):
        assert config.rope_parameters == reference.rope_parameters
    # The same file without what a default explains still means the same.
    text = json.loads((tmp_path / "config.json").read_text())
    for key in ("tie_word_embeddings", "sliding_window", "use_sliding_window", "layer_types", "head_dim"):
        text.pop(key, None)
    bare = load(tmp_path, text)
    assert (bare.layer_windows, bare.head_dim) == (config.layer_windows, config.head_dim)
    assert bare.tie_word_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("model.Q4_K_M.gguf", "GGUF"),
        ("pytorch_model.bin", "pickle"),
        ("consolidated.00.pth", "pickle"),
        ("consolidated.safetensors", "consolidated"),
        ("adapter_model.safetensors", "adapter"),
    ],
)
def test_unsupported_files_are_described(tmp_path: Path, file: str, word: str) -> None:
    assert describe_unsupported_files(tmp_path) is None
    (tmp_path / file).touch()
    assert word in (describe_unsupported_files(tmp_path) or "")
