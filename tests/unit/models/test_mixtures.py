"""What a config.json may say of a mixture of experts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.llama import LlamaShape
from quire.models.mixtures import ernie_moe_shape, glm_shape, mixtral_shape

SIZES = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("shape", "architecture", "all_key", "chosen_key"),
    [
        (mixtral_shape, "MixtralForCausalLM", "num_local_experts", "num_experts_per_tok"),
        (glm_shape, "Glm4MoeForCausalLM", "n_routed_experts", "num_experts_per_tok"),
        (ernie_moe_shape, "Ernie4_5_MoeForCausalLM", "moe_num_experts", "moe_k"),
    ],
)
@pytest.mark.parametrize("chosen", [0, 5])
def test_more_experts_than_there_are_are_refused(
    shape: Callable[[ModelConfig], LlamaShape],
    architecture: str,
    all_key: str,
    chosen_key: str,
    chosen: int,
    tmp_path: Path,
) -> None:
    stated = SIZES | {"architectures": [architecture], "max_position_embeddings": 16, all_key: 4, chosen_key: chosen}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    config = ModelConfig.from_pretrained(tmp_path, load_format="dummy")
    with pytest.raises(ModelLoadError, match=f"{chosen_key} = {chosen}; it must be a whole number from 1 to 4"):
        shape(config)
