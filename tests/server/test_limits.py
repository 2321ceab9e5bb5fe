"""A real server whose limits and policy change under it: by its key only, at the next step, and told in its metrics."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import RunningServer

pytestmark = pytest.mark.slow

PATH = "/admin/limits"
KEY = "sk-limits"
CHANGES = [{"max_num_seqs": 2}, {"policy": "fair"}, {"max_num_batched_tokens": 16}, {"policy": "shortest"}]
REFUSED = [({"max_num_seqs": 7}, "max_num_seqs"), ({"max_seqs": 2}, "max_seqs"), ({"policy": "x"}, "policy")]


def test_limits_change_under_load(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--api-key", KEY, "--max-num-seqs", "6")
    assert server.get(PATH).json()["policy"] == "fcfs"
    wrong = {"Authorization": "Bearer sk-other", "Content-Type": "application/json"}
    assert server.request("POST", PATH, b'{"max_num_seqs": 2}', wrong).status == 401
    golden = server.golden()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(server.complete, f"Number {i}", max_tokens=60, ignore_eos=True) for i in range(12)]
        for changes in (
            {"max_num_seqs": 2},
            {"policy": "fair"},
            {"max_num_batched_tokens": 16},
            {"policy": "shortest"},
        ):
            answer = server.post(PATH, changes)
            assert answer.status == 200, answer.body
            assert changes.items() <= answer.json().items()
        assert all(answer.result()["usage"]["completion_tokens"] == 60 for answer in answers), "nothing was ended"
    metrics = server.metrics()
    assert (metrics["quire:max_num_seqs"], metrics["quire:max_num_batched_tokens"]) == (2, 16)
    assert b'policy="shortest"' in server.get("/metrics").body
    for changes, param in (
        ({"max_num_seqs": 7}, "max_num_seqs"),
        ({"max_seqs": 2}, "max_seqs"),
        ({"policy": "x"}, "policy"),
    ):
        refused = server.post(PATH, changes)
        assert (refused.status, refused.json()["error"]["param"]) == (400, param)
    assert server.golden() == golden, "no limit changes an answer"


def test_what_would_be_late_is_refused_at_once(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--api-key", KEY, "--scheduling-policy", "deadline")
    server.complete("Once upon a time", max_tokens=20, ignore_eos=True)  # to measure the pace by
    for stream in (False, True):
        body = {"prompt": "Once upon a time", "max_tokens": 5, "ttft_target": 1e-7, "stream": stream}
        refused = server.post("/v1/completions", body)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert "ttft_target is 1e-07 s" in refused.json()["error"]["message"]
    assert server.complete("Once upon a time", max_tokens=5, ttft_target=100, tpot_target=10)["choices"]
    refused = server.post("/v1/completions", {"prompt": "Once", "priority": 3})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "priority")
