"""The render routes, and `timings` in answers."""

from typing import Any

from fastapi.testclient import TestClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_a_chat_would_be_given(server: Any, client: TestClient) -> None:
    body = {"messages": [USER], "temperature": 0.5, "max_tokens": 7, "stop": ["x"], "request_id": "mine"}
    rendered = post(client, f"{CHAT}/render", **body)
    assert not server.core.requests
    assert rendered["prompt"] == "<|endoftext|><|user|>Hi<|end|><|assistant|>"
    assert (rendered["request_id"], rendered["model"]) == ("mine", "demo")
    params = rendered["sampling_params"]
    assert (params["temperature"], params["max_tokens"], params["stop"], params["top_p"]) == (0.5, 7, ["x"], 1.0)
    answer = post(client, CHAT, **body, return_token_ids=True)
    assert answer["prompt_token_ids"] == rendered["token_ids"]


def test_what_completions_would_be_given(client: TestClient) -> None:
    first, second = post(client, f"{COMPLETIONS}/render", prompt=["Once", "Twice upon"], truncate_prompt_tokens=2)
    assert len(second["token_ids"]) <= 2
    assert second["prompt"] != "Twice upon"
    (by_ids,) = post(client, f"{COMPLETIONS}/render", prompt=first["token_ids"])
    assert by_ids["token_ids"] == first["token_ids"]
    assert by_ids["prompt"] == first["prompt"]
    assert client.post(f"{COMPLETIONS}/render", json={"prompt": "x", "top_p": 2}).status_code == 400


def test_timings_on_demand(client: TestClient, parsed: Any) -> None:
    for path, body in ((CHAT, {"messages": [USER], "n": 2}), (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 5})):
        assert "timings" not in post(client, path, **body)
        answer = post(client, path, **body, timings=True)
        timings, usage = answer["timings"], answer["usage"]
        assert timings["predicted_n"] == usage["completion_tokens"]
        assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
        assert all(
            isinstance(timings[name], float)
            for name in ("queue_ms", "prompt_ms", "predicted_ms", "predicted_per_second")
        )
        chunks = parsed(client.post(path, json={**body, "timings": True, "stream": True}).text)
        assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["timings"]["predicted_n"] > 0
