"""Nearest known names."""

import pytest

from quire.utils.suggest import nearest, unknown_name_message

KNOWN = ["temperature", "top_p", "top_k", "max_model_len", "tensor_parallel_size"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("temprature", "temperature"),
        ("Top-P", "top_p"),
        ("--max-model-length", "max_model_len"),
        ("tensor_paralel", "tensor_parallel_size"),
        ("zzz", None),
        ("", None),
    ],
)
def test_nearest(name: str, expected: str | None) -> None:
    assert nearest(name, KNOWN) == expected


def test_the_message_names_each_unknown_and_its_neighbour() -> None:
    message = unknown_name_message("LLM", ["topk", "qqq"], KNOWN)
    assert message.startswith("LLM has no argument 'topk'. Did you mean 'top_k'?")
    assert "no argument 'qqq'. Known: temperature, top_p" in message
