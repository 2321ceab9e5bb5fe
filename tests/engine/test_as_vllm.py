"""What scripts written for vLLM do with options, settings and metrics."""

import copy
import inspect
import pickle
from typing import Any, cast

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from quire import LLM, AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from quire.config import engine_args
from quire.entrypoints.as_vllm import Counter, Gauge, UsageContext, Vector
from quire.entrypoints.cli.parser import Parser
from quire.entrypoints.server.metrics import ServingMetrics
from quire.entrypoints.server.prometheus import Figures, HttpCounts, render
from quire.entrypoints.vllm_names import vllm_names
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, NotYetSupportedError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_model_len=128, num_kv_blocks=64, speculative_config={"method": "ngram"})


# ---- options


def test_flags_of_every_option() -> None:
    parser = EngineArgs.add_cli_args(Parser())
    parser.set_defaults(model="some/model")
    parser.add_argument("--max-tokens", type=int)
    defaults = vars(parser.parse_args([]))
    assert defaults.pop("max_tokens") is None
    assert EngineArgs(**defaults) == EngineArgs(model="some/model")
    assert (defaults["max_num_seqs"], defaults["compilation_config"], defaults["cpu_offload_gb"]) == (256, None, None)
    namespace = parser.parse_args(["--max_model_len", "64", "-tp", "2", "--no-enable-prefix-caching", "-O3"])
    args = EngineArgs.from_cli_args(namespace)
    assert args == EngineArgs("some/model", max_model_len=64, tensor_parallel_size=2, enable_prefix_caching=False)
    assert isinstance(args, engine_args.EngineArgs)


def test_a_scripts_own_flags_keep_their_defaults() -> None:
    parser = Parser()
    parser.add_argument("--task", default="own")
    assert EngineArgs.add_cli_args(parser).parse_args([]).task == "own"


def test_a_parser_reads_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--max_model_len=64"])
    assert EngineArgs.add_cli_args(Parser()).parse_args().max_model_len == 64


def test_options_under_vllms_names() -> None:
    args = AsyncEngineArgs(model="demo", num_gpu_blocks_override=8, compilation_config=3, enable_log_requests=True)
    assert args == EngineArgs(num_kv_blocks=8)
    with pytest.raises(ConfigError, match="unknown engine argument 'max_modl_len'. Did you mean 'max_model_len'?"):
        EngineArgs(max_modl_len=4)
    with pytest.raises(NotYetSupportedError, match="^enable_dbo is not supported"):
        EngineArgs(enable_dbo=True)
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer, from 1 to 100000"):
        EngineArgs(max_num_seqs=0)


def test_an_offline_engine_of_options() -> None:
    parser = EngineArgs.add_cli_args(Parser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", "demo", "--max-model-len", "64"]))
    llm = LLM.from_engine_args(args)
    assert vars(llm.llm_engine.config.args) == vars(args)
    assert llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_settings_without_an_engine() -> None:
    read = EngineArgs("demo", max_model_len=64, enable_prefix_caching=False).create_engine_config()
    assert (read.model_config.max_model_len, read.model_config.get_vocab_size()) == (64, 4096)
    assert (read.cache_config.enable_prefix_caching, read.cache_config.num_gpu_blocks) == (False, None)
    assert read.parallel_config.world_size == 1
    with pytest.raises(ConfigError, match="max_model_len = 1000000 is more than"):
        EngineArgs("demo", max_model_len=10**6).create_engine_config()


def test_engines_as_servers_of_their_own_make_them() -> None:
    """With what vLLM's takes besides, and by the settings that it is given there."""
    usage: dict[str, Any] = {"usage_context": UsageContext.API_SERVER, "stat_loggers": None, "start_engine_loop": True}
    args = AsyncEngineArgs(model="demo", max_model_len=64, num_kv_blocks=16)
    for make in (
        lambda: AsyncLLMEngine.from_engine_args(args, **usage),
        lambda: AsyncLLM.from_vllm_config(args.create_engine_config(), disable_log_requests=True, **usage),
        lambda: LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS, enable_multiprocessing=False),
        lambda: LLMEngine.from_vllm_config(vllm_config=args.create_engine_config(usage["usage_context"])),
    ):
        engine = make()
        assert engine.vllm_config.model_config.max_model_len == 64
        engine.shutdown()
    with pytest.raises(NotYetSupportedError, match="^stat_loggers is not supported: stats"):
        AsyncLLM.from_engine_args(args, stat_loggers=[print])


async def _text(args: Any) -> str:
    engine, text = AsyncLLM.from_engine_args(args), ""
    of_vllm: dict[str, Any] = {
        "trace_headers": {"traceparent": "00"},
        "data_parallel_rank": None,
        "prompt_text": "Once",
    }
    try:
        async for output in engine.generate("Once", SamplingParams(temperature=0.0, max_tokens=4), "r", **of_vllm):
            text = output.outputs[0].text
        with pytest.raises(NotYetSupportedError, match="^tokenization_kwargs is not supported here: give"):
            engine.generate("Once", tokenization_kwargs={"truncation": True})
        assert await engine.collective_rpc("reset", None, (), None) == [None]
        assert await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        with pytest.raises(InvalidRequestError, match="^timeout and kwargs are not supported"):
            await engine.collective_rpc("reset", kwargs={"deep": True})
        assert await engine.sleep(mode="keep")
        await engine.wake_up()
    finally:
        engine.shutdown()
    return text


@pytest.mark.slow
def test_an_asynchronous_engine_of_them(llm: LLM) -> None:
    import asyncio

    expected = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)[0].outputs[0].text
    assert asyncio.run(_text(AsyncEngineArgs(model="demo", max_model_len=128))) == expected


@pytest.mark.slow
def test_vectors_of_an_asynchronous_engine(llm: LLM) -> None:
    """Those of LLM, each yielded once; what is aborted has none, and what is wrong is refused as by `generate`."""
    import asyncio

    async def check() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", max_model_len=128))
        try:
            for params in (None, PoolingParams(dimensions=8, normalize=False)):
                [found] = [each async for each in engine.encode("Once", params, "v", trace_headers=None, priority=0)]
                [expected] = llm.encode("Once", params, use_tqdm=False)
                assert torch.equal(found.outputs.data, expected.outputs.data)
                assert (found.request_id, found.finished) == ("v", True)
                assert found.prompt_token_ids == expected.prompt_token_ids
            waiting = asyncio.ensure_future(anext(engine.encode("Once upon", None, "gone"), None))
            await asyncio.sleep(0)
            await asyncio.gather(engine.abort("gone"), waiting)
            with pytest.raises(InvalidRequestError, match="dimensions = 10000 is more than"):
                await anext(engine.encode("Once", PoolingParams(dimensions=10000)))
            with pytest.raises(InvalidRequestError, match="prompt"):
                await anext(engine.encode("Once " * 1000))
            assert engine.num_unfinished == 0
        finally:
            engine.shutdown()

    asyncio.run(check())


def test_requests_with_what_vllms_have_besides(llm: LLM) -> None:
    llm.llm_engine.add_request("traced", "Once", SamplingParams(max_tokens=1), trace_headers={"traceparent": "00"})
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    with pytest.raises(TypeError, match="nonsense"):
        llm.llm_engine.add_request("wrong", "Once", None, nonsense=1)


def test_arguments_that_vllms_llm_takes_besides(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    params, chat, calls = SamplingParams(max_tokens=1), [{"role": "user", "content": "Hi"}], cast(Any, llm)
    assert calls.chat(chat, params, use_tqdm=False, mm_processor_kwargs={"size": 1})[0].outputs[0].token_ids
    assert "mm_processor_kwargs has no effect: prompts are text only" in caplog.text
    assert calls.generate("Once", params, use_tqdm=False, prompt_token_ids=None, guided_options_request=None)
    refused = {"prompt_token_ids": [[5, 6]], "guided_options_request": {"regex": "a"}, "truncate_prompt_tokens": 4}
    for call in (calls.generate, calls.chat, calls.embed, calls.encode, calls.beam_search):
        for name, value in refused.items():
            with pytest.raises(NotYetSupportedError, match=f"^{name} is not an argument"):
                call("Once", **{name: value})
        with pytest.raises(TypeError, match="nonsense"):
            call("Once", nonsense=1)
    assert list(inspect.signature(LLM.generate).parameters)[:3] == ["self", "prompts", "sampling_params"]
    for owner in (llm, llm.llm_engine):
        assert owner.reset_mm_cache() is None


# ---- settings


def test_settings(llm: LLM) -> None:
    engine = llm.llm_engine
    model, cache = engine.model_config, engine.vllm_config.cache_config
    assert (model.max_model_len, model.dtype, model.model) == (128, torch.bfloat16, "demo")
    assert model.get_vocab_size() == model.vocab_size == model.hf_config.vocab_size
    assert model.get_hidden_size() == model.hf_config.hidden_size
    assert model.hf_config.model_type == "llama"
    for read in (model.hf_config, cast(Any, llm.model_config.hf_config), model.hf_text_config):
        assert read["vocab_size"] == read.vocab_size == read.get("vocab_size") == 4096
        assert not hasattr(read, "nonsense")
    assert copy.deepcopy(model.hf_config) == pickle.loads(pickle.dumps(model.hf_config)) == dict(model.hf_config)
    assert (cache.block_size, cache.num_gpu_blocks, engine.cache_config.cache_dtype) == (32, 64, "auto")
    assert (engine.parallel_config.tensor_parallel_size, engine.parallel_config.world_size) == (1, 1)
    assert engine.scheduler_config.max_num_seqs == 256
    assert engine.speculative_config.method == "ngram"
    assert engine.lora_config is None
    for name in ("nonsense", "nonsense_config"):
        with pytest.raises(AttributeError, match=f"'LLMEngine' object has no attribute '{name}'"):
            getattr(engine, name)


def test_settings_of_several_engines_are_the_same() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(max_model_len=64, num_kv_blocks=32))
    assert engine.vllm_config is engine.vllm_config
    assert engine.get_tokenizer() is engine.tokenizer
    assert engine.cache_config.num_gpu_blocks == 32


# ---- metrics


def test_metrics(llm: LLM) -> None:
    llm.generate("One, two, three, one, two,", SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    metrics, stats = llm.get_metrics(), llm.llm_engine.stats()
    by_name = {metric.name: metric for metric in metrics}
    running, queries = by_name["vllm:num_requests_running"], by_name["vllm:prefix_cache_queries"]
    assert isinstance(running, Gauge)
    assert running.value == metrics.num_requests_running == 0
    assert isinstance(queries, Counter)
    assert queries.value == metrics.prefix_cache_queries_total == stats.prefix_cache_queries_total > 0
    drafts, places = by_name["vllm:spec_decode_num_drafts"], by_name["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(drafts, Counter)
    assert stats.speculation is not None
    assert drafts.value == stats.speculation.num_drafts > 0
    assert isinstance(places, Vector)
    assert places.values == stats.speculation.num_accepted_tokens_per_pos
    assert len(by_name) == len(metrics)
    assert running.labels == {"model_name": "demo", "engine": "0"}
    body, _ = render([Figures(ServingMetrics(), [stats], "demo")], HttpCounts(), 1.0)
    served = {family.name: family.type for family in text_string_to_metric_families(body.decode())}
    assert by_name.keys() <= served.keys(), "/metrics has other names"
    kinds = {name: "gauge" if isinstance(metric, Gauge) else "counter" for name, metric in by_name.items()}
    assert kinds == {name: served[name] for name in by_name}
    with pytest.raises(AttributeError):
        metrics.nonsense  # noqa: B018


# ---- what is not there


async def _refusals(engine: AsyncLLM) -> None:
    try:
        with pytest.raises(NotYetSupportedError, match="^AsyncLLM.remove_lora is not supported: a request's"):
            await engine.remove_lora(1)
        assert not hasattr(engine, "nonsense")
        assert not [name for name in vllm_names()["AsyncLLM"] if hasattr(engine, name)], "what is there is not missing"
        settings = engine.vllm_config
        assert (engine.model_config.max_model_len, settings.cache_config.num_gpu_blocks) == (64, 16)
        assert await engine.get_tokenizer() is engine.tokenizer is not None
        assert (await engine.get_model_config()).get_vocab_size() == engine.config.model.vocab_size
        assert await engine.get_vllm_config() is settings
        read: Any = engine.model_config.hf_config
        assert read["vocab_size"] == read.vocab_size == 4096
        assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)
        assert await engine.reset_mm_cache() is None
    finally:
        engine.shutdown()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (False, True, True)
    assert isinstance(engine.dead_error, EngineDeadError)


@pytest.mark.slow
def test_methods_that_are_not_there(llm: LLM) -> None:
    import asyncio

    assert AsyncLLMEngine is AsyncLLM
    asyncio.run(_refusals(AsyncLLM.from_engine_args(EngineArgs(max_model_len=64, num_kv_blocks=16))))
    for owner in (llm, llm.llm_engine):
        assert not [name for name in vllm_names()[type(owner).__name__] if hasattr(owner, name)]
    for owner, name in ((llm, "reward"), (llm, "start_profile"), (llm.llm_engine, "add_lora")):
        with pytest.raises(NotYetSupportedError, match=f"^{type(owner).__name__}.{name} is not supported"):
            getattr(owner, name)
        assert not hasattr(owner, name)


def test_forms_of_content(llm: LLM) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text or p }}]{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in "AB"]}]

    def prompt(form: Any) -> str | None:
        params = SamplingParams(max_tokens=1)
        (output,) = llm.chat(messages, params, False, None, 0, template, form)
        return output.prompt

    assert (prompt("auto"), prompt("openai"), prompt("string")) == ("[A][B]", "[A][B]", "[A][\n][B]")


def test_tools_that_the_template_does_not_show(llm: LLM) -> None:
    messages, params = [{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1)
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(InvalidRequestError, match="^tools: the chat template has no use for them; leave them out, or"):
        llm.chat(messages, params, tools=tools)
    template = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
    assert llm.chat(messages, params, False, chat_template=template, tools=tools)[0].prompt == "[look]"
    assert llm.chat(messages, params, False, tools=[])[0].outputs[0].token_ids


# ---- how texts are tokenized


def test_options_of_the_tokenizer(llm: LLM) -> None:
    params, tokenizer, text = SamplingParams(max_tokens=1), llm.get_tokenizer(), "Once upon a time, in a land far away"
    ids = tokenizer.encode(text)

    def prompt(options: dict[str, Any], given: Any = text) -> list[int]:
        return llm.generate(given, params, use_tqdm=False, tokenization_kwargs=options)[0].prompt_token_ids

    assert prompt({"truncation": True, "max_length": 4}) == [ids[0], *ids[-3:]]
    assert prompt({"truncation": True, "max_length": 4, "truncation_side": "right"}) == ids[:4]
    assert prompt({"truncation": True}, " word" * 500) == [ids[0], *tokenizer.encode(" word" * 126, False)]
    assert prompt({"add_special_tokens": False}, {"prompt": text}) == ids[1:]
    assert prompt({"truncation": True, "max_length": 2}, {"prompt_token_ids": [5, 6, 7]}) == [5, 6, 7]
    wrong: list[Any] = [5, "x", [5], {"return_tensors": "pt"}, {"nope": 1}, {5: 1}]
    for options in wrong:
        with pytest.raises(InvalidRequestError, match=r"^tokenization_kwargs must be a dict of some of add_.*; it is "):
            prompt(options)
    values = {"truncation": "nope", "max_length": "x", "truncation_side": "up", "add_special_tokens": 5}
    for name, value in values.items():
        with pytest.raises(InvalidRequestError, match=f"^{name} must be .*; it is {value!r}.$") as caught:
            prompt({name: value})
        assert caught.value.param == name
    cut: dict[str, Any] = {"truncation": True, "max_length": 4}
    assert llm.embed(text, False, tokenization_kwargs=cut)[0].prompt_token_ids == ids[:4]
    assert llm.encode(text, use_tqdm=False, tokenization_kwargs=cut)[0].prompt_token_ids == ids[:4]
    (chat,) = llm.chat([{"role": "user", "content": text}], params, False, tokenization_kwargs=cut)
    assert chat.prompt_token_ids == tokenizer.encode(chat.prompt or "", False)[-4:]
