"""The engine for one thread: add requests, step, read outputs.

`LLM` and the command line drive it, and so do users who want their own loop. It joins the input processor, the core
and the output processor, and holds no policy of its own.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.config.families import built_family
from quire.config.options import check_kind
from quire.engine.build import build_core
from quire.engine.core import Core, EngineCore
from quire.engine.input_processor import InputProcessor, ProcessedInput
from quire.engine.output_processor import OutputProcessor
from quire.engine.terms import NO_TERMS
from quire.errors import ConfigError, NotYetSupportedError, require
from quire.executor.inprocess import InProcessExecutor
from quire.inputs import PreparedPrompt, PromptType
from quire.lora.request import LoRARequest, PromptAdapterRequest
from quire.outputs import RequestOutput
from quire.protocol.requests import Terms
from quire.protocol.stats import EngineStats, Limits
from quire.protocol.step import SequenceOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.limits import check_is_new
from quire.text.configured import config_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.utils.values import strings

Starter = Callable[[EngineArgs, EngineConfig], Core]


class LLMEngine:
    """A synchronous engine. Make one with `from_engine_args`."""

    def __init__(self, config: EngineConfig, core: Core, tokenizer: Tokenizer | None) -> None:
        self.config, self.core, self.tokenizer = config, core, tokenizer
        self.executor = core.executor if isinstance(core, EngineCore) else None
        self._inputs = inputs = InputProcessor(config, tokenizer, isinstance(core, EngineCore))
        self.prepare, self.find_adapter = inputs.prepare, inputs.adapters.find
        self._outputs = OutputProcessor(tokenizer, config.args)
        self._undelivered: list[RequestOutput] = []  # of a step that ended in an interrupt
        self._pending: list[SequenceOutput] = []  # final outputs of aborted requests, for the next step to hand out

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, show_progress: bool = True, start: Starter | None = None
    ) -> "LLMEngine":
        """Load the model and build the engine.

        Args:
            start: what starts it, called with arguments and configuration; one engine here by default.
                `quire.entrypoints.replicated_core.ReplicatedCore` starts data_parallel_size of them.

        Raises:
            ConfigError, NotYetSupportedError: the options.
            ModelLoadError: the model's or the tokenizer's files.
        """
        check_kind("engine_args", engine_args, EngineArgs)
        if (size := engine_args.data_parallel_size) > 1 and start is None:
            needed = "start=quire.entrypoints.replicated_core.ReplicatedCore"
            raise ConfigError(f"data_parallel_size={size} needs {needed}.")
        config = engine_args.resolve()
        built_family(config.model.architecture, config.model.model)  # the first thing to say of a model that can't run
        tokenizer = config_tokenizer(config)
        core = build_core(config, show_progress) if start is None else start(engine_args, config)
        return cls(config.with_max_model_len(core.max_model_len), core, tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | PreparedPrompt,
        params: SamplingParams | None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        *,
        client: str | None = None,
        ttft_target: float | None = None,
        tpot_target: float | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
    ) -> None:
        """Queue a request; `step` will return its outputs. A prepared prompt has its `params` already: pass None.

        Args:
            arrival_time: when it came, as `time.time()` says it, for the order that policies keep; now by default.
            lora_request, prompt_adapter_request: the adapter to run it with, of either kind.
            priority: lower runs first, under scheduling_policy="priority".
            client: whose request it is: "fair" gives clients equal shares.
            ttft_target, tpot_target: seconds to the first token, and between tokens, that "deadline" is to keep to;
                the engine's own by default.

        Raises:
            InvalidRequestError: the prompt or a parameter breaks a rule, the request can never fit, or its id is used.
            OverloadedError: its targets can't be met now.
        """
        adapter = self.find_adapter(lora_request, prompt_adapter_request)
        terms = Terms(priority, client, ttft_target, tpot_target, adapter)
        self.submit(self.process_input(request_id, prompt, params, arrival_time, terms))

    def process_input(
        self,
        request_id: str,
        prompt: PromptType | PreparedPrompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        terms: Terms = NO_TERMS,
    ) -> ProcessedInput:
        """Validate a request without queueing it; a prepared prompt has its parameters already."""
        return self._inputs.process(request_id, prompt, params, arrival_time, self.core.clock(), terms)

    def submit(self, processed: ProcessedInput) -> None:
        """Queue a validated request."""
        with self.core.interrupts:
            check_is_new(processed.request.request_id, self._outputs.records)  # nor that of one that was aborted
            self.core.add(processed.request)
            self._outputs.add(processed)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the outputs of the requests that have news, finished ones for the last time."""
        with self.core.interrupts:
            if self.core.has_unfinished():
                start = time.monotonic()
                self._pending += self.core.step()
                self._outputs.note_scheduled(self.core.first_scheduled, start)
            news, self._pending = self._pending, []
            processed = self._outputs.process(news, time.monotonic())
            for request_id, sequence_index in processed.stopped:
                self.core.finish_sequence(request_id, sequence_index)
            self._undelivered += [record.output() for record in processed.ready]
            self.core.settle()  # nobody steps any more when all have ended
        # Where leaving raises KeyboardInterrupt, the next step returns them.
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests now; their final outputs ("abort") come with the next step. Unknown ids are ignored."""
        with self.core.interrupts:
            for one in strings("request_id", [request_id] if isinstance(request_id, str | None) else request_id):
                if one in self._outputs.records:
                    self._pending.extend(self.core.abort(one))

    def discard_outputs(self, request_ids: Iterable[str]) -> None:
        """Forget aborted requests whose final outputs nobody waits for."""
        dropped = set(request_ids)
        self._undelivered = [output for output in self._undelivered if output.request_id not in dropped]
        self._pending = [news for news in self._pending if news.request_id not in dropped]
        for request_id in dropped:
            self._outputs.records.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to return."""
        return len(self._outputs.records) + len(self._undelivered) > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose final output is still to come."""
        return len(self._outputs.records)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes, pinned ones too; False (and nothing done) while requests run.

        Args:
            reset_running_requests: preempt those that run first: they are computed anew, with the tokens they have.
            reset_connector: also those on the disk (kv_cache_dir), until other weights are loaded.
        """
        return self.core.call("reset_prefix_cache", bool(reset_connector), bool(reset_running_requests))

    def set_limits(self, **changes: Any) -> Limits:
        """Change limits, from the next step on; nothing that runs is ended. Those that hold are part of `stats`.

        Args:
            changes: any of max_num_seqs, max_num_batched_tokens, policy, and the options that the policy reads.

        Raises:
            InvalidRequestError: no such limit, a value out of its range, or more than was reserved at the start.
        """
        limits: Limits = self.core.call("set_limits", changes)
        self._inputs.policy = limits.policy
        return limits

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function on the worker's model, where that is in this process."""
        require(callable(function), "func", function, "a function of the model")
        if not isinstance(self.executor, InProcessExecutor):
            raise NotYetSupportedError("apply_model needs a model in this process, and this engine's is elsewhere.")
        self.core.call("close_disk")
        return [function(self.executor.worker.model)]

    def stats(self) -> EngineStats:
        """The engine's counters and gauges at this moment."""
        return self.core.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError when the engine's state is inconsistent."""
        self.core.call("check_integrity")

    def shutdown(self) -> None:
        """Abort what is unfinished and release the model's memory."""
        self.abort_request([*self._outputs.records])
        self.core.stop()
