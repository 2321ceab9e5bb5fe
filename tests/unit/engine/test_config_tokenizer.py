"""The tokenizer that an engine's options name."""

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.tokenizer import config_tokenizer
from quire.errors import ModelLoadError


@pytest.mark.parametrize("name", ["/nowhere", "no hub id"])
def test_one_that_is_not_there_is_told_from_a_model_that_is_not(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^tokenizer: Model .*'{name}'"):
        config_tokenizer(EngineArgs("demo", tokenizer=name).resolve())
