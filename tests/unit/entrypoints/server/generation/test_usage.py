"""Server options that say what streams and usages hold, whatever requests ask for."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from fastapi.testclient import TestClient

BODIES = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 6}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_every_stream_ends_with_its_usage(
    make_server: Callable[..., Any],
    parsed: Callable[..., Any],
    path: str,
    body: dict[str, Any],
    options: dict[str, Any],
) -> None:
    with TestClient(make_server(enable_force_include_usage=True).app) as client:
        chunks = parsed(client.post(path, json=body | {"stream": True} | options).content)
        assert client.post(path, json=body).json()["usage"]["completion_tokens"] == 6
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert not chunks[-1]["choices"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_what_the_cache_had_need_not_be_told(make_server: Callable[..., Any], path: str, body: dict[str, Any]) -> None:
    for shown in (True, False):
        with TestClient(make_server(enable_prompt_tokens_details=shown).app) as client:
            usage = client.post(path, json=body).json()["usage"]
        assert usage["prompt_tokens_details"] == ({"cached_tokens": 3} if shown else None)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_gathers_tokens(
    make_server: Callable[..., Any], parsed: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    """One token at once, then three at a time, and what is left at the end."""
    sizes: dict[int, list[int]] = {}
    for interval in (1, 3):
        with TestClient(make_server({"stream_interval": interval}).app) as client:
            asked = body | {"stream": True, "return_token_ids": True}
            chunks = parsed(client.post(path, json=asked).content)
        sizes[interval] = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(sizes[1]) == sum(sizes[3]) == 6
    assert set(accumulate(sizes[3])) <= {1, 4, 6}  # of a reader that is slow, pieces are merged
