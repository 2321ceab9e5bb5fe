"""What a request needs before the engine sees it, without holding up an event loop.

`AsyncLLM` and the server encode prompts and render conversations here. What is short is done at once; what may take
long for a single request goes to a thread, and a template from a stranger to a process.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.config.engine_args import EngineConfig
from quire.engine.input_processor import InputProcessor, ProcessedInput, PromptType
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.text.render_child import TemplateProcess
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

_SHORT = 2000  # characters or ids of a prompt that are handled on the event loop: less work than going to a thread
_Result = TypeVar("_Result")


class AsyncInputs:
    """An input processor and a tokenizer for an event loop."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._inputs = InputProcessor(config, tokenizer)
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(2, "quire-input")
        self._templates = TemplateProcess()

    async def process(
        self, request_id: str, prompt: PromptType, params: SamplingParams, arrival_time: float, priority: int
    ) -> ProcessedInput:
        """`InputProcessor.process`."""
        parts = prompt.values() if isinstance(prompt, dict) else [prompt]
        size = sum(len(part) for part in parts if isinstance(part, str | list))
        return await self._run(size, lambda: self._inputs.process(request_id, prompt, params, arrival_time, priority))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = self._tokenizer_or_refuse()
        return await self._run(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def render_chat(
        self, messages: Any, *, chat_template: str | None = None, trusted: bool = False, **options: Any
    ) -> str:
        """The prompt of a conversation, by the model's template or by the one given.

        Args:
            trusted: whether the template given is the operator's; another one is rendered in a process that is killed
                when it takes too long.
            options: those of `ChatTemplate.render`.

        Raises:
            InvalidRequestError: bad messages, no template, the template's own complaint, or its bounds overstepped.
        """
        tokenizer = self._tokenizer_or_refuse()
        template = ChatTemplate.for_tokenizer(tokenizer, chat_template)
        if chat_template is None or trusted:
            return await self._in_thread(lambda: template.render(messages, **options))
        text = template.select(options.get("tools"))
        special_tokens = tokenizer.special_tokens_map
        return await self._in_thread(lambda: self._templates.render(text, special_tokens, messages, options))

    def close(self) -> None:
        """End the threads and the process."""
        self._templates.close()
        self._threads.shutdown(wait=False)

    async def _run(self, size: int, function: Callable[[], _Result]) -> _Result:
        return function() if size <= _SHORT else await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def _tokenizer_or_refuse(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("text needs a tokenizer, but skip_tokenizer_init=True; pass token ids.", "prompt")
        return self._tokenizer
