"""`LLM`: offline generation, the class most people meet first.

Scripts call `generate` or `chat` with all their prompts and get all results back, in order. It turns calls into lists
of prompts, parameters and terms, which `Batches` has an `LLMEngine` run; it holds no scheduling or model code.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor, tensor

from quire.config.model import ModelConfig
from quire.entrypoints.as_vllm import EngineArgs, LLMEngine, Metrics, as_vllms
from quire.entrypoints.batches import Batches, beams_of, of_prompt
from quire.entrypoints.not_yet import engine_args
from quire.entrypoints.scoring import (
    ClassificationOutput,
    ClassificationRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosines,
    pair_prompts,
    read_pairs,
)
from quire.entrypoints.vllm_names import lacking
from quire.errors import InvalidRequestError, NotYetSupportedError, RequestFailedError, broken, require
from quire.executor.inprocess import InProcessExecutor
from quire.inputs import PromptType
from quire.lora.request import LoRARequest, PromptAdapterRequest
from quire.outputs import (
    BeamSearchOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.protocol.cache import PinnedPrefix
from quire.protocol.requests import Terms
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.text.conversation import Conversation, select_template
from quire.text.tokenizer import Tokenizer
from quire.utils.values import number

_OF_TOKENIZER = ("add_special_tokens", "truncation", "max_length", "truncation_side", "padding", "split_special_tokens")
ChatMessage = dict[str, Any]
ParamsType = SamplingParams | Sequence[SamplingParams]
PromptAdapters = PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None


class LLM:
    """An offline engine for one model.

    Args:
        model: a model directory, a hub id, or "demo" for the bundled model.
        tokenizer: likewise, where it is not the model's own.
        show_progress: draw a bar while the weights load.
        **kwargs: any field of `EngineArgs`.

    Raises:
        ConfigError, NotYetSupportedError: an option is unknown, out of range, or not there yet.
        ModelLoadError: the model can't be loaded.
    """

    def __init__(
        self, model: str = "demo", tokenizer: str | None = None, *, show_progress: bool = True, **kwargs: Any
    ) -> None:
        args = engine_args(model=model, tokenizer=tokenizer, **kwargs)
        start = None
        if args.data_parallel_size > 1:
            from quire.entrypoints.replicated_core import ReplicatedCore as start  # few need processes and event loops

        self.llm_engine = LLMEngine.from_engine_args(args, show_progress=show_progress, start=start)
        self._batches = Batches(self.llm_engine)
        self._pin_numbers = itertools.count()
        self._weights: TemporaryDirectory[str] | None = None  # those that came as tensors

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """An offline engine with these options."""
        return cls(**vars(engine_args))

    def __getattr__(self, name: str) -> Any:
        """Called for names that are not there only."""
        raise lacking(self, name)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer (InvalidRequestError under skip_tokenizer_init)."""
        if self.llm_engine.tokenizer is None:
            raise InvalidRequestError("there is no tokenizer, since skip_tokenizer_init=True.")
        return self.llm_engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The model's resolved configuration."""
        return self.llm_engine.config.model

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when no parameters are passed: the model's generation_config.json, if it has one."""
        return self.llm_engine.config.default_sampling_params()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsType | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        client: str | None = None,
        prompt_adapter_request: PromptAdapters = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a str, a list of token ids, a dict {"prompt": str} or {"prompt_token_ids": [...]} (either may
                carry a "cache_salt"), or a list of any of these.
            sampling_params: one for all, or one for each prompt; the model's defaults if None.
            use_tqdm: show a progress bar with input and output tokens per second.
            lora_request: the adapter that they run with; one for all, or one (or None) each.
            priority: one for all or one each; lower runs first under scheduling_policy="priority".
            client: whose prompts they are, for scheduling_policy="fair".
            prompt_adapter_request: likewise, for adapters that are virtual tokens.
            tokenization_kwargs: what a text is tokenized with, such as {"truncation": True, "max_length": 512} (by
                default what the context holds), add_special_tokens and truncation_side ("left": the last tokens are
                kept): see `Tokenizer`.

        Returns:
            One `RequestOutput` per prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or its parameters break a rule; nothing has been computed then, and the
                message says which prompt. Or a schema, regex or grammar can't be held, which may be found out a moment
                later: the other prompts are dropped then.
        """
        many = self._tokenized(_as_list(prompts), tokenization_kwargs)
        params = self._params_for(sampling_params, len(many))
        terms = self._terms_for(len(many), lora_request, prompt_adapter_request, priority, client)
        return self._batches.run(many, params, terms, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: list[ChatMessage] | Sequence[list[ChatMessage]],
        sampling_params: ParamsType | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_adapter_request: PromptAdapters = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            chat_template: Jinja text to use instead of the model's own template.
            add_generation_prompt: open the assistant's turn after the last message.
            continue_final_message: go on with the last message instead of answering it.
            tools: tool definitions handed to the template, which has to have a use for them.
            chat_template_kwargs: further variables for the template.
            lora_request, priority, tokenization_kwargs, prompt_adapter_request: as of `generate`.
            chat_template_content_format: content as one "string", as parts ("openai"), or as the template does it.

        Raises:
            InvalidRequestError: bad messages, no template, the template's own complaint, or as `generate`.
            RequestFailedError: the process that templates run in can't be started.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], dict)
        conversations: list[Any] = list(messages) if several else [messages]
        tokenizer = self.get_tokenizer()
        template: Any = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs, "tools": tools}
        turns: Any = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        if tools and "tools" not in select_template(tokenizer, chat_template, tools):
            remedy = "leave them out, or give a chat_template that shows them"
            raise InvalidRequestError(f"tools: the chat template has no use for them; {remedy}.", "tools")
        texts: list[PromptType] = []
        for place, one in enumerate(conversations):
            try:
                asked = Conversation(messages=one, content_format=chat_template_content_format, **template, **turns)
                texts.append(tokenizer.render(asked))
            except InvalidRequestError as error:
                raise of_prompt(error, place, len(conversations), "messages") from None
        params = self._params_for(sampling_params, len(texts))
        terms = self._terms_for(len(texts), lora_request, prompt_adapter_request, priority)
        # A template writes its own special tokens.
        many = self._tokenized(texts, tokenization_kwargs, add_special_tokens=False)
        return self._batches.run(many, params, terms, use_tqdm=use_tqdm, add_special_tokens=False)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of one prompt or many, as transformers' beam search finds them.

        Args:
            prompts: as for `generate`.
            params: how many beams, how long, how ranked.
            concurrency_limit: prompts searched at once; all of them if None.

        Returns:
            For each prompt its `beam_width` best sequences, the best first.

        Raises:
            InvalidRequestError: a prompt or a parameter breaks a rule, the beams can never run at once, or the
                parameters leave too few tokens to choose from.
        """
        require(isinstance(params, BeamSearchParams), "params", params, "BeamSearchParams")
        many = _as_list(prompts)
        size = max(1, len(many)) if concurrency_limit is None else number(concurrency_limit, int) or 0
        require(size > 0, "concurrency_limit", concurrency_limit, "an integer of at least 1, or None")
        one, terms = params.sampling_params(), self._terms_for(len(many), lora_request)
        outputs: list[RequestOutput] = []
        for start in range(0, len(many), size):
            part, served = many[start : start + size], terms[start : start + size]
            outputs += self._batches.run(part, [one] * len(part), served, use_tqdm=use_tqdm)
        return [beams_of(output, params, self.llm_engine.tokenizer) for output in outputs]

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt: the last token's hidden state after the final norm, of length 1 by default.

        Args:
            prompts, lora_request: as for `generate`.
            pooling_params: how long, and whether of length 1; one for all, or one each.
            tokenization_kwargs: as for `generate`, but that truncation keeps the first tokens of a text.

        Returns:
            In the order of the prompts; `outputs.embedding` is a list of as many floats as the model's hidden size.

        Raises:
            InvalidRequestError: a prompt or a parameter breaks a rule; nothing has been computed then.
            RequestFailedError: the engine could not compute one of them.
        """
        how = (use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        return self._pooled("embed", EmbeddingRequestOutput, EmbeddingOutput, prompts, *how)

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """As `embed`, or `classify` of models with a head, with tensors (float32 [H]) as `outputs.data`."""
        how = (use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        return self._pooled(pooling_task, PoolingRequestOutput, lambda row: PoolingOutput(tensor(row)), prompts, *how)

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each prompt is of each class, by a model with a head for them: see `embed`.

        Returns:
            In the order of the prompts; `outputs.probs` is a list of a float for each class: the softmax of what the
            model says, the sigmoid of a single one, or that as it is (use_activation=False).
        """
        how = (use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        return self._pooled("classify", ClassificationRequestOutput, ClassificationOutput, prompts, *how)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: the cosine similarity of their vectors, or what a head for one class says.

        Args:
            data_1, data_2: texts, or lists of them, as many on both sides; or one text, for all of `data_2`.
            pooling_params, lora_request, tokenization_kwargs: as of `embed`.
            chat_template: what writes both as one prompt, as messages of the roles query and document, for a head.

        Returns:
            One for each pair, in order; `outputs.score` is a number.

        Raises:
            InvalidRequestError, RequestFailedError: the texts are no pairs; or as `embed`.
        """
        queries, documents = read_pairs(data_1, data_2)
        how = (use_tqdm, pooling_params, lora_request, tokenization_kwargs)
        if self.model_config.num_labels:
            prompts = pair_prompts(self.model_config, self.llm_engine.tokenizer, queries, documents, chat_template)
            return self._pooled("classify", ScoringRequestOutput, lambda row: ScoringOutput(row[0]), prompts, *how)
        found = self.embed(queries + documents, *how)
        scores = cosines([one.outputs.embedding for one in found], len(queries))
        firsts = found[: len(queries)] * (len(documents) // len(queries))
        outputs: list[ScoringRequestOutput] = []
        for one, other, score in zip(firsts, found[len(queries) :], scores, strict=True):
            name, tokens = f"{one.request_id}_{other.request_id}", one.prompt_token_ids + other.prompt_token_ids
            cached = one.num_cached_tokens + other.num_cached_tokens
            outputs.append(ScoringRequestOutput(name, ScoringOutput(score), tokens, cached))
        return outputs

    def _pooled(
        self, task: Any, kind: Any, shown: Any, prompts: Any, use_tqdm: bool, params: Any, loras: Any, tokenized: Any
    ) -> list[Any]:
        """What pooling makes of each prompt, as `kind` of output, with what is `shown` of the numbers. See `embed`."""
        cuts = {"truncation_side": "right", "max_length": self.model_config.max_model_len}
        many = self._tokenized(_as_list(prompts), tokenized, **cuts)
        given = PoolingParams() if params is None else params
        each = _one_each(given, len(many), "pooling params", "pooling_params")
        require(all(isinstance(one, PoolingParams) for one in each), "pooling_params", each, "PoolingParams, or a list")
        each = [structs.replace(one, task=task or one.task) for one in each]
        terms = self._terms_for(len(many), loras)
        outputs = self._batches.run(many, each, terms, use_tqdm=use_tqdm)
        if any(output.pooled is None for output in outputs):
            raise RequestFailedError("the engine failed to compute a vector; the log says why.")
        return [
            kind(o.request_id, shown(one.numbers(o, self.model_config)), o.prompt_token_ids, o.num_cached_tokens or 0)
            for o, one in zip(outputs, each, strict=True)
        ]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes, pinned ones too; False (and nothing done) while requests run.

        Args:
            reset_running_requests: vLLM's, of no effect: between calls of this class no request runs.
            reset_connector: also those on the disk (kv_cache_dir), until other weights are loaded.
        """
        return self._batches.call("reset_prefix_cache", bool(reset_connector))

    def reset_mm_cache(self) -> None:
        """Nothing: a prompt is text or token ids."""

    def pin_prefix(self, prompt: PromptType, name: str | None = None) -> PinnedPrefix:
        """Compute a prompt and keep its blocks in the KV cache, whatever else comes, until `unpin_prefix`.

        Args:
            prompt: as of `generate`; only whole KV blocks of its beginning are kept, for requests of its cache_salt.
            name: to unpin it by; a number by default.

        Raises:
            InvalidRequestError: the prompt breaks a rule or is shorter than a block, the name is in use, too much is
                pinned already, or the longest request could not run any more.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prepared = self.llm_engine.prepare(prompt, params)
        name = name or f"prefix-{next(self._pin_numbers)}"
        with self._batches.turn:  # nobody else's prompts may take the blocks
            self._batches.run([prompt], [params], [Terms()])
            return self._batches.call("pin_prefix", name, prepared.token_ids, prepared.cache_salt)

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted like all others; False where there is none of this name."""
        return self._batches.call("unpin_prefix", name)

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """The pinned prefixes, in the order in which they were pinned."""
        return self._batches.call("pinned_prefixes")

    def sleep(self, level: int = 1, mode: str = "abort") -> bool:
        """Give back the memory of weights and KV cache until `wake_up`; False (and nothing done) while requests run.

        Args:
            level: 1 wakes up with the weights that it had, read again from where they came; 2 with those of its start,
                unless `update_weights` brings others before.
            mode: vLLM's, of no effect: between calls of this class no request runs.

        Raises:
            InvalidRequestError: another level or mode.
        """
        require(mode in ("abort", "wait", "keep"), "mode", mode, "'abort', 'wait' or 'keep'")
        return self._batches.call("sleep", level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Load what the engine sleeps without; until all is there, requests are refused (OverloadedError).

        Args:
            tags: "weights" alone first, to change them where memory is short, and "kv_cache" then; all if None.

        Raises:
            InvalidRequestError: an unknown tag. RequestFailedError: the weights' files or the memory are gone.
        """
        self._batches.call("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Whether it takes no requests."""
        return self._batches.call("is_sleeping")

    def update_weights(self, weights: str | os.PathLike[str] | Iterable[tuple[str, Tensor]]) -> bool:
        """Use other weights of the same model; False (and nothing done) while requests run.

        They are loaded beside those in use, which stay where anything is wrong with them; sleep before where there is
        no memory for both. No cached prefix outlives the change.

        Args:
            weights: a checkpoint's directory, whose config.json is not looked at; or all of a checkpoint's tensors, by
                name, which go through a file of the temporary directory. On other machines only a directory will do.

        Raises:
            InvalidRequestError: it is neither.
            RequestFailedError: a tensor is missing, too many, or of another shape or type, or a file is broken.
        """
        if isinstance(weights, str | os.PathLike):
            return self._batches.call("update_weights", str(Path(os.path.expanduser(weights)).absolute()))
        folder = TemporaryDirectory(prefix="quire-weights-")
        try:
            tensors = {name: tensor.detach().contiguous().clone() for name, tensor in weights}
            save_file(tensors, Path(folder.name) / "model.safetensors")
        except (AttributeError, TypeError, ValueError) as error:
            raise broken("weights", weights, "a checkpoint's directory, or pairs of a name and a tensor") from error
        if done := self._batches.call("update_weights", folder.name):
            self._weights = folder  # what it sleeps without is read from there
        return done

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; one result each.

        Args:
            method: the name of a method of `Keeper` or `Worker`, whose arguments and results are data; or a function,
                that is called with the worker, where that is in this process.
            timeout: not supported; a worker that hangs is found out by itself.
            kwargs: for a function.

        Raises:
            InvalidRequestError: an argument is of another kind.
            RequestFailedError: there is no such method, or it refuses.
        """
        require(callable(method) or isinstance(method, str), "method", method, "a name, or a function of a worker")
        require(isinstance(args, list | tuple), "args", args, "a tuple")
        fits = kwargs in (None, {}) or (isinstance(kwargs, Mapping) and callable(method))
        require(fits, "kwargs", kwargs, "a dict, for a function")
        require(timeout is None, "timeout", timeout, "None, as it is not supported")
        if isinstance(method, str):
            return self._batches.call("call_workers", method, list(args)).values
        if not isinstance(executor := self.llm_engine.executor, InProcessExecutor):
            raise NotYetSupportedError("a function needs a worker in this process, and this engine's is elsewhere.")
        with self._batches.turn:
            self._batches.call("close_disk")
            return [method(executor.worker, *args, **(kwargs or {}))]

    def get_metrics(self) -> Metrics:
        """The engine's counters and gauges: a list under /metrics' names, and attributes, as `EngineStats` has them."""
        return Metrics(self.llm_engine.stats(), self.llm_engine.config.args.model)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function on the model itself; one result per worker."""
        with self._batches.turn:
            return self.llm_engine.apply_model(func)

    def _params_for(self, given: ParamsType | None, num_prompts: int) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if given is None else given
        return _one_each(given, num_prompts, "sampling params", "sampling_params")

    def _tokenized(self, prompts: list[Any], options: dict[str, Any] | None, **defaults: Any) -> list[PromptType]:
        """Prompts whose texts are token ids, too, where there are options for the tokenizer."""
        fits = isinstance(options, Mapping | None) and all(name in _OF_TOKENIZER for name in options or ())
        require(fits, "tokenization_kwargs", options, f"a dict of some of {', '.join(_OF_TOKENIZER)}")
        given = {"max_length": self.model_config.max_model_len - 1, "truncation_side": "left", **defaults}
        for place, prompt in enumerate(prompts if options else ()):
            entries = {"prompt": prompt} if isinstance(prompt, str) else prompt
            if isinstance(entries, dict) and isinstance(text := entries.get("prompt"), str):
                ids = self.get_tokenizer()(text, **given | (options or {})).input_ids
                prompts[place] = {"prompt_token_ids": ids, **entries}
        return prompts

    def _terms_for(
        self, num_prompts: int, loras: Any, virtual: PromptAdapters = None, priority: Any = None, client: Any = None
    ) -> list[Terms]:
        """Those of each prompt."""
        priorities = _one_each(priority or 0, num_prompts, "priorities", "priority")
        each = _one_each(loras, num_prompts, "lora_requests", "lora_request")
        others = _one_each(virtual, num_prompts, "prompt_adapter_requests", "prompt_adapter_request")
        adapters = [self.llm_engine.find_adapter(*both) for both in zip(each, others, strict=True)]
        return [Terms(one, client, adapter=adapter) for one, adapter in zip(priorities, adapters, strict=True)]


# Here, for type checkers to see their arguments.
for _name in ("generate", "chat", "beam_search", "embed", "encode", "classify", "score"):
    setattr(LLM, _name, as_vllms(getattr(LLM, _name)))


def _one_each(given: Any, num_prompts: int, what: str, name: str) -> list[Any]:
    """One for all, or a list of one each; anything else is told so for the first prompt."""
    each = list(given) if isinstance(given, Sequence) else [given] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequestError(f"{len(each)} {what} for {num_prompts} prompts; give one for all, or one each.", name)
    return each


def _as_list(prompts: Any) -> list[PromptType]:
    if isinstance(prompts, str | dict | bytes | bytearray | memoryview) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    many = list(prompts)
    # [1, 2, 3] is one prompt of token ids; [[1, 2], [3]] and ["a", "b"] are several prompts, and [] is none.
    return [many] if many and all(hasattr(p, "__index__") for p in many) else many
