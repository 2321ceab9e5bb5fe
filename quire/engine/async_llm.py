"""The engine for an event loop: any number of requests at once, each an async iterator of its outputs.

The HTTP server drives it, and so do users with a loop of their own. It joins the input processor, a client of the
engine core (in its own process, or in a thread) and the output processor. All of it runs on one event loop, except for
what takes long for a single request (encoding a long prompt, rendering a template), which goes to threads.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.engine.chat_template import ChatTemplate
from quire.engine.core_messages import (
    Abort,
    Add,
    Call,
    CallName,
    CoreClient,
    Dead,
    Event,
    Finish,
    News,
    Ready,
    Refused,
    Reply,
)
from quire.engine.core_process import ProcessClient
from quire.engine.core_thread import ThreadClient
from quire.engine.input_processor import InputProcessor, ProcessedInput, PromptType
from quire.engine.output_processor import OutputProcessor
from quire.engine.output_stream import OutputStream
from quire.engine.template_process import TemplateProcess
from quire.engine.tokenizer import Tokenizer, config_tokenizer
from quire.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotYetSupportedError,
    OverloadedError,
    RequestFailedError,
)
from quire.metrics.recorder import ServingMetrics
from quire.metrics.stats import EngineSnapshot, EngineStats
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger("quire")

_SHORT = 2000  # characters or ids of a prompt that are handled on the event loop: less work than going to a thread
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class AsyncOptions:
    """How `AsyncLLM` runs its engine."""

    engine: Literal["process", "thread"] = "process"
    max_num_queued_reqs: int | None = None  # requests that may wait while others run; None: no limit
    log_level: str = "info"  # of the engine's process
    step_timeout: float = 600.0  # seconds in one step, or without a sign of life, after which the engine counts as dead


class AsyncLLM:
    """An engine for asyncio. Make one with `from_engine_args`; use it from one event loop.

    Attributes:
        config: options and model, with the context that the KV cache turned out to hold.
        tokenizer: the model's, or None with skip_tokenizer_init.
        metrics: counts and times what happens to requests.
        num_blocks: KV blocks of the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: CoreClient,
        ready: Ready,
        tokenizer: Tokenizer | None,
        options: AsyncOptions,
    ) -> None:
        self.config = config = config.with_max_model_len(ready.max_model_len)
        self.tokenizer = tokenizer
        self.metrics = ServingMetrics()
        self.num_blocks = ready.num_blocks
        self._client, self._options = client, options
        self._inputs = InputProcessor(config, tokenizer)
        self._outputs = OutputProcessor(tokenizer, with_metrics=not config.args.disable_log_stats)
        self._streams: dict[str, OutputStream] = {}  # by internal id, as all that follow
        self._external: dict[str, str] = {}  # -> the caller's id
        self._queued: set[str] = set()  # not yet part of a step
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._stats = EngineStats(0, 0, 0.0, 0, 0, 0, {})
        self._threads = ThreadPoolExecutor(2, "quire-input")
        self._templates = TemplateProcess()
        self._death: asyncio.Future[EngineDeadError] | None = None
        self._dead: EngineDeadError | None = None
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, options: AsyncOptions | None = None) -> "AsyncLLM":
        """Start the engine and wait until its model is loaded.

        Raises:
            ConfigError, NotYetSupportedError: the options.
            ModelLoadError: the model's or the tokenizer's files.
            EngineDeadError: the engine's process ended while loading.
        """
        options = options or AsyncOptions()
        config = engine_args.resolve()
        thread = options.engine == "thread"
        client: CoreClient = ThreadClient(config) if thread else ProcessClient(engine_args, options.log_level)
        try:
            tokenizer = config_tokenizer(config)  # while the engine's process loads the model
            return cls(config, client, client.wait_ready(), tokenizer, options)
        except BaseException:
            client.close()
            raise

    @property
    def model_config(self) -> Any:
        """The model's facts (`ModelConfig`)."""
        return self.config.model

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output is still to come."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests of which nothing has been computed yet."""
        return len(self._queued)

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._dead is not None

    def stats(self) -> EngineStats:
        """The engine's counters and gauges, as of its last step."""
        return self._stats

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self.config.default_sampling_params()

    # Requests.

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: Any = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its outputs as they come, the last one `finished`.

        What each holds is for `sampling_params.output_kind` to say; outputs that the caller is too slow for are merged.
        Leaving the iterator early (break, aclose, cancellation) aborts the request.

        Args:
            request_id: shown in outputs and logs, and keys the random numbers of a request without a seed; ids need
                not be unique. A number by default.
            arrival_time: in seconds of `time.monotonic`; now by default.

        Raises:
            InvalidRequestError: the prompt or a parameter breaks a rule, or the request can never fit.
            OverloadedError: as many requests as allowed are queued.
            RequestFailedError: the engine could not compute this request.
            EngineDeadError: the engine is dead, or died meanwhile.
        """
        self._attach()
        if lora_request is not None:
            raise NotYetSupportedError("lora_request is not supported yet; leave it None.")
        if sampling_params.logits_processors and self._options.engine == "process":
            raise InvalidRequestError(
                'logits_processors are Python functions, which only AsyncOptions(engine="thread") can call.',
                "logits_processors",
            )
        self._check_queue()
        number = next(self._ids)
        external = str(number) if request_id is None else request_id
        internal = f"{external}#{number}"
        stream = OutputStream(merge=sampling_params.output_kind == RequestOutputKind.DELTA)
        self._streams[internal], self._external[internal] = stream, external
        self._queued.add(internal)
        finished = False
        try:
            await self._submit(internal, external, prompt, sampling_params, arrival_time, priority)
            while not finished:
                output = await stream.get()
                finished = output.finished
                if finished and any(part.finish_reason == "error" for part in output.outputs):
                    raise RequestFailedError("the engine failed to compute this request; the server's log says why.")
                output.request_id = external
                yield output
        finally:
            self._close(internal, abort=not finished)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now; their iterators yield one last output ("abort"). Unknown ids are ignored."""
        wanted = {request_id} if isinstance(request_id, str) else set(request_id)
        internal = [own for own, external in self._external.items() if external in wanted]
        if internal and self._dead is None:
            self._client.send(Abort(internal))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a long one is encoded in a thread."""
        tokenizer = self._tokenizer_or_refuse()
        return await self._run(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def render_chat(
        self,
        messages: Any,
        *,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        trusted: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, by the model's template or by the one given.

        A template that is not `trusted` is rendered in a process that is killed when it takes too long.

        Raises:
            InvalidRequestError: bad messages, no template, the template's own complaint, or its bounds overstepped.
        """
        tokenizer = self._tokenizer_or_refuse()
        template = ChatTemplate.for_tokenizer(tokenizer, chat_template)
        options: dict[str, Any] = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        if chat_template is not None and not trusted:
            text = template.select(tools)
            return await self._in_thread(
                lambda: self._templates.render(text, tokenizer.special_tokens_map, messages, options)
            )
        return await self._in_thread(lambda: template.render(messages, **options))

    # The engine.

    async def check_health(self) -> None:
        """EngineDeadError when the engine is dead."""
        self._attach()

    async def wait_dead(self) -> EngineDeadError:
        """Wait for the engine's end, and return its reason."""
        if self._dead is not None:
            return self._dead
        self._attach()
        assert self._death is not None
        return await asyncio.shield(self._death)

    async def snapshot(self) -> EngineSnapshot:
        """The engine's sequences and blocks at this moment."""
        snapshot: EngineSnapshot = await self._call("snapshot")
        for sequence in snapshot.sequences:
            sequence.request_id = self._external.get(sequence.request_id, sequence.request_id)
        return snapshot

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests hold blocks."""
        return await self._call("reset_prefix_cache")

    async def check_integrity(self) -> None:
        """Raise RequestFailedError when the engine's state is inconsistent; for tests."""
        await self._call("check_integrity")

    def shutdown(self) -> None:
        """End the engine; requests that are left end with EngineDeadError. Safe to call twice."""
        if self._dead is None:
            self._end_all(EngineDeadError("the engine was shut down."))
        if self._watcher is not None:
            self._watcher.cancel()
        self._client.close()
        self._templates.close()
        self._threads.shutdown(wait=False)

    # On the way down.

    def _attach(self) -> None:
        """Join the running event loop, once; refuse when the engine is dead."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._death is None:
            loop = asyncio.get_running_loop()
            self._death = loop.create_future()
            self._client.attach(self._on_event)
            self._watcher = loop.create_task(self._watch())

    def _check_queue(self) -> None:
        limit, queued = self._options.max_num_queued_reqs, len(self._queued)
        if limit is None or queued < limit:
            return
        # Where nothing waits in the engine, some of those queued are about to run.
        places = self.config.args.max_num_seqs - (len(self._streams) - queued)
        if queued >= limit + (0 if self._stats.num_requests_waiting else max(0, places)):
            raise OverloadedError(f"{queued} requests are queued already, and {limit} may be; try again later.")

    async def _submit(
        self,
        internal: str,
        external: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None,
        priority: int,
    ) -> None:
        arrival = time.monotonic() if arrival_time is None else arrival_time
        size = len(prompt) if isinstance(prompt, str | list) else sum(len(v) for v in prompt.values() if v)  # type: ignore[arg-type]
        processed: ProcessedInput = await self._run(
            size, lambda: self._inputs.process(external, prompt, params, arrival, priority).renamed(internal)
        )
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        request = processed.request
        self._outputs.add(processed)
        self.metrics.on_arrival(internal, len(request.prompt_token_ids), request.max_tokens, params.n, arrival)
        self._client.send(Add(request))

    def _close(self, internal: str, abort: bool) -> None:
        del self._streams[internal], self._external[internal]
        self._queued.discard(internal)
        if internal in self._outputs:
            self._outputs.discard(internal)
            self.metrics.on_finished(internal, ["abort"], 0, time.monotonic())
            if abort and self._dead is None:
                self._client.send(Abort([internal]))

    async def _run(self, size: int, function: Callable[[], _Result]) -> _Result:
        return function() if size <= _SHORT else await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def _call(self, name: CallName) -> Any:
        self._attach()
        call_id = next(self._ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._client.send(Call(call_id, name))
        try:
            return await future
        finally:
            del self._calls[call_id]

    def _tokenizer_or_refuse(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError("text needs a tokenizer, but skip_tokenizer_init=True; pass token ids.", "prompt")
        return self.tokenizer

    # On the way up.

    def _on_event(self, event: Event) -> None:
        if event.__class__ is News:
            self._take_in(event)  # type: ignore[arg-type]
        elif isinstance(event, Refused):
            self._refuse(event)
        elif isinstance(event, Reply):
            future = self._calls.get(event.call_id)
            if future is not None and not future.done():
                if event.error is None:
                    future.set_result(event.value)
                else:
                    future.set_exception(RequestFailedError(event.error))
        elif isinstance(event, Dead):
            self._die(event.message)

    def _take_in(self, news: News) -> None:
        """A step's news: text for everyone who waits, and sequences that a stop string ended."""
        self._stats = news.stats
        metrics, now = self.metrics, time.monotonic()
        metrics.on_engine_stats(news.stats)
        if news.scheduled:
            self._outputs.note_scheduled(news.scheduled, news.start)
            self._queued.difference_update(news.scheduled)
            for request_id in news.scheduled:
                metrics.on_scheduled(request_id, news.start)
        for item in news.outputs:
            if item.new_token_ids and item.request_id in self._outputs:
                metrics.on_tokens(item.request_id, item.sequence_index, len(item.new_token_ids), now)
        processed = self._outputs.process(news.outputs)
        if processed.stopped:
            self._client.send(Finish(processed.stopped))
        for output in processed.outputs:
            if output.finished:
                reasons = [part.finish_reason or "abort" for part in output.outputs]
                metrics.on_finished(output.request_id, reasons, output.num_cached_tokens or 0, now)
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def _refuse(self, event: Refused) -> None:
        stream = self._streams.get(event.request_id)
        if event.request_id in self._outputs:
            self._outputs.discard(event.request_id)
            self.metrics.on_finished(event.request_id, ["error"], 0, time.monotonic())
        if stream is not None and event.message is not None:
            stream.fail(InvalidRequestError(event.message, event.param, event.code))
        elif stream is not None:
            stream.fail(RequestFailedError("the engine failed to take this request; the server's log says why."))

    async def _watch(self) -> None:
        """Declare an engine dead that hangs."""
        limit = self._options.step_timeout
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            if self._client.seconds_stuck() > limit:
                self._die(f"it gave no sign of life for {limit:g} s")
                await self._in_thread(self._client.close)

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._end_all(EngineDeadError(f"the engine is dead: {reason}."))
            logger.error("%s", self._dead)

    def _end_all(self, error: EngineDeadError) -> None:
        """Tell everyone who waits, and whoever comes later."""
        self._dead = error
        for stream in self._streams.values():
            stream.fail(EngineDeadError(str(error)))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        if self._death is not None and not self._death.done() and not self._death.get_loop().is_closed():
            self._death.set_result(error)


AsyncLLMEngine = AsyncLLM  # vLLM's older name
