"""Rotary tables against those of transformers, for every way of scaling and both forms of config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.model import ModelConfig
from quire.models.llama import build_rope

transformers = pytest.importorskip("transformers")

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn without factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
    "llama3": {"rope_type": "llama3", "factor": 8.0} | LLAMA3,
}


def our_table(directory: Path, config: dict[str, Any], max_model_len: int | None = None) -> Tensor:
    (directory / "config.json").write_text(json.dumps(config))
    return build_rope(ModelConfig.from_pretrained(str(directory), max_model_len=max_model_len, load_format="dummy"))


def their_table(config: dict[str, Any], num_positions: int) -> Tensor:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = transformers.LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"})
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 300.0])
def test_tables(tmp_path: Path, name: str, theta: float) -> None:
    scaling = SCALINGS[name]
    newer = BASE | {"rope_parameters": {"rope_theta": theta} | scaling}
    # As long as the scaled context: what our dynamic table is made for, and transformers is asked for.
    found = our_table(tmp_path, newer)
    torch.testing.assert_close(found, their_table(newer, len(found)), atol=2e-5, rtol=0)
    older = BASE | {"rope_theta": theta, "rope_scaling": dict(scaling)}
    older["rope_scaling"]["type"] = older["rope_scaling"].pop("rope_type")
    assert torch.equal(our_table(tmp_path, older), found)
    if name != "default":
        assert not torch.allclose(their_table(BASE | {"rope_theta": theta}, len(found)), found, atol=1e-2)


def test_dynamic_scaling_begins_beyond_the_trained_length(tmp_path: Path) -> None:
    config = BASE | {"rope_scaling": SCALINGS["dynamic"]}
    plain = our_table(tmp_path, BASE)
    assert torch.equal(our_table(tmp_path, config, max_model_len=128), plain)
    assert not torch.allclose(our_table(tmp_path, config, max_model_len=300)[:128], plain, atol=1e-2)
    found = our_table(tmp_path, config, max_model_len=300)
    torch.testing.assert_close(found, their_table(config, 300), atol=2e-5, rtol=0)
