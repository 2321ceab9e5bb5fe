"""/admin/limits: who may change what, and what is told of it."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.info_requests import Engine
from quire.errors import InvalidRequestError

KEY = {"Authorization": "Bearer sk-1"}
PATH = "/admin/limits"


def test_limits_are_shown_and_changed(make_state: Callable[..., Any]) -> None:
    client = TestClient(build_app(make_state(api_key=["sk-1"])))
    assert client.get(PATH, headers=KEY).json() == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 100,
        "policy": "fcfs",
        "policy_options": {},
        "most_num_seqs": 8,
        "most_num_batched_tokens": 100,
    }
    answer = client.post(PATH, headers=KEY, json={"max_num_seqs": 3, "policy": "fair"})
    assert answer.status_code == 200
    assert (answer.json()["max_num_seqs"], answer.json()["policy"]) == (3, "fair")
    assert client.get(PATH, headers=KEY).json() == answer.json()


def test_nobody_changes_a_server_without_keys(make_state: Callable[..., Any], async_llm: Any) -> None:
    client = TestClient(build_app(make_state()))
    assert client.get(PATH).status_code == 200
    answer = client.post(PATH, json={"max_num_seqs": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "api_key_required")
    assert "--api-key" in answer.json()["error"]["message"]
    assert async_llm.limits.max_num_seqs == 8


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-2"}])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_wrong_key(make_state: Callable[..., Any], headers: dict[str, str], method: str) -> None:
    client = TestClient(build_app(make_state(api_key=["sk-1"])))
    assert client.request(method, PATH, headers=headers, json={"max_num_seqs": 3}).status_code == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_num_seqs": "3"}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"ttft_target": -1}, "ttft_target"),
        ({"policy": 3}, "policy"),
    ],
)
def test_wrong_kinds_are_refused_by_name(make_state: Callable[..., Any], body: dict[str, Any], param: str) -> None:
    client = TestClient(build_app(make_state(api_key=["sk-1"])))
    answer = client.post(PATH, headers=KEY, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_the_scheduler_refuses(make_state: Callable[..., Any], async_llm: Any) -> None:
    async def refuse(**changes: Any) -> None:
        raise InvalidRequestError(f"unknown limit {next(iter(changes))!r}.", next(iter(changes)))

    async_llm.set_limits = refuse
    client = TestClient(build_app(make_state(api_key=["sk-1"])))
    answer = client.post(PATH, headers=KEY, json={"max_seqs": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_seqs")


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), ("http://testserver", 200), ("https://ours.org", 200), ("https://evil.org", 403), ("null", 403)],
)
def test_no_other_page_changes_anything_by_a_password_that_the_browser_keeps(
    make_state: Callable[..., Any], origin: str | None, status: int
) -> None:
    client = TestClient(build_app(make_state(api_key=["sk-1"], allowed_origins=["https://ours.org"])))
    headers = {} if origin is None else {"Origin": origin}
    for path in ("/sleep", "/reset_prefix_cache"):  # as a form asks, without any script
        assert client.post(path, headers=headers, auth=("", "sk-1")).status_code == status
        assert client.post(path, headers=headers | KEY).status_code == 200, "what a script sets was asked for before"


class FakeReplicas:
    """Two engines."""

    second: Literal["up", "draining"] = "up"

    def states(self) -> list[Engine]:
        first = Engine(rank=0, state="up", num_requests=3, num_restarts=0)
        return [first, Engine(rank=1, state=self.second, num_requests=0, num_restarts=1)]

    def restart(self, rank: int) -> None:
        if rank != 1:
            raise InvalidRequestError(f"engine {rank} can't restart", "rank")
        self.second = "draining"


def test_engines_are_shown_and_restarted(make_state: Callable[..., Any]) -> None:
    state = make_state(api_key=["sk-1"])
    client = TestClient(build_app(state))
    first = {"rank": 0, "state": "up", "num_requests": 3, "num_restarts": 0}
    assert client.get("/admin/engines", headers=KEY).json() == {"data": [first]}
    assert client.post("/admin/engines/0/restart", headers=KEY).status_code == 400, "there is no other"
    state.replicas = FakeReplicas()
    second = {"rank": 1, "state": "up", "num_requests": 0, "num_restarts": 1}
    assert client.get("/admin/engines", headers=KEY).json() == {"data": [first, second]}
    answer = client.post("/admin/engines/1/restart", headers=KEY)
    assert (answer.status_code, answer.json()["data"][1]["state"]) == (202, "draining")
    assert client.post("/admin/engines/2/restart", headers=KEY).status_code == 400
    assert client.post("/admin/engines/1/restart").status_code == 401
    without = TestClient(build_app(make_state()))
    assert without.post("/admin/engines/1/restart").status_code == 403
