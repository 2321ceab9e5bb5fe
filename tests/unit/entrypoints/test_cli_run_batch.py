"""`quire run-batch`: lines in, lines out, whatever is wrong with some of them; once with a model, else without."""

import asyncio
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.entrypoints.cli import run_batch
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.run_batch import Answer, Batch, answer_all
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, QuireError


class FakeService:
    """In the place of all services: answers with the id of the request, or fails as the test says."""

    def __init__(self, state: Any, read: Any) -> None:
        self._fail: Callable[[Any], None] = state

    async def create(self, body: Any, request_id: str) -> Any:
        self._fail(body)
        return [msgspec.json.encode({"id": request_id, "model": body.model})]


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    """A batch with fake services: the model "broken" breaks, "refused" is refused, "deadly" kills the engine."""

    def fail(body: Any) -> None:
        match body.model:
            case "broken":
                raise ZeroDivisionError
            case "refused":
                raise InvalidRequestError("no.", "model")
            case "deadly":
                raise EngineDeadError("the engine died.")

    for name in ("service.TurnService", "event_service.EventService"):
        monkeypatch.setattr(f"quire.entrypoints.server.{name}", FakeService)
    return Batch(fail)  # type: ignore[arg-type]


def line(custom_id: str, url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    bodies = {"/v1/completions": {"model": "m", "prompt": "x"}, "/v1/embeddings": {"input": ["x"]}}
    bodies |= {"/v1/score": {"text_1": "x", "text_2": ["y"]}, "/v1/rerank": {"query": "x", "documents": ["y"]}}
    body = bodies.get(url, question)
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


def answer(batch: Batch, value: Any) -> dict[str, Any]:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return json.loads(msgspec.json.encode(asyncio.run(batch.answer(content))))


def test_an_answer(batch: Batch) -> None:
    for url in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/v1/rerank"):
        found = answer(batch, line("a", url))
        assert found["id"].startswith("batch_req_")
        assert (found["custom_id"], found["error"], found["response"]["status_code"]) == ("a", None, 200)
        assert found["response"]["body"]["id"] == found["response"]["request_id"]


@pytest.mark.parametrize(
    ("value", "status", "message", "param"),
    [
        (line("a", body={"prompt": "x", "model": "refused"}), 400, "no.", "model"),
        (line("a", body={"prompt": "x", "model": "broken"}), 500, "internal error", None),
        (line("a", body={"prompt": "x", "temperature": 9}), 400, "temperature", "temperature"),
        (line("a", body={"prompt": "x", "stream": True}), 400, "can't stream", "stream"),
        (line("a", "/v1/chat/completions", body={}), 400, "messages", "messages"),
        (line("a", "/v1/messages"), 400, "a batch takes POST to /v1/completions, /v1/chat", "url"),
        (line("a", method="GET"), 400, "not GET to /v1/completions", "url"),
    ],
)
def test_a_refused_request(batch: Batch, value: Any, status: int, message: str, param: str | None) -> None:
    found = answer(batch, value)
    response = found["response"]
    assert (found["custom_id"], found["error"], response["status_code"]) == ("a", None, status)
    assert message in response["body"]["error"]["message"]
    assert response["body"]["error"]["param"] == param


@pytest.mark.parametrize(
    ("value", "custom_id"),
    [
        (b"{", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        ([1], None),
        ({}, None),
        ({"custom_id": "a"}, "a"),
        (line("a", body=[]), "a"),
        (line(7), None),  # type: ignore[arg-type]
    ],
)
def test_a_line_that_is_no_request(batch: Batch, value: Any, custom_id: str | None) -> None:
    found = answer(batch, value)
    assert (found["custom_id"], found["response"]) == (custom_id, None)
    assert found["error"]["code"] == "invalid_line"
    assert found["error"]["message"].startswith("this line is no request of a batch: ")


class SlowFirst:
    """Answers later lines earlier, and knows how many were under way at most."""

    def __init__(self, release_at: int) -> None:
        self.release_at = release_at
        self.running = self.most = 0
        self.released = asyncio.Event()

    async def answer(self, line: bytes) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        number = int(line)
        if number == self.release_at:
            self.released.set()
        if number == 0:
            await self.released.wait()
        await asyncio.sleep(0)
        self.running -= 1
        return Answer(line.decode().strip(), response={"status_code": 200 if number else 400})


def test_answers_come_in_order_and_a_bounded_number_is_held() -> None:
    async def check() -> None:
        lines, sink, batch = b"\n".join(b"%d" % n for n in range(50)) + b"\n\n", io.BytesIO(), SlowFirst(9)
        counts = await answer_all(batch, io.BytesIO(lines), sink, 10, None)  # type: ignore[arg-type]
        assert [json.loads(text)["id"] for text in sink.getvalue().splitlines()] == [str(n) for n in range(50)]
        assert counts == (49, 1)
        assert batch.most <= 10

    asyncio.run(asyncio.wait_for(check(), 20))


def test_a_dead_engine_ends_the_batch(batch: Batch) -> None:
    lines = [line("a"), line("b", body={"prompt": "x", "model": "deadly"}), line("c")]
    source, sink = io.BytesIO("\n".join(map(json.dumps, lines)).encode()), io.BytesIO()
    with pytest.raises(EngineDeadError):
        asyncio.run(answer_all(batch, source, sink, 4, 3))
    assert [json.loads(text)["custom_id"] for text in sink.getvalue().splitlines()] == ["a"]


def test_a_full_disk(batch: Batch) -> None:
    class FullDisk(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    source = io.BytesIO(json.dumps(line("a")).encode())
    with pytest.raises(QuireError, match=r"can't be written: No space left"):
        asyncio.run(answer_all(batch, source, FullDisk(), 4, 1))


def test_the_output_has_its_name_when_it_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def write(content: bytes, error: BaseException | None) -> None:
        with run_batch._open_output(str(path)) as sink:
            sink.write(content)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write(b"half", KeyboardInterrupt())
    assert (path.read_text(), (tmp_path / "out.part").read_text()) == ("old", "half")
    told = f"the answers so far are in {path}.part; the same command goes on from there.\n"
    assert capsys.readouterr().err == told
    write(b"whole", None)
    assert path.read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    code = "import sys; from quire.entrypoints.cli import run_batch; run_batch._open_output(sys.argv[1]).__enter__()"
    with run_batch._open_output(str(tmp_path / "out")) as sink:
        sink.write(b"one")
        other = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True, check=False
        )
        assert other.stderr.endswith(f"ConfigError: --output-file {tmp_path / 'out'}: another run writes it.\n")
    assert (tmp_path / "out").read_bytes() == b"one"


def test_a_file_system_may_have_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*given: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "lockf", lockf)
    with run_batch._open_output(str(tmp_path / "out")) as sink:
        sink.write(b"one")
    assert (tmp_path / "out").read_bytes() == b"one"


def test_nothing_is_left_where_nothing_was_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text("{}\n")
    flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--engine", "thread"]
    assert main(["run-batch", str(tmp_path / "gone"), *flags]) == 1
    assert capsys.readouterr().err.endswith("gone' does not exist; check the path.\n")
    assert "answers so far" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def _resume(requests: list[Any], part: bytes) -> tuple[list[bool], bytes, bytes]:
    """What was answered, the requests that are left, and the answers that are kept."""
    source, sink = io.BytesIO("\n\n".join(map(json.dumps, requests)).encode()), io.BytesIO(part)
    done = run_batch.answered_before(source, sink, "out.part")
    return done, source.read(), sink.getvalue()


def _answers(*answers: Answer) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in answers)


def test_a_batch_goes_on_after_the_answers_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    requests = [line("a"), {"nonsense": 1}, line("c"), line("d")]
    kept = _answers(
        Answer("1", "a", response={"status_code": 200}), Answer("2", error={}), Answer("3", "c", {"status_code": 400})
    )
    done, left, answers = _resume(requests, kept + _answers(Answer("4", "d"))[:-9])
    assert (done, answers) == ([True, False, False], kept)
    assert json.loads(left)["custom_id"] == "d"
    assert capsys.readouterr().err == "going on after the 3 answers in out.part.\n"
    assert _resume(requests, b"")[0] == []
    assert capsys.readouterr().err == ""


def test_an_answer_without_its_end_of_line_is_asked_for_again() -> None:
    """A disk may be full after any byte; the next answer would stand in the same line."""
    kept = _answers(Answer("1", "a", response={"status_code": 200}))
    done, left, answers = _resume([line("a"), line("b")], kept + _answers(Answer("2", "b"))[:-1])
    assert (done, answers, json.loads(left)["custom_id"]) == ([True], kept, "b")


def test_what_nobody_expected_is_logged(batch: Batch, caplog: pytest.LogCaptureFixture) -> None:
    """The answer says that the log has it; what is wrong with a request is no one's to log."""
    answer(batch, line("a", body={"prompt": "x", "model": "refused"}))
    answer(batch, line("a", body={"prompt": "x", "temperature": 9}))
    assert caplog.records == []
    answer(batch, line("a", body={"prompt": "x", "model": "broken"}))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("ids", [["b"], ["a", "b", "c"]])
def test_answers_to_other_requests_are_left_alone(ids: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"out.part holds answers to other requests: remove it"):
        _resume([line("a"), line("b")], _answers(*(Answer(each, each) for each in ids)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "/gone/in", "-o", "-"], "--input-file /gone/in: No such file"),
        (["-i", "/dev/null", "-o", "/gone/out"], "--output-file /gone/out: No such file"),
        (["-i", "/dev/null", "-o", "/"], "--output-file '/' is no file; name one, or - for standard output."),
        (["-i", "/dev/null", "-o", ""], "--output-file '' is no file; name one, or - for standard output."),
        (["-i", "-", "-o", "-", "--max-num-seqs", "0"], "max_num_seqs must be an integer, from 1 to 100000"),
        (["-i", "-", "-o", "-", "--reasoning-parser", "qwen4"], "reasoning_parser 'qwen4' is no parser. Did you mean"),
        (["-i", "-", "-o", "-", "--response-role", ""], "response_role must not be empty"),
        (
            ["-i", "-", "-o", "-", "--served-model-name", "gpt", "owner/model"],
            "--served-model-name took 'owner/model', which looks like the model: give the model before",
        ),
    ],
)
def test_what_is_wrong_shows_before_a_model_is_loaded(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run-batch", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("whole", [False, True])
def test_an_input_without_an_end(whole: bool, tmp_path: Path) -> None:
    """A line that a server would not take is refused, before the model is loaded where the file can be read twice."""
    (tmp_path / "in").write_bytes(b"{}\n\n" + bytes(1001))
    with pytest.raises(ConfigError, match="line of over 1000 bytes, the most that max_body_bytes allows"):
        list(run_batch._open_input(str(tmp_path / "in") if whole else "/dev/zero", 1000)[0])


def test_devices_and_pipes_are_read_but_once(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("one\n\ntwo")
    lines, count = run_batch._open_input(str(tmp_path / "in"), 4)
    assert (list(lines), count) == ([b"one\n", b"\n", b"two"], 2)
    reader, writer = os.pipe()
    os.write(writer, b"one\n\ntwo")
    os.close(writer)
    lines, count = run_batch._open_input(f"/dev/fd/{reader}", 4)
    assert (list(lines), count) == ([b"one\n", b"\n", b"two"], None)
    os.close(reader)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text("{}\n{}\n", encoding="utf-8-sig")
    lines, num_requests = run_batch._open_input(str(path), 100)
    assert (list(lines), num_requests) == ([b"{}\n"] * 2, 2)


def test_requests_are_not_replaced_by_their_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "batch.jsonl").write_text("{}\n")
    (tmp_path / "link").symlink_to(path)
    assert main(["run-batch", "-i", str(path), "-o", str(tmp_path / "link"), "--load-format", "dummy"]) == 2
    assert "--output-file is --input-file" in capsys.readouterr().err
    assert path.read_text() == "{}\n"


def test_a_device_is_not_replaced_by_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As /dev/null or /dev/stdout might be, by root; a pipe stands for them here."""
    os.mkfifo(tmp_path / "pipe")
    assert main(["run-batch", "-i", "/dev/null", "-o", str(tmp_path / "pipe"), "--load-format", "dummy"]) == 2
    assert f"--output-file '{tmp_path}/pipe' is no file; name one" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.slow
def test_with_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = [
        line("one", body={"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}),
        line("bad", body={"prompt": "x", "model": "other"}),
        line("chat", "/v1/chat/completions", body={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
        line("vector", "/v1/embeddings", body={"input": "Hi", "dimensions": 3}),
        line("score", "/v1/score", body={"text_1": "Hi", "text_2": ["Hi", "Ho"]}),
        line("rank", "/v1/rerank", body={"query": "Hi", "documents": ["Ho", "Hi"], "top_n": 1}),
        *(line(str(n), body={"prompt": f"{n}", "max_tokens": n % 7 + 1, "ignore_eos": True}) for n in range(40)),
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, requests)) + "\nnonsense\n")
    flags = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--engine", "thread", "--max-num-seqs", "4"]
    assert main(["run-batch", "demo", *flags]) == 0
    answers = [json.loads(text) for text in (tmp_path / "out").read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == [r["custom_id"] for r in requests] + [None]
    statuses = [a["response"]["status_code"] for a in answers[:-1]]
    assert statuses == [404 if r["custom_id"] == "bad" else 200 for r in requests]
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert answers[2]["response"]["body"]["object"] == "chat.completion"
    assert len(answers[3]["response"]["body"]["data"][0]["embedding"]) == 3
    assert answers[4]["response"]["body"]["data"][0]["score"] == pytest.approx(1.0)
    assert [result["index"] for result in answers[5]["response"]["body"]["results"]] == [1]
    assert [a["response"]["body"]["usage"]["completion_tokens"] for a in answers[6:-1]] == [
        n % 7 + 1 for n in range(40)
    ]
    assert capsys.readouterr().err.endswith("45 requests answered, 2 refused or failed.\n")
