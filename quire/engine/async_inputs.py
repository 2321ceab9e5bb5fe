"""What a request needs before the engine sees it, without holding up an event loop.

`AsyncLLM` and the server encode prompts and render conversations here. What is short is encoded at once; anything else
goes to a lane of its own kind, so that a short chat never waits for megabytes, nor for a stranger's template.
"""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.config.engine_args import EngineConfig
from quire.engine.input_processor import InputProcessor, ProcessedInput
from quire.errors import InvalidRequestError
from quire.inputs import PreparedPrompt, PromptType
from quire.lora.request import AdapterRequest
from quire.protocol.requests import AdapterRef, Terms
from quire.sampling_params import SamplingParams
from quire.text.conversation import Conversation
from quire.text.renderer import Renderer
from quire.text.tokenizer import Tokenizer

_SHORT = 2000  # characters or ids of a prompt that are handled on the event loop: less work than going to a thread
_LONG = 200_000  # characters, ids, or bytes of a conversation, from which on the work takes a good part of a second
_Result = TypeVar("_Result")


class AsyncInputs:
    """An input processor and a tokenizer for an event loop.

    Attributes:
        processor: the input processor.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None, is_engine_here: bool = True) -> None:
        self.processor = self._inputs = InputProcessor(config, tokenizer, is_engine_here)
        self._tokenizer = tokenizer
        self._encodings, self._long_encodings = _Lane("encode", 2), _Lane("encode-long", 1)
        self._renders, self._long_renders = _RenderLane("render", 2), _RenderLane("render-long", 1)
        self._strangers = _RenderLane("render-strangers", 2)

    async def prepare(
        self, prompt: PromptType, params: SamplingParams, add_special_tokens: bool = True
    ) -> PreparedPrompt:
        """`InputProcessor.prepare`."""
        parts = prompt.values() if isinstance(prompt, dict) else [prompt]
        size = sum(len(part) for part in parts if isinstance(part, str | list))
        return await self._encode(size, lambda: self._inputs.prepare(prompt, params, add_special_tokens))

    async def process(
        self,
        request_id: str,
        prompt: PromptType | PreparedPrompt,
        params: SamplingParams | None,
        arrival_time: float,
        terms: Terms,
    ) -> ProcessedInput:
        """`InputProcessor.process`."""
        if not isinstance(prompt, PreparedPrompt):
            prompt, params = await self.prepare(prompt, params), None  # type: ignore[arg-type]  (None is refused there)
        return self._inputs.process(request_id, prompt, params, arrival_time, terms)

    async def find_adapter(self, request: AdapterRequest | None) -> AdapterRef | None:
        """`AdapterBook.find`; files are read in a thread."""
        book = self._inputs.adapters
        return book.find(request) if book.knows(request) else await self._encodings.run(lambda: book.find(request))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = self._tokenizer_or_refuse()
        return await self._encode(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def render_chat(self, messages: Any, *, trusted: bool = False, **options: Any) -> str:
        """The prompt of a conversation, by the model's template or by the one given.

        Args:
            trusted: whether the template given is the operator's; another one has processes of its own, so that only
                its like wait for it.
            options: further fields of `Conversation`.

        Raises:
            InvalidRequestError: bad messages, no template, the template's own complaint, or its bounds overstepped.
            RequestFailedError: the process that templates run in can't be started.
        """
        conversation = Conversation(messages=messages, **options)
        job = conversation.job(self._tokenizer_or_refuse())
        if conversation.chat_template is not None and not trusted:
            return await self._strangers.render(job)
        return await (self._renders if len(job) < _LONG else self._long_renders).render(job)

    def close(self) -> None:
        """End the threads and the processes."""
        for lane in (self._encodings, self._long_encodings, self._renders, self._long_renders, self._strangers):
            lane.close()

    async def _encode(self, size: int, function: Callable[[], _Result]) -> _Result:
        if size <= _SHORT:
            return function()
        return await (self._encodings if size < _LONG else self._long_encodings).run(function)

    def _tokenizer_or_refuse(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("text needs a tokenizer, but skip_tokenizer_init=True; pass token ids.", "prompt")
        return self._tokenizer


class _Lane:
    """Threads for one kind of work, first come, first served."""

    def __init__(self, name: str, width: int) -> None:
        self._threads = ThreadPoolExecutor(width, f"quire-{name}")

    async def run(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _RenderLane(_Lane):
    """Each thread with a process that renders for it; one that is warm comes first."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name, width)
        self._renderers = [Renderer() for _ in range(width)]
        self._idle: queue.LifoQueue[Renderer] = queue.LifoQueue()
        for renderer in self._renderers:
            self._idle.put(renderer)

    async def render(self, job: bytes) -> str:
        return await self.run(lambda: self._render(job))

    def close(self) -> None:
        super().close()
        for renderer in self._renderers:
            renderer.close()

    def _render(self, job: bytes) -> str:
        renderer = self._idle.get()
        try:
            return renderer.render(job)
        finally:
            self._idle.put(renderer)
