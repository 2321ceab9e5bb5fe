"""/admin/prefixes and /reset_prefix_cache: who may use them, and what reaches the engine."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.app import build_app

KEY = {"Authorization": "Bearer sk-1"}
PATH = "/admin/prefixes"
MESSAGES = [{"role": "system", "content": "Be brief."}]


@pytest.fixture
def keyed(make_state: Callable[..., Any]) -> TestClient:
    return TestClient(build_app(make_state(api_key=["sk-1"])), headers=KEY)


def test_prompts_are_pinned_listed_and_unpinned(keyed: TestClient, async_llm: Any) -> None:
    answer = keyed.post(PATH, json={"prompt": "Once upon", "name": "tale", "cache_salt": "s"})
    assert (answer.status_code, answer.json()) == (200, {"name": "tale", "num_tokens": 32, "num_blocks": 2})
    assert keyed.post(PATH, json={"prompt": [1, 2, 3]}).json()["name"] == "prefix-0"
    assert keyed.post(PATH, json={"messages": MESSAGES}).status_code == 200
    assert async_llm.pinned == [
        ({"prompt": "Once upon", "cache_salt": "s"}, True),
        ({"prompt_token_ids": [1, 2, 3]}, True),
        ({"prompt": "system:Be brief."}, False),
    ]
    assert async_llm.rendered[0]["add_generation_prompt"] is False, "another message may follow"
    assert keyed.get(PATH).json() == {"data": [{"name": "system", "num_tokens": 32, "num_blocks": 2}]}
    assert keyed.delete(f"{PATH}/system").status_code == 200
    answer = keyed.delete(f"{PATH}/models")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no prefix 'models' is pinned.")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "name": ""}, "name"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "nmae": "y"}, "nmae"),
    ],
)
def test_wrong_bodies_are_refused_by_name(keyed: TestClient, body: dict[str, Any], param: str) -> None:
    answer = keyed.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_everything_is_forgotten_when_nothing_runs(keyed: TestClient, async_llm: Any) -> None:
    assert keyed.post("/reset_prefix_cache").status_code == 200
    async_llm.is_idle = False
    answer = keyed.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert keyed.post("/reset_prefix_cache?reset_running_requests=true").status_code == 200


def test_nobody_changes_a_server_without_keys(client: TestClient, async_llm: Any) -> None:
    answers = [client.post(PATH, json={"prompt": "x"}), client.delete(f"{PATH}/system")]
    for answer in [*answers, client.post("/reset_prefix_cache")]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "api_key_required")
    assert async_llm.pinned == []
    assert client.get(PATH).status_code == 200
