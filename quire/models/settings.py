"""Reads the numbers of config.json that one family alone knows; `quire.config.model` has those that all have.

Builders of models call it, so that a value that can't be is told by its key before a layer is made of it. Null counts
as absent, as transformers writes it; for what is absent the family's defaults come before those given here.
"""

from typing import Any

from quire.config.config_json import ConfigReader
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError

_MOST = 2**31 - 1  # of a model's counts, and of its numbers


def count(config: ModelConfig, key: str, default: int, least: int = 1, most: int = _MOST) -> int:
    """A whole number from `least` to `most` (ModelLoadError)."""
    value = _value(config, key, default)
    if type(value) is not int or not least <= value <= most:
        raise _refusal(config, key, value, f"a whole number from {least} to {most}")
    return value


def number(config: ModelConfig, key: str, default: float) -> float:
    """A number over 0 (ModelLoadError)."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
        raise _refusal(config, key, value, "a number over 0")
    return float(value)


def indices(config: ModelConfig, key: str) -> frozenset[int]:
    """Numbers of layers, none by default (ModelLoadError)."""
    value = _value(config, key, [])
    if not isinstance(value, list) or any(type(index) is not int for index in value):
        raise _refusal(config, key, value, "a list of whole numbers")
    return frozenset(value)


def _value(config: ModelConfig, key: str, default: Any) -> Any:
    family, value = ConfigReader(config.hf_config, config.model).family, config.hf_config.get(key)
    return family.defaults.get(key, default) if value is None else value


def _refusal(config: ModelConfig, key: str, value: Any, rule: str) -> ModelLoadError:
    return ModelLoadError(f"config.json of model {config.model!r} has {key} = {value!r}; it must be {rule}.")
