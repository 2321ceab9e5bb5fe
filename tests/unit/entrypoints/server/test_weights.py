"""/sleep, /wake_up, /is_sleeping and /update_weights: who may use them, and what reaches the engine."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.replicas import _still_to_tell
from quire.protocol.core import Call

KEY = {"Authorization": "Bearer sk-1"}


@pytest.fixture
def keyed(make_state: Callable[..., Any]) -> TestClient:
    return TestClient(build_app(make_state(api_key=["sk-1"])), headers=KEY)


def test_an_engine_sleeps_and_wakes_up(keyed: TestClient, async_llm: Any) -> None:
    assert keyed.get("/is_sleeping").json() == {"is_sleeping": False}
    assert keyed.post("/sleep?level=2").json() == {"is_sleeping": True}
    assert async_llm.slept == [2]
    assert 'sleep_state="discard_all"} 1.0' in keyed.get("/metrics").text
    assert keyed.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
    assert 'sleep_state="discard_all"} 1.0' in keyed.get("/metrics").text
    assert keyed.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
    assert 'sleep_state="awake"} 1.0' in keyed.get("/metrics").text
    assert keyed.post("/sleep").json() == {"is_sleeping": True}
    assert keyed.post("/wake_up").json() == {"is_sleeping": False}


def test_it_stays_as_it_is_while_requests_run(keyed: TestClient, async_llm: Any) -> None:
    async_llm.is_idle = False
    for answer in (keyed.post("/sleep"), keyed.post("/update_weights", json={"path": "/weights"})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


def test_requests_that_run_are_ended_or_waited_for_on_demand(keyed: TestClient, async_llm: Any) -> None:
    async_llm.is_idle = False
    for mode in ("abort", "wait", "keep"):
        keyed.post(f"/sleep?mode={mode}")
        assert async_llm.sleep_modes[-1] == mode
    answer = keyed.post("/sleep?mode=later")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")


def test_requests_wait_while_it_is_paused(keyed: TestClient, async_llm: Any) -> None:
    assert keyed.get("/is_paused").json() == {"is_paused": False}
    assert keyed.post("/pause?mode=wait&clear_cache=false").json() == {"status": "paused"}
    assert async_llm.pauses == [{"mode": "wait", "wait_for_inflight_requests": False, "clear_cache": False}]
    assert keyed.get("/is_paused").json() == {"is_paused": True}
    assert keyed.post("/resume").json() == {"status": "resumed"}
    assert keyed.get("/is_paused").json() == {"is_paused": False}
    assert keyed.post("/pause?wait_for_inflight_requests=true").json() == {"status": "paused"}
    assert async_llm.pauses[-1] == {"mode": "abort", "wait_for_inflight_requests": True, "clear_cache": True}
    assert keyed.post("/pause?mode=keep").json() == {"status": "paused"}
    assert async_llm.pauses[-1]["mode"] == "keep"
    answer = keyed.post("/pause?mode=later")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")


def test_weights_come_from_a_directory(keyed: TestClient) -> None:
    assert keyed.post("/update_weights", json={"path": "/weights"}).json() == {"is_sleeping": False}
    answer = keyed.post("/update_weights", json={"path": "/nowhere"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert "has no weights" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/sleep?level=x", None, "level"), ("/update_weights", {}, "path"), ("/update_weights", {"path": ""}, "path")],
)
def test_wrong_requests_are_refused_by_name(keyed: TestClient, path: str, body: Any, param: str) -> None:
    answer = keyed.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_nobody_changes_a_server_without_keys(client: TestClient) -> None:
    for answer in (client.post("/sleep"), client.post("/wake_up"), client.post("/update_weights", json={"path": "x"})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "api_key_required")
    assert client.get("/is_sleeping").status_code == 200


def test_what_an_engine_that_starts_again_has_to_be_told() -> None:
    def told(*calls: Call) -> list[list[Any]]:
        known: list[Call] = []
        for call in calls:
            known = _still_to_tell(known, call)
        return [[call.name, *call.arguments] for call in known]

    first, second = Call(1, "update_weights", ["/a"]), Call(2, "update_weights", ["/b"])
    light, deep = Call(3, "sleep", [1]), Call(4, "sleep", [2])
    half, whole = Call(5, "wake_up", [["weights"]]), Call(6, "wake_up", [None])
    assert told(first, second) == [["update_weights", "/b"]]
    assert told(first, light) == [["update_weights", "/a"], ["sleep", 1]]
    assert told(first, light, half) == [["update_weights", "/a"], ["sleep", 1], ["wake_up", ["weights"]]]
    assert told(first, light, whole) == [["update_weights", "/a"]]
    assert told(first, deep, whole) == []
    assert told(first, deep, second, whole) == [["update_weights", "/b"]]
