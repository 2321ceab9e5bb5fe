"""What an adapter's files may say, and what is said of those that say something else."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loras import factors, write_adapter

from quire.errors import InvalidRequestError
from quire.lora.request import LoRARequest
from quire.models.peft import read_adapter

NAME = "model.layers.0.self_attn.q_proj"


def test_ranks_and_scales_follow_the_patterns(tmp_path: Path) -> None:
    tensors = factors({NAME: (8, 8)}, 4, 1) | factors({"model.layers.1.mlp.up_proj": (8, 8)}, 2, 1)
    stated: dict[str, Any] = {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {r"layers\.0\..*q_proj": 3}}
    files = read_adapter(str(write_adapter(tmp_path / "a", tensors, 4, lora_alpha=16, **stated)), "a")
    assert [files.rank(name) for name in files.tensors] == [4, 2]
    assert [files.scale(name) for name in files.tensors] == [0.75, 8.0]
    rooted = read_adapter(str(write_adapter(tmp_path / "b", tensors, 4, use_rslora=True, **stated)), "b")
    assert [rooted.scale(name) for name in rooted.tensors] == [1.5, 8 / 2**0.5]
    assert rooted.digest != files.digest


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"use_dora": True}, "use_dora=True for magnitudes of its own (DoRA)"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] for whole modules"),
        ({"bias": "all"}, "bias='all' for biases"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]]"),
        ({"init_lora_weights": "pissa_niter_9"}, "init_lora_weights='pissa_niter_9' for a base model that was changed"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' for a base model that was changed first"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; what can be served is LORA, PROMPT_TUNING, P_TUNING, PREFIX_TUNING"),
        ({"r": 0}, "r=0, which must be a number from 1 on"),
        ({"lora_alpha": "8"}, "lora_alpha='8'"),
        ({"rank_pattern": 5}, "r='5', which must be a number"),
        ({"rank_pattern": {"(": 4}}, "has '(', where names"),
        ({"alpha_pattern": {"((.+)+)+z": 4}}, "has '((.+)+)+z', where names"),
        ({"alpha_pattern": {".*.*.*.*z": 4}}, "has '.*.*.*.*z', where names"),
        ({"r": 5}, "are not of rank 5, as adapter_config.json says they are"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(stated: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, factors({NAME: (8, 8)}, 4, 1), 4, **stated)
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as error:
        read_adapter(str(path), "voice")
    assert "voice" in str(error.value)
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_how_training_began_is_no_matter_where_the_model_stayed(start: object, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, factors({NAME: (8, 8)}, 4, 1), 4, init_lora_weights=start)
    assert read_adapter(str(path), "voice").rank(NAME) == 4


def test_tables_beside_their_factors_are_left(tmp_path: Path) -> None:
    """PEFT saves them, as they were, where they are targets."""
    names = ("lm_head", "model.embed_tokens", "transformer.wte")
    each = factors(dict.fromkeys(names, (20, 8)), 4, 1)
    tables = {f"base_model.model.{name}.base_layer.weight": torch.ones(20, 8) for name in names}
    files = read_adapter(str(write_adapter(tmp_path, each | tables, 4)), "voice")
    assert sorted(files.tensors) == [*names]


@pytest.mark.parametrize(
    "pattern",
    [
        *(NAME, f"^{NAME}$", r"layers\.0\..*q_proj", "(k_proj|q_proj)", r"layers\.\d+\.self_attn.q_proj"),
        *("v_proj|q_proj", r"^.*\.k_proj$|^.*\.q_proj$", r"layers\.[0-3]\.self_attn\.(?:q_proj|v_proj)"),
    ],
)
def test_patterns_that_are_taken(pattern: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, factors({NAME: (8, 8)}, 4, 1), 8, rank_pattern={pattern: 4})
    assert read_adapter(str(path), "voice").rank(NAME) == 4


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no adapter_config\.json that can be read"):
        read_adapter(str(tmp_path / "none"), "voice")
    with pytest.raises(InvalidRequestError, match=r"no adapter_config\.json that can be read"):
        read_adapter("~nobody-is-called-so/x", "voice")
    path = write_adapter(tmp_path / "voice", factors({NAME: (8, 8)}, 4, 1), 4)
    with pytest.raises(InvalidRequestError, match=r"has rank 4, over max_lora_rank=2"):
        read_adapter(str(path), "voice", 2)
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(InvalidRequestError, match="truncated or damaged"):
            read_adapter(str(path), "voice")
    weights.unlink()
    (path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.bin is a pickle"):
        read_adapter(str(path), "voice")
    for broken in ("{", "[" * 100_000):
        (path / "adapter_config.json").write_text(broken)
        with pytest.raises(InvalidRequestError, match="is no JSON"):
            read_adapter(str(path), "voice")


def test_tensors_that_are_no_factors(tmp_path: Path) -> None:
    good = factors({NAME: (8, 8)}, 4, 1)
    one = dict([*good.items()][:1])
    for tensors, message in (
        (good | {f"base_model.model.{NAME}.lora_magnitude_vector": torch.ones(8)}, "lora_magnitude_vector' [8], which"),
        (one, "has but one factor"),
        ({}, "has no tensors"),
    ):
        path = write_adapter(tmp_path, tensors, 4)
        with pytest.raises(InvalidRequestError, match=re.escape(message)):
            read_adapter(str(path), "voice")


@pytest.mark.parametrize(
    "wrong", [("", 1, "p"), ("n", 0, "p"), ("n", True, "p"), ("n", 2**31, "p"), ("n", 1, "")], ids=str
)
def test_requests_that_name_no_adapter(wrong: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="^lora_"):
        LoRARequest(*wrong)


def test_a_request_may_name_its_model() -> None:
    assert LoRARequest("a", 1, "p", "demo") == LoRARequest("a", 1, "p", base_model_name="demo")
    assert LoRARequest("a", 1, "p").base_model_name is None
    assert (LoRARequest("a", 1, "p").name, LoRARequest("a", 1, "p").adapter_id, LoRARequest("a", 1, "p").path) == (
        "a",
        1,
        "p",
    )
    with pytest.raises(InvalidRequestError, match="^base_model_name"):
        LoRARequest("a", 1, "p", "")


def test_a_path_may_be_a_path() -> None:
    assert LoRARequest("a", 1, Path("some/where")) == LoRARequest("a", 1, "some/where")  # type: ignore[arg-type]
