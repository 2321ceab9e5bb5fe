"""`quire run-batch`: answers a file of requests in OpenAI's batch form, in this process and without HTTP.

The server's own services do the work. A line that is wrong gets an error as its answer, and the rest runs. Answers are
in the order of the requests, and memory holds a bounded number of them, however long the file is.
"""

import contextlib
import dataclasses
import os
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quire.entrypoints.cli.flags import add_engine_flags, add_option_flags, engine_args_from, options_given
from quire.entrypoints.cli.serve import refuse_swallowed_model
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, QuireError

if TYPE_CHECKING:
    from quire.entrypoints.server.state import ServerState

_SERVER_OPTIONS = {"served_model_name", "chat_template", "trust_request_chat_template", "response_role", "engine"}
_SERVER_OPTIONS |= {"return_tokens_as_token_ids", "tool_call_parser", "max_body_bytes", "enable_prompt_tokens_details"}
_SERVER_OPTIONS |= {"enable_auto_tool_choice", "reasoning_parser", "default_chat_template_kwargs", "step_timeout"}
_LINES_PER_SEQUENCE = 4  # requests at once, in terms of max_num_seqs: a slow first one must not leave the engine idle


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire run-batch`."""
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers, in the requests' order")
    add_option_flags(parser.add_argument_group("server options"), ServerArgs, only=_SERVER_OPTIONS)
    add_engine_flags(parser)
    parser.epilog = (
        'A request is {"custom_id": ..., "method": "POST", "url": "/v1/completions", "/v1/chat/completions", '
        '"/v1/embeddings", "/v1/score" or "/v1/rerank", "body": {...}}. "-" stands for standard input or output.'
    )


def run(namespace: Namespace) -> None:
    """Answer all requests of the file; what is interrupted leaves its answers in FILE.part, and goes on from there."""
    refuse_swallowed_model(namespace, given := options_given(namespace, ServerArgs))
    args, engine_args = ServerArgs(**given), engine_args_from(namespace)
    files = namespace.input_file, namespace.output_file
    if all(map(os.path.isfile, files)) and os.path.samefile(*files):
        raise ConfigError("--output-file is --input-file, whose place the answers would take: name another.")
    source, num_requests = _open_input(namespace.input_file, args.max_body_bytes)
    with _open_output(namespace.output_file) as sink:
        done = answered_before(source, sink, f"{namespace.output_file}.part") if namespace.output_file != "-" else []
        num_requests = None if num_requests is None else num_requests - len(done)
        import asyncio

        from quire.entrypoints.server.launch import check_chat_options, load, read_chat_template

        check_chat_options(args)
        template = read_chat_template(args.chat_template)
        state = load(dataclasses.replace(args, chat_template=template, log_level="warning"), engine_args)
        try:
            window = _LINES_PER_SEQUENCE * engine_args.max_num_seqs
            num_good, num_bad = asyncio.run(answer_all(Batch(state), source, sink, window, num_requests))
        finally:
            state.shutdown()
    told = f"{num_good + sum(done)} requests answered, {num_bad + len(done) - sum(done)} refused or failed."
    print(told, file=sys.stderr)


def answered_before(source: Iterator[bytes], sink: BinaryIO, name: str) -> list[bool]:
    """Whether each request that an earlier run answered went well; both files stand behind them afterwards.

    Raises:
        ConfigError: the answers in the file of this name are to other requests.
    """
    done: list[bool] = []
    position = 0
    for text in sink:
        try:
            answer = msgspec.json.decode(text[: text.index(b"\n")], type=Answer)
        except (msgspec.DecodeError, ValueError):  # it was being written
            break
        line = next((line for line in source if line.strip()), b"")
        if not line or answer.custom_id not in (None, _custom_id(line)):
            raise ConfigError(f"{name} holds answers to other requests: remove it, or name another --output-file.")
        done.append(_is_good(answer))
        position += len(text)
    sink.seek(position)
    sink.truncate()
    if done:
        print(f"going on after the {len(done)} answers in {name}.", file=sys.stderr)
    return done


def _custom_id(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)["custom_id"]
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError):
        return None


def _is_good(answer: "Answer") -> bool:
    return answer.response is not None and answer.response["status_code"] == 200


async def answer_all(
    batch: "Batch", source: Iterator[bytes], sink: BinaryIO, window: int, num_requests: int | None
) -> tuple[int, int]:
    """Answer the lines of `source` into `sink`, `window` of them at once; how many went well, and how many did not."""
    import asyncio

    from tqdm import tqdm

    statuses: list[bool] = []
    tasks: deque[asyncio.Task[Answer]] = deque()

    async def write_first() -> None:
        answer = await tasks[0]
        tasks.popleft()
        statuses.append(_is_good(answer))
        try:
            sink.write(msgspec.json.encode(answer) + b"\n")
            sink.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise QuireError(f"the answers can't be written: {error.strerror}.") from None

    with tqdm(total=num_requests, desc="Requests", unit="req", disable=None) as bar:
        try:
            while line := await _read_line(source):
                if line.strip():
                    tasks.append(asyncio.create_task(batch.answer(line)))
                    tasks[-1].add_done_callback(lambda _: bar.update())
                if len(tasks) >= window:
                    await write_first()
            while tasks:
                await write_first()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return sum(statuses), len(statuses) - sum(statuses)


async def _read_line(source: Iterator[bytes]) -> bytes:
    """The next line, or b"", while requests run: standard input may keep us waiting.

    It is read in a daemon thread, for which neither the loop nor the process waits when Ctrl-C ends the batch.
    """
    import asyncio
    from concurrent.futures import Future

    line: Future[bytes] = Future()

    def read() -> None:
        try:
            line.set_result(next(source, b""))
        except (OSError, ValueError) as error:
            line.set_exception(error)

    line.set_running_or_notify_cancel()
    Thread(target=read, daemon=True).start()
    return await asyncio.wrap_future(line)


class Request(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Answer(msgspec.Struct):
    """A line of the output: the response that a server would have given, or else why there is none."""

    id: str
    custom_id: str | None = None
    response: dict[str, Any] | None = None  # status_code, request_id and body
    error: dict[str, str] | None = None  # code and message


class Batch:
    """Answers lines by the server's services."""

    def __init__(self, state: "ServerState") -> None:
        from quire.entrypoints.server.chat_request import ChatCompletionRequest
        from quire.entrypoints.server.completion_request import CompletionRequest
        from quire.entrypoints.server.dialects.chat import read_chat
        from quire.entrypoints.server.dialects.completions import read_completion
        from quire.entrypoints.server.dialects.embeddings import read_embedding, read_scores
        from quire.entrypoints.server.embedding_request import EmbeddingRequest, RerankRequest, ScoreRequest
        from quire.entrypoints.server.event_service import EventService
        from quire.entrypoints.server.service import TurnService

        self._routes: dict[str, tuple[Callable[..., Any], Any]] = {
            "/v1/completions": (CompletionRequest.model_validate, TurnService(state, read_completion)),
            "/v1/chat/completions": (ChatCompletionRequest.model_validate, TurnService(state, read_chat)),
            "/v1/embeddings": (EmbeddingRequest.model_validate, EventService(state, read_embedding)),
            "/v1/score": (ScoreRequest.model_validate, EventService(state, read_scores)),
            "/v1/rerank": (RerankRequest.model_validate, EventService(state, read_scores)),
        }

    async def answer(self, line: bytes) -> Answer:
        """The answer to a line; EngineDeadError where the engine died."""
        from quire.entrypoints.server.body import decode_object
        from quire.entrypoints.server.errors import describe_end, error_body

        number = uuid.uuid4().hex
        answer = Answer(f"batch_req_{number}")
        try:
            value = decode_object(line)
            answer.custom_id = value["custom_id"] if isinstance(value.get("custom_id"), str) else None
            request = msgspec.convert(value, Request)
        except (InvalidRequestError, msgspec.ValidationError) as error:
            answer.error = {"code": "invalid_line", "message": f"this line is no request of a batch: {error}"}
            return answer
        try:
            status, body = 200, b"".join(await self._create(request, number))
        except EngineDeadError:
            raise
        except Exception as error:  # whatever it is, it is this request's alone
            info = describe_end(error)
            status, body = info.status, error_body(info)
        answer.response = {"status_code": status, "request_id": number, "body": msgspec.Raw(body)}
        return answer

    async def _create(self, request: Request, request_id: str) -> list[bytes]:
        if request.method != "POST" or request.url not in self._routes:
            urls = ", ".join(self._routes)
            raise InvalidRequestError(f"a batch takes POST to {urls}, not {request.method} to {request.url}.", "url")
        validate, service = self._routes[request.url]
        if (body := validate(request.body)).stream:
            raise InvalidRequestError("a batch can't stream: leave out stream.", "stream")
        return await service.create(body, request_id)


def _open_input(name: str, longest: int) -> tuple[Iterator[bytes], int | None]:
    """The requests, a line each, and how many they are where that can be known: a pipe can't be read twice."""
    try:
        # Not sys.stdin, whose lock a waiting reader would hold when the process ends.
        file = open(0, "rb", closefd=False) if name == "-" else open(name, "rb")  # noqa: SIM115  (the process closes it)
        if name == "-" or not os.path.isfile(name):
            return _lines(file, longest), None
        num_requests = sum(1 for line in _lines(file, longest) if line.strip())
        file.seek(0)
    except OSError as error:
        raise ConfigError(f"--input-file {name}: {error.strerror}.") from None
    return _lines(file, longest), num_requests


def _lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """Those of a file, which has no end where it is a device: a ConfigError at one that is longer."""
    while line := file.readline(longest + 1):
        if len(line) > longest:
            raise ConfigError(f"--input-file has a line of over {longest} bytes, the most that max_body_bytes allows.")
        yield line.removeprefix(b"\xef\xbb\xbf")  # which editors of Windows begin a file with


@contextlib.contextmanager
def _open_output(name: str) -> Iterator[BinaryIO]:
    """Where answers go. A file has its name only once it is complete; until then, and after a failure, NAME.part."""
    if name == "-":
        yield sys.stdout.buffer
        return
    if os.path.exists(name or ".") and not os.path.isfile(name):  # a device would be replaced in the end
        raise ConfigError(f"--output-file {name!r} is no file; name one, or - for standard output.")
    part = Path(f"{name}.part")
    try:
        file = part.open("r+b" if part.exists() else "w+b")
    except OSError as error:
        raise ConfigError(f"--output-file {name}: {error.strerror}.") from None
    try:
        os.lockf(file.fileno(), os.F_TLOCK, 0)
    except BlockingIOError:
        raise ConfigError(f"--output-file {name}: another run writes it.") from None
    except OSError:
        pass  # a file system without locks
    try:
        with file:
            yield file
    except BaseException:
        told = f"the answers so far are in {part}; the same command goes on from there."
        print(told, file=sys.stderr) if part.stat().st_size else part.unlink()
        raise
    os.replace(part, name)
