"""A fake `LLM` in the place of the real one, for tests of the command line: no model, no torch."""

import io
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.errors import InvalidRequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams


class FakeTokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
        """One "token" a character, so that a test reads the whole conversation out of the prompt."""
        assert kwargs == {"add_generation_prompt": True, "tokenize": True}
        return [ord(c) for c in "|".join(f"{m['role']}:{m['content']}" for m in messages)]


class FakeEngine:
    """Answers every request with the words of `answer`, one a step."""

    def __init__(self, refuse: Callable[[Any], bool], on_step: Callable[[], None]) -> None:
        self.refuse = refuse
        self.on_step = on_step
        self.answer = ["Once ", "more ", "é."]
        self.requests: list[tuple[Any, SamplingParams]] = []
        self.running: dict[str, list[str]] = {}
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        if self.refuse(prompt):
            raise InvalidRequestError("prompt is refused.", "prompt")
        self.requests.append((prompt, params))
        self.running[request_id] = list(self.answer)

    def step(self) -> list[RequestOutput]:
        self.on_step()
        outputs: list[RequestOutput] = []
        for request_id, words in list(self.running.items()):
            text, finished = words.pop(0), not words
            outputs.append(
                RequestOutput(request_id, None, [1, 2], outputs=[CompletionOutput(0, text, [7])], finished=finished)
            )
            if finished:
                del self.running[request_id]
        return outputs

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def discard_outputs(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self.running[request_id]


class FakeLLM:
    """Keeps what it is asked; a test changes the class attributes to make it fail or interrupt."""

    made: list["FakeLLM"]
    failure: BaseException | None = None
    defaults: dict[str, Any]
    refuse = staticmethod(lambda prompt: False)
    on_step = staticmethod(lambda: None)

    def __init__(self, **options: Any) -> None:
        if type(self).failure is not None:
            raise type(self).failure
        self.args = EngineArgs(**options)
        self.llm_engine = FakeEngine(type(self).refuse, type(self).on_step)
        self.model_config = types.SimpleNamespace(vocab_size=50, seed=self.args.seed)
        self.calls: list[tuple[list[Any], Any]] = []
        type(self).made.append(self)

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**type(self).defaults)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        self.calls.append((prompts, params))
        many = params if isinstance(params, list) else [params] * len(prompts)
        return [
            RequestOutput(
                str(i),
                prompt if isinstance(prompt, str) else None,
                [1, 2, 3],
                outputs=[CompletionOutput(j, f"text {i}.{j}", [5] * (p.max_tokens or 1)) for j in range(p.n)],
                finished=True,
            )
            for i, (prompt, p) in enumerate(zip(prompts, many, strict=True))
        ]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """`quire.entrypoints.llm` holds a fresh FakeLLM class."""
    fresh = type("FreshFakeLLM", (FakeLLM,), {"made": [], "failure": None, "defaults": {}})
    module = types.ModuleType("quire.entrypoints.llm")
    module.LLM = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.entrypoints.llm", module)
    return fresh


@pytest.fixture
def give_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a text the standard input, as if piped in."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))
