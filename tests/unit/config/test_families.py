"""The table of families: complete, and each shape where it says."""

import importlib

import pytest

from quire.config.families import BY_MODEL_TYPE, FAMILIES, Family, family_of


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_each_shape_is_where_the_table_says(family: Family) -> None:
    module, _, function = family.shape.partition(":")
    assert callable(getattr(importlib.import_module(f"quire.models.{module}"), function))


def test_a_model_type_stands_for_one_architecture() -> None:
    assert len(BY_MODEL_TYPE) == len(FAMILIES)
    assert family_of("qwen2").architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("model_type", ["bert", None, ["llama"]])
def test_what_is_not_known_has_no_peculiarities(model_type: object) -> None:
    assert family_of(model_type) == Family("", "", "")
