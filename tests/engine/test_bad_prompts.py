"""One way in: a bad prompt is refused with one text, whoever is asked: `LLM`, `AsyncLLM` or the server."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fastapi.testclient import TestClient

import quire
from quire import LLM, AsyncLLM, AsyncOptions, EngineArgs, SamplingParams
from quire.config.server import ServerArgs
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.state import ServerState
from quire.errors import InvalidRequestError

# Of prompts that JSON can hold and the server's own rules of form let through.
PROMPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "beyond_the_vocabulary": ([5, 4096], {}),
    "far_beyond": ([5, 2**40], {}),
    "negative": ([5, -1], {}),
    "too_many_ids": ([5] * 300, {}),
    "just_too_many_ids": ([5] * 128, {}),
    "text_too_long": ("word " * 200, {}),
    "text_not_worth_encoding": ("word " * 100_000, {}),
    "unknown_to_the_model": ("Hello <|extra|> there", {}),
    "too_many_kept": ("Hello", {"truncate_prompt_tokens": 500}),
    "none_kept": ("Hello", {"truncate_prompt_tokens": 0}),
    "logprobs": ("Hello", {"logprobs": 21}),
    "stop_token": ("Hello", {"stop_token_ids": [4096]}),
    "bias": ([5, 6], {"logit_bias": {4097: 1.0}}),
}


class Doors:
    """The three, over models with a context of 128 tokens and a tokenizer of one token too many."""

    def __init__(self, llm: LLM, async_llm: AsyncLLM, client: TestClient) -> None:
        self.llm, self.async_llm, self.client = llm, async_llm, client

    def offline(self, prompt: Any, options: dict[str, Any]) -> tuple[str, str | None, str | None]:
        with pytest.raises(InvalidRequestError) as caught:
            self.llm.generate(prompt, SamplingParams(max_tokens=1, **options), use_tqdm=False)
        return str(caught.value), caught.value.param, caught.value.code

    def asynchronous(self, prompt: Any, options: dict[str, Any]) -> tuple[str, str | None, str | None]:
        async def ask() -> None:
            async for _ in self.async_llm.generate(prompt, SamplingParams(max_tokens=1, **options)):
                pass

        assert self.client.portal is not None
        with pytest.raises(InvalidRequestError) as caught:
            self.client.portal.call(ask)
        return str(caught.value), caught.value.param, caught.value.code

    def http(self, prompt: Any, options: dict[str, Any]) -> tuple[str, str | None, str | None]:
        answer = self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1} | options)
        assert answer.status_code == 400
        error = answer.json()["error"]
        return error["message"], error["param"], error["code"]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    files, home = Path(quire.__file__).parent / "demo", tmp_path_factory.mktemp("tokenizer")
    shutil.copy(files / "tokenizer_config.json", home)
    tokenizer = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|extra|>"])
    tokenizer.save(str(home / "tokenizer.json"))
    options: dict[str, Any] = {"model": "demo", "tokenizer": str(home), "max_model_len": 128, "num_kv_blocks": 32}
    async_llm = AsyncLLM.from_engine_args(EngineArgs(**options), options=AsyncOptions(engine="thread"))
    with TestClient(build_app(ServerState(async_llm, ServerArgs(), ["demo"]))) as client:
        yield Doors(LLM(**options), async_llm, client)
    async_llm.shutdown()


@pytest.mark.parametrize("name", PROMPTS)
def test_one_text_for_all(doors: Doors, name: str) -> None:
    prompt, options = PROMPTS[name]
    expected = doors.offline(prompt, options)
    assert doors.asynchronous(prompt, options) == expected
    assert doors.http(prompt, options) == expected


def test_good_prompts_pass(doors: Doors) -> None:
    doors.llm.generate(["Hello", [5] * 127], SamplingParams(max_tokens=1), use_tqdm=False)
    for prompt in ("Hello", [5] * 127):
        assert doors.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200


def test_a_prepared_prompt_is_not_looked_at_again(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params = doors.async_llm, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    async def twice() -> list[list[int]]:
        prepared = await llm.prepare("Once upon a time", params)
        params.max_tokens = 1  # the caller's to change
        monkeypatch.setattr(type(llm._inputs._inputs), "prepare", lambda *_: pytest.fail("prepared again"))
        found = []
        for _ in range(2):
            outputs = [output async for output in llm.generate(prepared)]
            found.append(outputs[-1].outputs[0].token_ids)
        with pytest.raises(InvalidRequestError, match="has its parameters already"):
            await anext(llm.generate(prepared, params))
        return found

    assert doors.client.portal is not None
    first, second = doors.client.portal.call(twice)
    assert first == second
    assert len(first) == 3
