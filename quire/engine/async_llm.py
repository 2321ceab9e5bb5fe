"""The engine for an event loop: any number of requests at once, each an async iterator of its outputs.

The HTTP server drives it, and so do users with a loop of their own. It joins the input processor, a client of the
engine core (in its own process, or in a thread) and the output processor, on one event loop.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.config.options import check_kind
from quire.engine.admission import Admission
from quire.engine.async_inputs import AsyncInputs
from quire.engine.async_options import AsyncOptions
from quire.engine.clients.select import start_client
from quire.engine.input_processor import ProcessedInput
from quire.engine.monitor import Monitor
from quire.engine.observer import Observer
from quire.engine.output_processor import OutputProcessor, RequestRecord
from quire.engine.output_stream import OutputStream
from quire.errors import EngineDeadError, InvalidRequestError, RequestFailedError, require
from quire.inputs import PreparedPrompt, PromptType
from quire.lora.request import AdapterRequest, PromptAdapterRequest, one_adapter
from quire.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.protocol.cache import PinnedPrefix
from quire.protocol.core import Abort, Add, Call, CallName, CoreClient, Dead, Event, Finish, News, Ready, Refused, Reply
from quire.protocol.requests import Terms
from quire.protocol.stats import EngineSnapshot, EngineStats, Limits
from quire.protocol.step import SequenceOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.scheduler.live_limits import limits_of
from quire.text.configured import Tokenizer, config_tokenizer
from quire.utils.logs import quoted
from quire.utils.values import strings

_Prompt = PromptType | PreparedPrompt
Starter = Callable[[EngineArgs, EngineConfig, AsyncOptions], CoreClient]
_MODES = ("abort", "wait", "keep")  # what becomes of requests that run
_LONGEST_ID = 64  # characters of a caller's id that the engine's own has
_PROMPT_ALONE: Any = PoolingParams()  # a request for the sake of its prompt, of any model
_FAILED = "the engine failed to compute this request; the server's log says why."


class AsyncLLM:
    """An engine for asyncio. Make one with `from_engine_args`; use it from one event loop.

    Attributes:
        config: options and model, with the context that the KV cache turned out to hold.
        model_config: the model's part of it.
        tokenizer: the model's, or None with skip_tokenizer_init.
        prepare, token_ids, render_chat, find_adapter: see `AsyncInputs`.
        find_adapter_now: the same as find_adapter, for where no loop runs yet.
        observer: is told what happens to requests; the server puts one of its own here.
        num_blocks: KV blocks of the engine.
        client: what stands for the engine here.
        limits: the scheduler's limits and its policy, as they were last set.
    """

    def __init__(
        self, config: EngineConfig, client: CoreClient, ready: Ready, tokenizer: Tokenizer | None, options: AsyncOptions
    ) -> None:
        self.config = config = config.with_max_model_len(ready.max_model_len)
        self.model_config, self.tokenizer = config.model, tokenizer
        self.observer, self.num_blocks = Observer(), ready.num_blocks
        self.client = client
        self._inputs = inputs = AsyncInputs(config, tokenizer, options.engine == "thread")
        self.prepare, self.token_ids, self.render_chat = inputs.prepare, inputs.token_ids, inputs.render_chat
        self.find_adapter, self.find_adapter_now = inputs.find_adapter, inputs.processor.adapters.find
        self._outputs = OutputProcessor(tokenizer, config.args)
        self._streams: dict[str, OutputStream] = {}  # by internal id, as all that follow
        self._external: dict[str, str] = {}  # -> the caller's id
        self._fresh: list[OutputStream] = []  # whose readers are to be woken
        self._admission = Admission(options.max_num_queued_reqs)
        self._aborted_early: set[str] = set()  # while their prompts are encoded: the engine has not heard of them yet
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.limits = limits_of(config.scheduler, config.scheduler)
        self._stats = EngineStats(limits=self.limits)
        self._monitor = Monitor(client, options.step_timeout, self._on_event, self._end_all)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, options: AsyncOptions | None = None, start: Starter | None = None
    ) -> "AsyncLLM":
        """Start the engine and wait until its model is loaded.

        Args:
            start: what starts it, called with arguments, configuration and options; one process or thread by default.
                `quire.entrypoints.server.replicas.ReplicasClient` starts data_parallel_size engines.

        Raises:
            ConfigError, NotYetSupportedError: the options.
            ModelLoadError: the model's or the tokenizer's files.
            EngineDeadError: the engine's process ended while loading.
        """
        check_kind("engine_args", engine_args, EngineArgs)
        check_kind("options", options := options or AsyncOptions(), AsyncOptions)
        config = engine_args.resolve()
        client = (start or start_client)(engine_args, config, options)
        try:
            tokenizer = config_tokenizer(config)  # while the engine's process loads the model
            return cls(config, client, client.wait_ready(), tokenizer, options)
        except BaseException:
            client.close()
            raise

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output is still to come."""
        return len(self._streams)

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._monitor.dead is not None

    def stats(self) -> EngineStats:
        """The engine's counters and gauges, as of its last step."""
        return self._stats

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self.config.default_sampling_params()

    # Requests.

    async def generate(
        self,
        prompt: _Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: AdapterRequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        arrival_time: float | None = None,
        client: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its outputs as they come, the last one `finished`.

        What each holds is for the parameters' `output_kind` to say; outputs that the caller is too slow for are merged.
        Leaving the iterator early (break, aclose, cancellation) aborts the request.

        Args:
            sampling_params: the model's defaults if None; a prepared prompt has its own, and nothing is to be passed.
            request_id: shown in outputs and (quoted) in logs, and keys the random numbers of a request without a seed;
                ids need not be unique. A number by default.
            priority: lower runs first, under scheduling_policy="priority".
            lora_request, prompt_adapter_request: the adapter to run it with; the first one takes either kind.
            arrival_time: see `LLMEngine.add_request`.
            client, ttft_target, tpot_target: likewise.

        Raises:
            InvalidRequestError: the prompt or a parameter breaks a rule, it can never fit, or it masks every token.
            OverloadedError: as many requests as allowed are queued, or its targets can't be met now.
            RequestFailedError: the engine could not compute this request.
            EngineDeadError: the engine is dead, or died meanwhile.
        """
        adapter = await self.find_adapter(one_adapter(lora_request, prompt_adapter_request))
        terms = Terms(priority, client, ttft_target, tpot_target, adapter)
        async with self.open(prompt, sampling_params, request_id, terms, arrival_time) as stream:
            while not (output := await stream.get()).finished:
                yield output
            yield output

    @asynccontextmanager
    async def open(
        self, prompt: _Prompt, params: SamplingParams | None, request_id: str | None, terms: Terms, came: float | None
    ) -> AsyncGenerator[OutputStream, None]:
        """The same for those who read the outputs' stream themselves; leaving the context early aborts the request."""
        self._monitor.attach()
        self.check_room()
        number, now = next(self._ids), time.monotonic()
        external = str(number) if request_id is None else request_id
        # What a stranger may have named is in the engine's logs under this id: made harmless, and cut.
        internal = f"{quoted(str(external)[:_LONGEST_ID])[1:-1]}#{number}"
        stream = self._streams[internal] = OutputStream()
        self._external[internal] = external
        self._admission.queued.add(internal)
        try:
            loads = params is _PROMPT_ALONE
            if not isinstance(prompt, PreparedPrompt):
                prompt, params = await self.prepare(prompt, params or self.get_default_sampling_params()), None
            processed = self._inputs.processor.process(external, prompt, params, came, now, terms)
            if not loads:  # an adapter is loaded all the same
                # Nothing is awaited after it: who pauses the engine sees all that passed.
                await self._admission.wait(internal, self._aborted_early)
            stream.source = self._submit(processed.renamed(internal), external)
            yield stream
        finally:
            self._close(internal)

    def beam_search(
        self,
        prompt: _Prompt,
        request_id: str | None,
        params: BeamSearchParams,
        lora_request: AdapterRequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search for the likeliest continuations of a prompt, and yield them once, whole. Raises as `generate` does."""
        require(isinstance(params, BeamSearchParams), "params", params, "BeamSearchParams")
        asked = params.sampling_params()
        asked.output_kind = RequestOutputKind.FINAL_ONLY
        return self.generate(prompt, asked, request_id, lora_request=lora_request)

    async def encode(
        self, prompt: PromptType, pooling_params: PoolingParams | None = None, request_id: Any = None, **terms: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield a prompt's vector, once, as `LLM.encode` gives it; nothing where it is aborted.

        Args:
            terms: `priority`, `lora_request` and the like, as of `generate`, which it raises as.
        """
        from torch import tensor  # slow to import, and for few

        asked = PoolingParams() if pooling_params is None else pooling_params
        require(isinstance(asked, PoolingParams), "pooling_params", asked, "PoolingParams, or None")
        prepared = await self.prepare(prompt, asked)
        # To its end, before anything is yielded: callers take what they wanted, and leave.
        for one in [each async for each in self.generate(prepared, None, request_id, **terms)]:
            if one.pooled is not None:
                found = PoolingOutput(tensor(asked.numbers(one, self.config.model)))
                yield PoolingRequestOutput(one.request_id, found, one.prompt_token_ids, one.num_cached_tokens or 0)

    async def add_lora(self, lora_request: AdapterRequest) -> bool:
        """Have an adapter loaded, before a request asks for it; where a pause keeps requests, it is just read.

        Raises as `generate` does.
        """
        if self._admission.keeps:
            return await self.find_adapter(lora_request) is not None
        async for _ in self.generate({"prompt_token_ids": [0]}, _PROMPT_ALONE, lora_request=lora_request):
            pass
        return True

    def check_room(self, num_requests: int = 1) -> None:
        """Check that the queue can take so many more requests: `generate` does for one, who has several asks before.

        Raises:
            OverloadedError: not now.
            InvalidRequestError: not even when idle.
        """
        seats = self.limits.max_num_seqs * self.config.args.data_parallel_size
        self._admission.check(num_requests, seats, len(self._streams), self._stats.num_requests_waiting)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests now; their iterators yield one last output ("abort"). Unknown ids are ignored."""
        wanted = set(strings("request_id", [request_id] if isinstance(request_id, str | None) else request_id))
        internal = [own for own, external in self._external.items() if external in wanted]
        if internal and self._monitor.dead is None:
            self._aborted_early.update(own for own in internal if own not in self._outputs.records)
            self._admission.look_again()
            self.client.send(Abort(internal))

    # The engine.

    async def check_health(self) -> None:
        """EngineDeadError when the engine is dead."""
        self._monitor.attach()

    async def wait_dead(self) -> EngineDeadError:
        """Wait for the engine's end, and return its reason."""
        return await self._monitor.wait_dead()

    async def snapshot(self, mark: str | None = None) -> EngineSnapshot:
        """The engine's first sequences, those of a hundred requests with `mark` in their ids, and its blocks."""
        watched = [own for own, external in self._external.items() if mark is not None and mark in external]
        snapshot: EngineSnapshot = await self._call("snapshot", watched[:100])
        for sequence in snapshot.sequences:
            sequence.request_id = self._external.get(sequence.request_id, sequence.request_id)
        return snapshot

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes, and pins; False (and nothing done) while requests hold blocks.

        Args:
            reset_running_requests: preempt those that run first: they are computed anew, with the tokens they have.
            reset_connector: also those on the disk (kv_cache_dir), until other weights are loaded.
        """
        return await self._call("reset_prefix_cache", bool(reset_connector), bool(reset_running_requests))

    async def pin_prefix(
        self, prompt: PromptType, name: str | None = None, add_special_tokens: bool = True
    ) -> PinnedPrefix:
        """Compute a prompt, once no pause is on, and keep its blocks until they are unpinned: see `LLM.pin_prefix`."""
        prepared = await self.prepare(prompt, _PROMPT_ALONE, add_special_tokens)
        async for _ in self.generate(prepared):
            pass
        name = name or f"prefix-{next(self._ids)}"
        return await self._call("pin_prefix", name, prepared.token_ids, prepared.cache_salt)

    async def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like all others; False where there is none of this name."""
        return await self._call("unpin_prefix", name)

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """The pinned prefixes, in the order in which they were pinned."""
        return await self._call("pinned_prefixes")

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] | None = None) -> bool:
        """Give back the memory of weights and KV cache until `wake_up`; False (and nothing done) while requests run.

        Args:
            mode: what becomes of those: "abort" ends them, "wait" waits until none runs, "keep" lets them go on then.

        Raises:
            InvalidRequestError: another level or mode.
        """
        require(mode in (None, *_MODES), "mode", mode, "'abort', 'wait', 'keep' or None")
        while True:
            # A pause may keep some, which are in nobody's way.
            await self.abort([*self._external.values()] if mode == "abort" else ())
            if (sleeps := await self._call("sleep", level, mode == "keep")) or mode is None:
                return sleeps
            await asyncio.sleep(0.01)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take requests again, once all is loaded: see `LLM.wake_up`."""
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether it takes no requests."""
        return await self._call("is_sleeping")

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Let requests that come wait until `resume_generation`; returns once none runs, to change weights, say.

        Args:
            mode: what becomes of those that run: "abort" ends them, "wait" waits until they have ended, "keep" lets
                them go on then, with the tokens that they have.
            wait_for_inflight_requests: the same as "wait", in older scripts.
            clear_cache: forget cached prefixes then, and compute anew what is kept.

        Raises:
            InvalidRequestError: another mode.
        """
        require(mode in _MODES, "mode", mode, "'abort', 'wait' or 'keep'")
        keeps = mode == "keep" and not wait_for_inflight_requests
        self._admission.pause(keeps)
        await self._call("hold", keeps)
        while not keeps and (records := [*self._outputs.records]):
            self._monitor.check()
            if mode == "abort" and not wait_for_inflight_requests:
                self.client.send(Abort(records))
            await asyncio.sleep(0.01)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Let requests go on that wait, or were kept, since `pause_generation`."""
        await self._call("hold", False)
        self._admission.resume()

    async def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return self._admission.is_paused

    async def update_weights(self, path: str) -> bool:
        """Use the weights of a directory; False (and nothing done) while requests run: see `LLM.update_weights`."""
        return await self._call("update_weights", path)

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        """Call a method of every worker, by name, with arguments that are data: see `LLM.collective_rpc`."""
        require(isinstance(method, str), "method", method, "the name of a method")
        require(isinstance(args, list | tuple), "args", args, "a tuple")
        if timeout is not None or kwargs:
            raise InvalidRequestError("timeout and kwargs are not supported; give its arguments by args=(...).")
        return (await self._call("call_workers", method, list(args))).values

    async def set_limits(self, **changes: Any) -> Limits:
        """Change limits, from the next step on: see `LLMEngine.set_limits`."""
        self.limits = limits = await self._call("set_limits", changes)
        self._inputs.processor.policy = limits.policy
        return limits

    async def check_integrity(self) -> None:
        """Raise RequestFailedError when the engine's state is inconsistent; for tests."""
        await self._call("check_integrity")

    def end_requests(self) -> None:
        """End what is running with EngineStoppedError, and take nothing more: the first half of `shutdown`, at once."""
        self._monitor.stop()

    def shutdown(self) -> None:
        """End all requests and the engine, which may take a few seconds. Safe to call twice."""
        self.end_requests()
        self._monitor.close()
        self.client.close()
        self._inputs.close()

    # On the way down.

    def _submit(self, processed: ProcessedInput, external: str) -> RequestRecord:
        self._monitor.check()
        request, internal = processed.request, processed.request.request_id
        record = self._outputs.add(processed)
        record.shown.request_id = external
        self.observer.on_arrival(request, processed.params.n)
        if internal in self._aborted_early:  # the engine never hears of it
            ended = [SequenceOutput(internal, index, [], finish_reason="abort") for index in range(record.num_left)]
            self._take_in(News(ended, [], 0.0, time.monotonic(), self._stats))
        else:
            self.client.send(Add(request))
        return record

    def _close(self, internal: str) -> None:
        del self._streams[internal], self._external[internal]
        self._admission.queued.discard(internal)
        self._aborted_early.discard(internal)
        if (record := self._outputs.records.pop(internal, None)) is not None:
            self.observer.on_finished(*record.ending("error" if self.errored else "abort"), time.monotonic())
            if self._monitor.dead is None:
                self.client.send(Abort([internal]))

    async def _call(self, name: CallName, *arguments: Any) -> Any:
        self._monitor.attach()
        call_id = next(self._ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.client.send(Call(call_id, name, list(arguments)))
        try:
            return await future
        finally:
            del self._calls[call_id]

    # On the way up.

    def _on_event(self, event: Event) -> None:
        if event.__class__ is News:
            self._take_in(event)  # type: ignore[arg-type]
        elif isinstance(event, Refused):
            self._refuse(event)
        elif isinstance(event, Reply):
            if (future := self._calls.get(event.call_id)) is not None and not future.done():
                future.set_result(event.value) if event.fault is None else future.set_exception(event.fault.error())
        elif isinstance(event, Dead):
            self._monitor.die(event.message)

    def _take_in(self, news: News) -> None:
        """A step's news: text for everyone who waits, and sequences that a stop string ended."""
        self._stats = news.stats
        observer, now = self.observer, news.end  # not when it got here: several steps' news may come at once
        observer.on_engine_stats(news.stats, time.monotonic())
        self._outputs.note_scheduled(news.scheduled, news.start)
        self._admission.queued.difference_update(news.scheduled)
        for request_id in news.scheduled:
            observer.on_scheduled(request_id, news.start)
        processed = self._outputs.process(news.outputs, now)
        for item in processed.taken:
            observer.on_tokens(item.request_id, item.sequence_index, len(item.new_token_ids), now)
        if processed.stopped:
            self.client.send(Finish(processed.stopped))
        if processed.ready and not self._fresh:  # of several steps whose news have come at once, readers hear once
            asyncio.get_running_loop().call_soon(self._wake_readers)
        for record in processed.ready:
            internal, shown = record.request.request_id, record.shown
            stream, reasons = self._streams[internal], list[str]()
            if not record.num_left:
                _, reasons, _ = ending = record.ending()
                observer.on_finished(*ending, now)
            error = shown.error or (RequestFailedError(_FAILED) if "error" in reasons else None)
            stream.is_fresh |= error is None  # what came before an error is still to be taken
            self._fresh.append(stream) if error is None else stream.fail(error)

    def _wake_readers(self) -> None:
        fresh, self._fresh = self._fresh, []
        for stream in fresh:
            stream.listener()

    def _refuse(self, event: Refused) -> None:
        if (record := self._outputs.records.pop(event.request_id, None)) is not None:
            self.observer.on_finished(*record.ending("error"), time.monotonic())
        if (stream := self._streams.get(event.request_id)) is not None:
            stream.fail(event.fault.error())

    def _end_all(self, error: EngineDeadError) -> None:
        """Tell everyone who waits."""
        self._admission.resume()
        for stream in self._streams.values():
            stream.fail(type(error)(str(error)))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(type(error)(str(error)))
