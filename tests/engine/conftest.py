"""Fixtures for tests that drive a whole engine: tiny random models of every family, and the two real ones."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire.ops.native.library import TORCH, levels, library
from quire.ops.native.matrix import weight_order
from quire.ops.native.structs import Type

sys.path.insert(0, str(Path(__file__).parent))  # for what test_exactness.py has to share

BASE = {
    "vocab_size": 199,
    "hidden_size": 40,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FAMILIES = {
    "llama": BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "mixtral": BASE | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5},
    "qwen2-moe": BASE
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "gpt-oss": BASE
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 24,
    },
    "gemma2": BASE
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 24,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
    },
    "gemma3": BASE
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 199,
        "hidden_size": 40,
        "word_embed_proj_dim": 40,
        "ffn_dim": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "do_layer_norm_before": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 199,
        "n_embd": 40,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
}


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """Grammars are tried for as long as a busy machine takes: what it refuses for that is no answer of the engine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.text.grammars.trial._MAX_WAIT", 1000)
        yield


@pytest.fixture(scope="session")
def family_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory with nothing but a config.json for each family; load them with load_format="dummy"."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for name, config in FAMILIES.items():
        found[name] = root / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="session")
def model_options(family_dirs: dict[str, Path], request: pytest.FixtureRequest):
    """Engine options that load a model by its short name; skips where its files are absent."""

    def options(name: str) -> dict[str, object]:
        if name in family_dirs:
            return {"model": str(family_dirs[name]), "load_format": "dummy", "skip_tokenizer_init": True}
        if name == "stories260K":
            path = request.getfixturevalue("shared_data") / "models" / name
            return {"model": str(path), "skip_tokenizer_init": True}
        return {"model": name, "skip_tokenizer_init": True}

    return options


@pytest.fixture
def native() -> str:
    """The best level of compiled kernels, which engines choose by themselves; skips where there are none."""
    if levels() == [TORCH]:
        pytest.skip("needs the compiled kernels")
    return levels()[0]


@pytest.fixture
def multiplying_numbers(native: str) -> str:
    """The best level at which weights in blocks are multiplied as the numbers that a dequantized model has."""
    return next(level for level in levels() if not weight_order(level, Type.Q8_0)[1])


@pytest.fixture
def two_threads(native: str, monkeypatch: pytest.MonkeyPatch):
    """`with two_threads(used=True):` engines that start run on two threads, however small the model."""

    @contextmanager
    def on(used: bool) -> Iterator[None]:
        before = torch.get_num_threads()
        monkeypatch.setattr("quire.worker.devices.cpu.SMALL_MODEL", 0)
        torch.set_num_threads(2 if used else 1)
        try:
            yield
            found = library()
            assert found is None or not used or found.quire_scratch_bytes(2) > 0, "nothing ran on two threads"
        finally:
            torch.set_num_threads(before)

    return on
