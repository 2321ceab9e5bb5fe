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
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.options import ServerArgs
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

# Conversations, and what goes with them; `tokenize` gives those that no prompt can be made of.
SAYS_HELLO = [{"role": "user", "content": "Hello"}]
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text_too_long": ([{"role": "user", "content": "word " * 200}], {}),
    "text_not_worth_encoding": ([{"role": "user", "content": "word " * 100_000}], {}),
    "unknown_to_the_model": ([{"role": "user", "content": "Hello <|extra|> there"}], {}),
    "too_many_kept": (SAYS_HELLO, {"truncate_prompt_tokens": 500}),
    "none_kept": (SAYS_HELLO, {"truncate_prompt_tokens": 0}),
    "stop_token": (SAYS_HELLO, {"stop_token_ids": [4096]}),
    "bias": (SAYS_HELLO, {"logit_bias": {4097: 1.0}}),
}
UNWRITABLE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a_picture": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}),
    "no_text": ([{"role": "user", "content": [{"type": "text"}]}], {}),
    "refused_by_the_template": (SAYS_HELLO, {"chat_template": "{{ raise_exception('no such role') }}"}),
    "too_much_for_the_template": (SAYS_HELLO, {"chat_template": "{{ 1 / 0 }}"}),
    "no_template": (SAYS_HELLO, {"chat_template": "{% if %}"}),
    "nothing_to_go_on_with": (SAYS_HELLO, {"add_generation_prompt": True, "continue_final_message": True}),
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
        return self._refusal("/v1/completions", {"prompt": prompt, "max_tokens": 1} | options)

    def offline_chat(self, messages: Any, params: SamplingParams, **options: Any) -> tuple[str, str | None, str | None]:
        with pytest.raises(InvalidRequestError) as caught:
            self.llm.chat(messages, params, use_tqdm=False, **options)
        # Over HTTP there is no field of this name: the prompt was made of these.
        param = "messages" if caught.value.param == "prompt" else caught.value.param
        return str(caught.value), param, caught.value.code

    def http_chat(self, messages: Any, options: dict[str, Any]) -> tuple[str, str | None, str | None]:
        return self._refusal("/v1/chat/completions", {"messages": messages, "max_tokens": 1} | options)

    def http_tokenize(self, messages: Any, options: dict[str, Any]) -> tuple[str, str | None, str | None]:
        return self._refusal("/tokenize", {"messages": messages} | options)

    def _refusal(self, path: str, body: dict[str, Any]) -> tuple[str, str | None, str | None]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 400, answer.text
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
    server_args = ServerArgs(trust_request_chat_template=True)
    with TestClient(build_app(ServerState(async_llm, server_args, ["demo"]))) as client:
        yield Doors(LLM(**options), async_llm, client)
    async_llm.shutdown()


@pytest.mark.parametrize("name", PROMPTS)
def test_one_text_for_all(doors: Doors, name: str) -> None:
    prompt, options = PROMPTS[name]
    expected = doors.offline(prompt, options)
    assert doors.asynchronous(prompt, options) == expected
    assert doors.http(prompt, options) == expected


@pytest.mark.parametrize("name", CHATS)
def test_one_text_for_all_chats(doors: Doors, name: str) -> None:
    messages, options = CHATS[name]
    assert doors.http_chat(messages, options) == doors.offline_chat(messages, SamplingParams(max_tokens=1, **options))


@pytest.mark.parametrize("name", UNWRITABLE)
def test_one_text_where_no_prompt_can_be_made(doors: Doors, name: str) -> None:
    messages, options = UNWRITABLE[name]
    expected = doors.offline_chat(messages, SamplingParams(max_tokens=1), **options)
    assert doors.http_chat(messages, options) == expected
    assert doors.http_tokenize(messages, options) == expected


def test_good_prompts_pass(doors: Doors) -> None:
    doors.llm.generate(["Hello", [5] * 127], SamplingParams(max_tokens=1), use_tqdm=False)
    for prompt in ("Hello", [5] * 127):
        assert doors.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200


def test_a_prepared_prompt_is_not_looked_at_again(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, params = doors.async_llm, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

    async def twice() -> list[list[int]]:
        prepared = await llm.prepare("Once upon a time", params)
        params.max_tokens = 1  # the caller's to change
        monkeypatch.setattr(type(llm._inputs.processor), "prepare", lambda *_: pytest.fail("prepared again"))
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
