"""Pinned prefixes through the whole engine: there when they are needed, and no matter for any answer."""

import asyncio

import msgspec
import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.engine.async_llm import AsyncLLM, AsyncOptions
from quire.errors import InvalidRequestError
from quire.protocol.cache import PinnedPrefix
from quire.protocol.core import Call, Command, Event, Reply

SYSTEM = list(range(100, 150))
BLOCK = 16


def make(**options) -> LLM:
    options = {"num_kv_blocks": 40, "max_model_len": 256, "block_size": BLOCK, **options}
    return LLM("demo", show_progress=False, **options)


def generate(llm: LLM, *prompts: list[int], max_tokens: int = 4):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def test_a_pinned_prefix_is_there_when_it_is_needed() -> None:
    llm = make()
    question = [*SYSTEM, 7, 8, 9]
    (alone,) = generate(llm, question)
    pinned = llm.pin_prefix({"prompt_token_ids": SYSTEM}, name="system")
    assert (pinned.name, pinned.num_tokens, pinned.num_blocks) == ("system", 48, 3)
    assert llm.pinned_prefixes() == [pinned]
    # So many that they evict all else, and preempt each other.
    generate(llm, *[[1_000 + number] * 100 for number in range(6)], max_tokens=120)
    assert llm.get_metrics().num_preemptions_total > 0
    (again,) = generate(llm, question)
    assert (alone.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids
    assert again.outputs[0].logprobs == alone.outputs[0].logprobs
    assert llm.unpin_prefix("system")
    assert not llm.unpin_prefix("system")
    generate(llm, *[[2_000 + number] * 200 for number in range(4)])
    (later,) = generate(llm, question)
    assert later.num_cached_tokens == 0
    llm.llm_engine.check_integrity()


def test_what_cannot_be_pinned_leaves_nothing_pinned() -> None:
    llm = make()
    with pytest.raises(InvalidRequestError, match="less than a KV block"):
        llm.pin_prefix({"prompt_token_ids": [5] * 10})
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.pin_prefix({"prompt_token_ids": []})
    llm.pin_prefix({"prompt_token_ids": SYSTEM, "cache_salt": "mine"}, name="a")
    assert generate(llm, [*SYSTEM, 1])[0].num_cached_tokens == 0, "another salt"
    with pytest.raises(InvalidRequestError, match="'a' is pinned already"):
        llm.pin_prefix({"prompt_token_ids": SYSTEM}, name="a")
    llm.pin_prefix({"prompt_token_ids": [6] * 200}, name="b")
    with pytest.raises(InvalidRequestError, match="of 40 KV blocks would be pinned, and at most 20 may be"):
        llm.pin_prefix({"prompt_token_ids": [8] * 200})
    assert [prefix.name for prefix in llm.pinned_prefixes()] == ["a", "b"]
    assert llm.reset_prefix_cache()
    assert llm.pinned_prefixes() == []
    llm.llm_engine.check_integrity()
    with pytest.raises(InvalidRequestError, match=r"^name must be a string, .*; it is \['a'\]"):
        llm.pin_prefix({"prompt_token_ids": SYSTEM}, name=["a"])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="^name must be a string, as pin_prefix returned it; it is None"):
        llm.unpin_prefix(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="enable_prefix_caching"):
        make(enable_prefix_caching=False).pin_prefix({"prompt_token_ids": SYSTEM})


def test_pins_of_an_engine_in_a_thread() -> None:
    async def run() -> None:
        args = EngineArgs(model="demo", num_kv_blocks=40, max_model_len=256, block_size=BLOCK)
        llm = AsyncLLM.from_engine_args(args, options=AsyncOptions(engine="thread"))
        try:
            pinned = await llm.pin_prefix({"prompt_token_ids": SYSTEM})
            assert (pinned.num_tokens, pinned.num_blocks) == (48, 3)
            assert await llm.pinned_prefixes() == [pinned]
            with pytest.raises(InvalidRequestError, match="is pinned already") as refused:
                await llm.pin_prefix({"prompt_token_ids": SYSTEM}, pinned.name)
            assert refused.value.param == "name"
            assert await llm.unpin_prefix(pinned.name)
            assert not await llm.unpin_prefix(pinned.name)
            await llm.check_integrity()
        finally:
            llm.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("command", [Call(1, "pin_prefix", ["a", [1, 2], "salt"]), Call(3, "pinned_prefixes")])
def test_commands_pass_a_border_of_processes(command: Command) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    prefix = PinnedPrefix("a", 32, 2)
    for reply in (Reply(1, prefix), Reply(1, [prefix])):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Event) == reply
