"""What a request needs before the engine sees it, without holding up an event loop.

`AsyncLLM` and the server encode prompts and render conversations here. What is short is encoded at once; anything else
goes to a lane of its own kind, so that a short chat never waits for megabytes, nor for a stranger's template.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.config.engine_args import EngineConfig
from quire.engine.input_processor import InputProcessor
from quire.errors import InvalidRequestError, require
from quire.inputs import PreparedPrompt, PromptType
from quire.lora.request import AdapterRequest
from quire.pooling_params import PoolingParams
from quire.protocol.requests import AdapterRef
from quire.sampling_params import SamplingParams
from quire.text.conversation import Conversation
from quire.text.renderer import RenderLane
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
        self.processor, self._tokenizer = InputProcessor(config, tokenizer, is_engine_here), tokenizer
        self._readings, self._encodings = ThreadPoolExecutor(1, "quire-read"), ThreadPoolExecutor(2, "quire-encode")
        self._long_encodings = ThreadPoolExecutor(1, "quire-encode-long")
        self._renders, self._long_renders = RenderLane("render", 2), RenderLane("render-long", 1)
        self._strangers = RenderLane("render-strangers", 2)

    async def prepare(
        self, prompt: PromptType, params: SamplingParams | PoolingParams, add_special_tokens: bool = True
    ) -> PreparedPrompt:
        """`InputProcessor.prepare`."""
        parts = [*prompt.values()] if isinstance(prompt, dict) else [prompt]
        parts += getattr(params, "bad_words", None) or ()
        size = sum(len(part) for part in parts if isinstance(part, str | list))
        return await self._encode(size, lambda: self.processor.prepare(prompt, params, add_special_tokens))

    async def find_adapter(self, request: AdapterRequest | None) -> AdapterRef | None:
        """`AdapterBook.find`; files are read in a thread."""
        book = self.processor.adapters
        return book.find(request) if book.knows(request) else await _run(self._readings, lambda: book.find(request))

    async def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        require(isinstance(text, str), "text", text, "a text")
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
        lane = self._renders if len(job) < _LONG else self._long_renders
        if conversation.chat_template is not None and not trusted:
            lane = self._strangers
        return await _run(lane, lambda: lane.render(job))

    def close(self) -> None:
        """End the threads and the processes."""
        threads, lanes = (self._readings, self._encodings, self._long_encodings), (self._renders, self._long_renders)
        for lane in (*threads, *lanes, self._strangers):
            lane.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, size: int, function: Callable[[], _Result]) -> _Result:
        if size <= _SHORT:
            return function()
        return await _run(self._encodings if size < _LONG else self._long_encodings, function)

    def _tokenizer_or_refuse(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("text needs a tokenizer, but skip_tokenizer_init=True; pass token ids.", "prompt")
        return self._tokenizer


async def _run(threads: ThreadPoolExecutor, function: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(threads, function)
