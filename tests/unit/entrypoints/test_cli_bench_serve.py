"""`quire bench serve` against a fake server: what it sends, when, and the figures of what comes back."""

import itertools
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.entrypoints.cli.load.bench_serve import run
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.cli.main import build_parser, main
from quire.entrypoints.cli.remote import Model, RemoteError, Server
from quire.errors import ConfigError, NotYetSupportedError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def bench(server: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs it with these flags, and returns the figures."""

    def run(*flags: str, code: int = 0) -> dict[str, Any]:
        path = tmp_path / "figures.json"
        assert main(["bench", "serve", "--base-url", server.url, "--output-json", str(path), *flags]) == code
        return json.loads(path.read_text())

    return run


def tell_vocabulary(server: Any, size: int = 50) -> None:
    server.answers["/tokenizer_info"] = lambda handler, _: handler.send_json(200, {"vocab_size": size})


def test_random_token_ids(server: Any, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tell_vocabulary(server)
    flags = ["--num-prompts", "5", "--random-input-len", "6", "--random-output-len", "3"]
    figures = bench(*flags, "--extra-body", '{"temperature": 0.5}', "--goodput", "ttft:60000")
    bodies = server.bodies(COMPLETIONS)
    assert len(bodies) == 5
    assert all(len(body["prompt"]) == 6 and max(body["prompt"]) < 50 for body in bodies)
    del bodies[0]["prompt"]
    assert bodies[0] == {
        "model": "first", "max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (figures["completed"], figures["failed"], figures["model_id"]) == (5, 0, "first")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (35, 15)  # the server's count
    assert figures["output_throughput"] == pytest.approx(15 / figures["duration"])
    assert figures["request_goodput"] == figures["request_throughput"]
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p90", "p95", "p99"):
            assert figures[f"{statistic}_{metric}_ms"] >= 0
    out = capsys.readouterr().out
    assert "Time to first token (TTFT)" in out
    assert "processor core" in out


def test_the_seed_decides_all(server: Any, bench: Any) -> None:
    tell_vocabulary(server)
    sent = []
    for seed in ("1", "1", "2"):
        server.requests.clear()
        bench("--num-prompts", "4", "--random-input-len", "20", "--random-range-ratio", "0.5", "--seed", seed,
              "--random-prefix-len", "3", "--max-concurrency", "1")  # fmt: skip
        sent.append([(body["prompt"], body["max_tokens"]) for body in server.bodies(COMPLETIONS)])
    assert sent[0] == sent[1] != sent[2]
    prompts = [prompt for prompt, _ in sent[0]]
    assert all(prompt[:3] == prompts[0][:3] for prompt in prompts)
    assert len({len(prompt) for prompt in prompts}) > 1
    assert all(13 <= len(prompt) <= 33 for prompt in prompts)


def test_words_where_the_server_tells_no_vocabulary(server: Any, bench: Any) -> None:
    bench("--backend", "openai-chat", "--num-prompts", "2", "--random-input-len", "50", "--model", "second")
    bodies = server.bodies(CHAT)
    assert [body["model"] for body in bodies] == ["second"] * 2
    assert [len(body["messages"][0]["content"].split()) for body in bodies] == [50] * 2


def test_a_command_line_of_vllms(server: Any, bench: Any) -> None:
    """The path is given beside the backend, and what has no effect is taken."""
    flags = ["--num-prompts", "2", "--random-input-len", "5", "--disable-tqdm", "--percentile-metrics", "ttft,tpot"]
    bench("--endpoint-type", "openai-chat", "--endpoint", "/v1/chat/completions", *flags)
    assert len(server.bodies(CHAT)) == 2
    bench("--backend", "vllm", "--endpoint", "/v1/completions", *flags)
    assert len(server.bodies(COMPLETIONS)) == 2
    names = ["--model", "some/weights", "--served-model-name", "second", "--trust-remote-code", "--skip-chat-template"]
    assert main(["bench", "serve", "--url", server.url, "--endpoint", "elsewhere", *flags, *names]) == 0
    assert server.requests[-1][0] == "/elsewhere"
    assert server.bodies("/elsewhere")[-1]["model"] == "second"
    bench("--num-prompts", "1", "--input-len", "7", "--output-len", "3")
    assert (len(server.bodies(COMPLETIONS)[-1]["prompt"].split()), server.bodies(COMPLETIONS)[-1]["max_tokens"]) == (
        7,
        3,
    )
    refused = {
        ("serve", "--top-p", "0.9"): "is no option here, but of requests",
        ("serve", "--lora-assignment", "round-robin"): "is not supported: .*--lora-modules at random",
        ("serve", "--lora-path", "x"): "is not supported here: .*--lora-modules NAME",
        ("serve", "--probe-request-rate", "2"): "is not supported: .*--request-rate",
        ("throughput", "--backend", "hf"): "has one value here, 'vllm'",
        ("throughput", "--prefix-len", "2"): "is not an option here: .*--random-prefix-len",
    }
    for (what, *given), message in refused.items():
        with pytest.raises(NotYetSupportedError, match=f"^{given[0]} {message}"):
            build_parser().parse_known_args(["bench", what, *given])
    taken = ["--backend", "vllm", "--hf-max-batch-size", "4", "--prefix-len", "0"]
    assert build_parser().parse_known_args(["bench", "throughput", *taken])[1] == []
    taken = ["--no-stream", "--no-oversample", "--no-reranker", "--self-timed", "--probe-request-rate", "0"]
    taken += ["--tokenizer-mode", "slow", "--skip-tokenizer-init", "--lora-assignment", "random"]
    assert build_parser().parse_known_args(["bench", "serve", *taken])[1] == []


@pytest.mark.slow
def test_adapters_are_drawn_for_requests(server: Any, bench: Any) -> None:
    flags = ["--num-prompts", "20", "--random-input-len", "3", "--max-concurrency", "1", "--lora-modules", "a", "b"]
    drawn = []
    for _ in range(2):
        server.requests.clear()
        assert bench(*flags)["model_id"] == "first"
        drawn.append([body["model"] for body in server.bodies(COMPLETIONS)])
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {"a", "b"}


def test_percentiles_that_are_asked_for(server: Any, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench("--num-prompts", "2", "--random-input-len", "5", "--metric-percentiles", "25,50,99.9")
    names = ("mean", "std", "median", "p25", "p50", "p99.9")
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert [key for key in figures if key.endswith(f"_{metric}_ms")] == [f"{name}_{metric}_ms" for name in names]
        assert figures[f"p50_{metric}_ms"] == figures[f"median_{metric}_ms"]
    (head,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Milliseconds"))
    assert tuple(head.split()[1:]) == names
    for wrong in ("50,", "101", "p50", ""):
        with pytest.raises(ConfigError, match="metric_percentiles must be numbers from 0 to 100"):
            LoadArgs(metric_percentiles=wrong)


@pytest.mark.slow
def test_a_server_that_is_starting_is_waited_for(server: Any, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = itertools.chain([False, False], itertools.repeat(True))
    ask = Server.models

    def models(self: Any) -> list[Model]:
        if not next(answers):
            raise RemoteError("no server answers.")
        return ask(self)

    monkeypatch.setattr(Server, "models", models)
    bench("--num-prompts", "1", "--random-input-len", "4", "--ready-check-timeout-sec", "60")
    assert len(server.bodies(COMPLETIONS)) == 1
    answers = itertools.repeat(False)
    with pytest.raises(RemoteError, match="no server answers"):
        run(LoadArgs(base_url=server.url, num_prompts=1))
    start = time.monotonic()
    with pytest.raises(RemoteError, match="no server answers"):
        run(LoadArgs(base_url=server.url, num_prompts=1, ready_check_timeout_sec=0.6))
    assert time.monotonic() - start >= 0.6


def test_vllms_file_of_results(server: Any, bench: Any, tmp_path: Path) -> None:
    flags = ["--num-prompts", "3", "--random-input-len", "4", "--random-output-len", "2", "--max-concurrency", "2"]
    folder = tmp_path / "new" / "results"
    saved = ["--save-result", "--save-detailed", "--result-dir", str(folder), "--metadata", "tp=1", "v=a=b"]
    shown = bench(*flags, *saved, "--label", "run")
    (path,) = folder.iterdir()
    figures = json.loads(path.read_text())
    assert figures == shown
    assert path.name == f"run-infqps-concurrency2-first-{figures['date']}.json"
    assert (figures["endpoint_type"], figures["label"], figures["tokenizer_id"]) == ("openai", "run", "first")
    assert (figures["tp"], figures["v"]) == ("1", "a=b")
    assert (figures["output_lens"], figures["errors"]) == ([3, 3, 3], ["", "", ""])  # by the server's count
    assert all(isinstance(gap, float) for itls in figures["itls"] for gap in itls)
    assert all(len(figures[name]) == 3 for name in ("input_lens", "ttfts", "itls", "latencies", "start_times"))
    bench(*flags, "--save-result", "--result-dir", str(folder), "--result-filename", "named.json")
    figures = json.loads((folder / "named.json").read_text())
    assert (figures["label"], "ttfts" in figures) == (None, False)
    runs = [bench(*flags, "--append-result", "--save-result", "--result-filename", str(tmp_path / "all")) for _ in "ab"]
    assert [json.loads(line) for line in (tmp_path / "all").read_text().splitlines()] == runs


def test_a_folder_of_results_that_cannot_be_is_told_of_before(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", server.url, "--save-result", "--result-dir", "/dev/null/x"])
    assert "/dev/null/x: Not a directory" in capsys.readouterr().err
    assert server.requests == []


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--save-result", "--result-filename", "/dev/null/x"], "--result-filename /dev/null/x: Not a directory."),
        (["--save-result", "--result-dir", "{}", "--result-filename", "f"], "--result-filename {}/f: Is a directory."),
        (["--append-result", "--result-dir", "/proc"], "--result-dir /proc/openai-infqps-first-"),
    ],
)
def test_a_file_of_results_that_cannot_be_is_told_of_before(
    flags: list[str], error: str, server: Any, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "f").mkdir()
    tell_vocabulary(server)
    flags = [flag.replace("{}", str(tmp_path)) for flag in flags]
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == 2
    assert f"\nerror: {error.replace('{}', str(tmp_path))}" in capsys.readouterr().err
    assert server.bodies(COMPLETIONS) == []


def test_requests_keep_connections_and_the_limit(server: Any, bench: Any) -> None:
    tell_vocabulary(server)
    figures = bench("--num-prompts", "12", "--max-concurrency", "3", "--random-input-len", "4")
    assert len(server.bodies(COMPLETIONS)) == 12
    assert server.num_connections <= 3 + 3  # those of the load, and one for each question before
    assert figures["num_prompts"] == 12


def test_arrivals_follow_the_rate(server: Any, bench: Any) -> None:
    tell_vocabulary(server)
    figures = bench("--num-prompts", "10", "--request-rate", "50", "--burstiness", "2", "--random-input-len", "4")
    assert figures["request_rate"] == 50
    assert figures["duration"] >= 10 / 50


def test_no_rate_and_no_bursts_may_be_said(server: Any, bench: Any) -> None:
    """Both are vLLM's defaults."""
    tell_vocabulary(server)
    for rate in ([], ["--request-rate", "inf"]):
        figures = bench("--num-prompts", "2", *rate, "--burstiness", "1.0", "--random-input-len", "4")
        assert (figures["request_rate"], figures["burstiness"]) == ("inf", 1.0)


def test_a_trace(server: Any, bench: Any, tmp_path: Path) -> None:
    tell_vocabulary(server, 1000)
    lines = [{"timestamp": t, "input_length": n, "output_length": 2, "hash_ids": ids}
             for t, n, ids in [(0, 1000, [1, 2]), (100, 600, [1, 3]), (100, 20, [4]), (900, 1, [5])]]  # fmt: skip
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--dataset-name", "trace", "--dataset-path", str(tmp_path / "trace"), "--num-prompts", "3"]
    flags += ["--max-concurrency", "1"]
    figures = bench(*flags)
    first, second, third = (body["prompt"] for body in server.bodies(COMPLETIONS))
    assert [len(prompt) for prompt in (first, second, third)] == [1000, 600, 20]
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert figures["duration"] >= 0.1
    assert figures["request_rate"] == "trace"
    server.requests.clear()
    assert bench(*flags, "--trace-scale", "0.5", "--request-rate", "inf")["request_rate"] == "inf"
    assert [len(body["prompt"]) for body in server.bodies(COMPLETIONS)] == [500, 300, 10]
    assert {body["max_tokens"] for body in server.bodies(COMPLETIONS)} == {1}


def test_prompts_of_the_users_own(server: Any, bench: Any, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n\n{"prompt": [4, 5]}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(tmp_path / "d.jsonl"), "--max-concurrency", "1"]
    bench(*flags, "--random-output-len", "8", "--api-key", "k", "--extra-body", '{"min_tokens": 1}')
    bodies = server.bodies(COMPLETIONS)
    assert [(b["prompt"], b["max_tokens"], b["min_tokens"]) for b in bodies] == [("a", 2, 1), ([4, 5], 8, 1)]
    assert "ignore_eos" not in bodies[0]
    assert {headers["authorization"] for _, headers, _ in server.requests} == {"Bearer k"}
    assert main(["bench", "serve", "--url", server.url, *flags, "--backend", "openai-chat"]) == 2


def test_failures_are_counted_by_kind(
    server: Any, bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_vocabulary(server)

    def answer(handler: Any, body: dict[str, Any]) -> None:
        number = len(server.bodies(COMPLETIONS))
        if number <= 2:
            return handler.send_json(503, {"error": {"message": "queue full", "code": "overloaded"}})
        handler.start_stream()
        if number == 3:
            handler.send_event({"error": {"message": "engine died", "code": "engine_dead"}})
            handler.send_chunk(b"")
        elif number == 4:
            handler.close_connection = True
        elif number == 5:
            handler.send_chunk(b"data: [1\n\n")
            handler.send_chunk(b"")
        elif number == 6:
            handler.send_event({"choices": [{"text": "a"}]})
            handler.send_chunk(b"")
        return None

    server.answers[COMPLETIONS] = answer
    plot = tmp_path / "plot.svg"
    figures = bench(
        "--num-prompts", "6", "--max-concurrency", "1", "--random-input-len", "4", "--plot", str(plot), code=1
    )
    assert (figures["completed"], figures["failed"]) == (0, 6)
    assert figures["errors_by_kind"] == {
        "HTTP 503 overloaded": 2, "error in the stream engine_dead": 1, "BrokenConnectionError": 1,
        "malformed chunk": 1, "no complete stream": 1,
    }  # fmt: skip
    captured = capsys.readouterr()
    assert "2 x HTTP 503 overloaded: queue full" in captured.out
    assert captured.err.endswith("error: none of the 6 requests succeeded.\n")
    assert "Time to first token: none" in plot.read_text()


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_tokens_are_chunks_where_the_server_does_not_count(server: Any, bench: Any, backend: str) -> None:
    """Neither the mere role that some servers open with nor a mere end is a token; an empty text is one."""

    def answer(handler: Any, body: dict[str, Any]) -> None:
        if "messages" in body:
            parts = [
                {"delta": d} for d in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": ""}, {})
            ]
        else:
            parts = [{"text": text} for text in ("a", "", "")]
        handler.start_stream()
        for part in parts[:-1]:
            handler.send_event({"choices": [part]})
        handler.send_event({"choices": [{**parts[-1], "finish_reason": "stop"}]})
        handler.send_chunk(b"")

    server.answers[COMPLETIONS] = server.answers[CHAT] = answer
    figures = bench("--num-prompts", "1", "--random-input-len", "4", "--backend", backend)
    assert (figures["completed"], figures["total_output_tokens"]) == (1, 2)


def test_a_plot(server: Any, bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tell_vocabulary(server)
    path = tmp_path / "plot.svg"
    bench("--num-prompts", "2", "--random-input-len", "4", "--plot", str(path))
    drawing = ElementTree.parse(path).getroot()
    classes = {element.get("class") for element in drawing.iter("{http://www.w3.org/2000/svg}path")}
    assert {"first", "generating", "curve"} <= classes
    with pytest.raises(SystemExit, match="2"):
        bench("--num-prompts", "2", "--random-input-len", "4", "--plot", str(tmp_path))
    assert f"argument --plot: {tmp_path}: Is a directory\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--random-input-len", "400", "--random-output-len", "113"],
            "513 tokens do not fit in the server's max_model_",
        ),
        (["--dataset-path", "x"], "dataset_path needs dataset_name trace or custom"),
        (["--dataset-name", "trace"], "needs a dataset_path"),
        (["--dataset-name", "trace", "--dataset-path", "/gone"], "No such file"),
        (["--dataset-name", "custom", "--dataset-path", "x", "--random-input-len", "4"], "random_input_len needs"),
        (["--trace-scale", "2"], "trace_scale needs dataset_name trace"),
        (["--burstiness", "2"], "burstiness needs a request_rate"),
        (["--goodput", "speed:1"], "goodput must be ttft, tpot or e2el"),
        (["--goodput", "ttft:fast"], "goodput must be"),
        (["--metadata", "tp"], "metadata has a text without '='"),
        (["--request-rate", "0"], "request_rate must be a number, at least 1e-06, got 0.0"),
        (["--request-rate", "nan"], "request_rate must be a number"),
        (["--random-range-ratio", "1.5"], "random_range_ratio must be a number, from 0 to 1, got 1.5"),
        (["--base-url", "ftp://x"], "is no server's address"),
        (["--api-key", "k\u20acy"], "the API key holds what no header may"),
    ],
)
def test_flags_that_make_no_sense(
    server: Any, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_vocabulary(server)
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == 2
    assert message in capsys.readouterr().err
    assert server.bodies(COMPLETIONS) == []


def test_a_host_may_be_an_address_of_ipv6(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--host", "::1", "--port", "1", "--ready-check-timeout-sec", "0"]) == 1
    assert "http://[::1]:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--random-prefix-len", "40"], marks=pytest.mark.slow),
        pytest.param(["--random-range-ratio", "0.5"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("vocabulary", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_default_lengths_fit_a_short_context(
    server: Any, bench: Any, flags: list[str], vocabulary: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's is 512, and the defaults are a prompt of 1024 tokens and 128 to generate."""
    if vocabulary:
        tell_vocabulary(server)
    assert bench("--num-prompts", "9", *flags)["completed"] == 9
    assert "to fit in the server's max_model_len of 512." in capsys.readouterr().err
    lengths = [
        len(body["prompt"] if vocabulary else body["prompt"].split()) + body["max_tokens"]
        for body in server.bodies(COMPLETIONS)
    ]
    assert max(lengths) <= 512
    assert max(lengths) > 300


def test_no_server_and_a_server_that_refuses(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
    server.answers["/v1/models"] = lambda h, _: h.send_json(401, {"error": {"message": "a key is required"}})
    assert main(["bench", "serve", "--base-url", server.url]) == 1
    assert "wants another key (--api-key): a key is required" in capsys.readouterr().err
    server.answers["/v1/models"] = lambda h, _: h.send_json(200, {"data": []})
    assert main(["bench", "serve", "--base-url", server.url]) == 1
    assert "lists no model; name one" in capsys.readouterr().err


def test_ctrl_c_tells_what_is_known_so_far(
    server: Any, bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_vocabulary(server)

    def answer(handler: Any, body: dict[str, Any]) -> None:
        if len(server.bodies(COMPLETIONS)) < 3:
            return handler.stream(server.answer, chat=False)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        handler.start_stream()
        while True:
            handler.send_event({"choices": []})

    server.answers[COMPLETIONS] = answer
    assert bench("--num-prompts", "9", "--random-input-len", "4", "--max-concurrency", "1", code=130)["completed"] == 2
    assert server.broken.wait(5)


def test_ctrl_c_among_the_warmups_ends_it(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tell_vocabulary(server)

    def answer(handler: Any, body: dict[str, Any]) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        handler.start_stream()
        while True:
            handler.send_event({"choices": []})

    server.answers[COMPLETIONS] = answer
    flags = ["--num-prompts", "9", "--num-warmups", "2", "--max-concurrency", "1", "--random-input-len", "4"]
    assert main(["bench", "serve", "--base-url", server.url, *flags]) == 130
    assert len(server.bodies(COMPLETIONS)) == 1
    assert "Requests completed" not in capsys.readouterr().out
