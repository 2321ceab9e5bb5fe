"""The tokenizer that an engine's options name."""

from pathlib import Path

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import ModelLoadError
from quire.text.configured import config_tokenizer


@pytest.mark.parametrize("name", ["/nowhere", "no hub id"])
def test_one_that_is_not_there_is_told_from_a_model_that_is_not(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^tokenizer: Model .*'{name}'"):
        config_tokenizer(EngineArgs("demo", tokenizer=name).resolve())


def test_a_folder_without_one_is_told_to_be_the_options(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="^tokenizer: the model directory has no tokenizer file"):
        config_tokenizer(EngineArgs("demo", tokenizer=str(tmp_path)).resolve())
