"""`LLM` as a user of the offline API sees it, on the bundled model."""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import quire
from quire import LLM, SamplingParams
from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, NotYetSupportedError
from quire.structured_outputs import StructuredOutputsParams

PROMPTS = ["Once upon a time", "The old captain looked at the sea and", "In the morning"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="demo", max_num_seqs=8, debug=True, show_progress=False)


@pytest.fixture(autouse=True)
def idle_engine(request: pytest.FixtureRequest):
    """Whatever a test does, it leaves nothing behind."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").llm_engine
        assert not engine.has_unfinished_requests()
        assert engine.stats().kv_cache_usage_perc == 0
        engine.check_integrity()


def greedy(n: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **options)


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    several = llm.generate(forms, greedy(5), use_tqdm=False)
    alone = [llm.generate(form, greedy(5), use_tqdm=False)[0] for form in forms]
    texts = {o.outputs[0].text for o in several + alone}
    assert len(texts) == 1
    assert texts.pop()
    assert [o.prompt for o in several] == [PROMPTS[0], None, PROMPTS[0], None]
    assert all(o.prompt_token_ids == ids for o in several)


def test_results_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [greedy(9), greedy(3), greedy(6)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 3, 6]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert llm.generate([], greedy(1)) == []


def test_threads_take_turns(llm: LLM) -> None:
    """As those of a web framework do, which has one model for all its handlers."""

    def run(number: int) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS[: number % 3 + 1], greedy(12), use_tqdm=False)]

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(run, range(8)))
    assert together == [run(number) for number in range(8)]


@pytest.mark.slow
def test_every_call_takes_its_turn(llm: LLM) -> None:
    """What one thread asks of the engine waits while another's prompts run."""
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def hold(output_ids: list[int], logits: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return logits

    def tell(name: str, call: Callable[[], Any]) -> Any:
        found = call()
        order.append(name)
        return found

    calls: dict[str, Callable[[], Any]] = {
        "pin": lambda: llm.pin_prefix(PROMPTS[1] * 9, "own"),
        "pins": llm.pinned_prefixes,
        "unpin": lambda: llm.unpin_prefix("own"),
        "reset": llm.reset_prefix_cache,
        "call": lambda: llm.collective_rpc(type),
        "apply": lambda: llm.apply_model(type),
        "is asleep": llm.is_sleeping,
        "sleep": lambda: (llm.sleep(), llm.wake_up()),
        "weights": lambda: llm.update_weights(Path(quire.__file__).parent / "demo"),
    }
    with ThreadPoolExecutor(len(calls) + 1) as threads:
        params = greedy(4, logits_processors=[hold])
        answer = threads.submit(tell, "generate", lambda: llm.generate(PROMPTS[0], params, use_tqdm=False))
        assert begun.wait(60)
        found = {name: threads.submit(tell, name, call) for name, call in calls.items()}
        time.sleep(0.3)  # in which each of them could have done its work
        go_on.set()
        assert len(answer.result()[0].outputs[0].token_ids) == 4
        results = {name: one.result() for name, one in found.items()}
    assert order[0] == "generate"
    assert (results["sleep"], results["weights"], results["reset"]) == ((True, None), True, True)
    llm.unpin_prefix("own")


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (output,) = llm.generate("It was a dark night", SamplingParams(seed=3, max_tokens=40), use_tqdm=False)
    completion = output.outputs[0]
    tokenizer = llm.get_tokenizer()
    whole = tokenizer.decode(list(output.prompt_token_ids or []) + list(completion.token_ids), skip_special_tokens=True)
    assert whole.endswith(completion.text)
    assert completion.text.startswith((" ", ",", "."))


def test_default_parameters_come_from_the_model(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    defaults = llm.model_config.generation_defaults
    assert defaults, "the bundled model has sampling defaults"
    assert params.temperature == defaults["temperature"]
    assert llm.generate("Hello", use_tqdm=False)[0].outputs[0].token_ids


def test_stop_string_and_stop_token(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[1], greedy(30), use_tqdm=False)
    text, ids = free.outputs[0].text, list(free.outputs[0].token_ids)
    stop = text[10:14]
    (cut,) = llm.generate(PROMPTS[1], greedy(30, stop=stop), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate(PROMPTS[1], greedy(30, stop=[stop], include_stop_str_in_output=True), use_tqdm=False)
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]
    (by_id,) = llm.generate(PROMPTS[1], greedy(30, stop_token_ids=[ids[7]]), use_tqdm=False)
    first = ids.index(ids[7])
    assert list(by_id.outputs[0].token_ids) == ids[: first + 1]
    assert (by_id.outputs[0].finish_reason, by_id.outputs[0].stop_reason) == ("stop", ids[7])


def test_n_and_best_of(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, logprobs=0)
    (three,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in three.outputs}) == 3
    best = params.clone()
    best.n, best.best_of = 1, 3
    (one,) = llm.generate(PROMPTS[0], best, use_tqdm=False)
    ranked = sorted(three.outputs, key=lambda c: -(c.cumulative_logprob or 0.0))
    assert len(one.outputs) == 1
    assert list(one.outputs[0].token_ids) == list(ranked[0].token_ids)
    silent = SamplingParams(n=1, best_of=3, temperature=1.0, seed=1, max_tokens=12)
    (same,) = llm.generate(PROMPTS[0], silent, use_tqdm=False)
    assert list(same.outputs[0].token_ids) == list(ranked[0].token_ids)
    assert same.outputs[0].logprobs is None


def test_more_sequences_than_fit_at_once(llm: LLM) -> None:
    params = SamplingParams(n=20, temperature=1.0, seed=1, max_tokens=4)
    (many,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    few = params.clone()
    few.n = 2
    (two,) = llm.generate(PROMPTS[0], few, use_tqdm=False)
    assert [len(c.token_ids) > 0 for c in many.outputs] == [True] * 20
    assert [list(c.token_ids) for c in many.outputs[:2]] == [list(c.token_ids) for c in two.outputs]


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_fails_tells_its_prompts_logprobs_however_it_was_cut(llm: LLM, n: int) -> None:
    grammar = StructuredOutputsParams(json_object=True)
    params = SamplingParams(n=n, prompt_logprobs=1, allowed_token_ids=[283], structured_outputs=grammar)
    prompt = " ".join(PROMPTS)
    (whole,) = llm.generate(prompt, params, use_tqdm=False)
    (cut,) = LLM("demo", max_num_batched_tokens=8, max_num_seqs=8).generate(prompt, params, use_tqdm=False)
    assert {one.finish_reason for one in whole.outputs + cut.outputs} == {"error"}
    assert whole.prompt_logprobs is not None
    assert None not in whole.prompt_logprobs[1:]
    assert cut.prompt_logprobs == whole.prompt_logprobs


def test_logprobs(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], greedy(4, logprobs=3, prompt_logprobs=1), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.cumulative_logprob is not None
    total = 0.0
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1
        assert entry[token].logprob == max(x.logprob for x in entry.values())
        assert len(entry) == 3
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    prompt = output.prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert output.prompt_token_ids is not None
    assert len(prompt) == len(output.prompt_token_ids)
    assert all(t in (p or {}) for t, p in zip(output.prompt_token_ids[1:], prompt[1:], strict=True))


def test_unseeded_requests_differ_but_repeat_from_run_to_run() -> None:
    def texts() -> list[str]:
        one = LLM(model="demo", max_num_seqs=8, show_progress=False)
        params = SamplingParams(temperature=1.0, max_tokens=12)
        outputs = one.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
        return [o.outputs[0].text for o in outputs]

    first = texts()
    assert first[0] != first[1]
    assert texts() == first


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Good morning, captain. Where are we going?"}]
    params = SamplingParams(temperature=0, max_tokens=60)
    (one,) = llm.chat(conversation, params, use_tqdm=False)
    both = llm.chat([conversation, conversation], params, use_tqdm=False)
    assert one.outputs[0].text.strip()
    assert [o.outputs[0].text for o in both] == [one.outputs[0].text] * 2
    (other,) = llm.chat(conversation, params, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert other.prompt == conversation[0]["content"]
    for wrong in (5, [], "x", [5], conversation[0], [conversation, 5]):
        with pytest.raises(
            InvalidRequestError, match=r"messages(\[1\] \(of 2\))?(: messages)? must be a list of at least one"
        ):
            llm.chat(wrong, params)  # type: ignore[arg-type]
    for name in ("chat_template", "chat_template_kwargs", "chat_template_content_format"):
        with pytest.raises(InvalidRequestError, match=f"^{name} must be .*; it is 5.$") as caught:
            llm.chat(conversation, params, use_tqdm=False, **{name: 5})  # type: ignore[arg-type]
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([5, 10**9], r"token id 1000000000 \(place 1\) is out of the vocabulary"),
        ([5, -1], "out of the vocabulary"),
        ({"prompt_token_ids": [5, 1.5]}, "ids must be integers"),
        ({"prompt_token_ids": [5, True]}, "ids must be integers"),
        ({"prompt": 5}, "got int"),
        ({"text": "x"}, "unknown prompt entry 'text'"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}, 5: 1}, "unknown prompt entry 5; models take text only"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a non-empty string"),
        ([7] * 5000, "maximum context length"),
        (b"Hi", "got bytes"),
        ({"prompt_token_ids": b"Hi"}, "got bytes"),
        ({"prompt_token_ids": np.array([[1, 2], [3, 4]])}, "ids must be integers"),
        ({"prompt_token_ids": 5}, "must be a list of ints, got int"),
        (None, "got NoneType"),
        (7.5, "got float"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_work(llm: LLM, prompt, message: str) -> None:
    if prompt != []:
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate(prompt, greedy(1))
    with pytest.raises(ValueError, match=rf"prompts\[1\] \(of 3\): .*{message}"):
        llm.generate(["fine", prompt, "fine"], greedy(1))
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_empty_text_is_what_every_text_begins_with(llm: LLM) -> None:
    bos = llm.get_tokenizer().encode("")
    assert len(bos) == 1
    for prompt in ("", {"prompt": ""}, bos):
        (output,) = llm.generate(prompt, greedy(3), use_tqdm=False)
        assert output.prompt_token_ids == bos
        assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(InvalidRequestError, match="the prompt is empty: this tokenizer makes no token of it"):
        llm.chat([{"role": "user", "content": ""}], greedy(3), chat_template="{{ messages[0].content }}")


def test_entries_of_a_prompt_that_are_none_ask_for_nothing(llm: LLM) -> None:
    given = [{"prompt": "Hello", "multi_modal_data": None}, {"prompt": "Hello", "prompt_embeds": None}, "Hello"]
    a, b, c = (each.outputs[0].token_ids for each in llm.generate(given, greedy(3), use_tqdm=False))  # type: ignore
    assert a == b == c


def test_token_ids_may_come_in_an_array(llm: LLM) -> None:
    (listed,) = llm.generate([5, 6, 7], greedy(3), use_tqdm=False)
    for given in (np.array([5, 6, 7]), (5, 6, 7), list(np.array([5, 6, 7], np.uint16))):
        (one,) = llm.generate(given, greedy(3), use_tqdm=False)  # type: ignore[arg-type]
        assert one.prompt_token_ids == [5, 6, 7]
        assert [type(i) for i in one.prompt_token_ids] == [int] * 3
        assert one.outputs == listed.outputs
    with pytest.raises(InvalidRequestError, match="ids must be integers"):
        llm.generate(np.array([[5, 6], [7, 8]]), greedy(1))  # type: ignore[arg-type]


@pytest.fixture
def large_tokenizer(tmp_path: Path) -> str:
    """A tokenizer with one token more than the demo model has rows."""
    files = Path(quire.__file__).parent / "demo"
    shutil.copy(files / "tokenizer_config.json", tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|extra|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_a_text_with_a_token_that_the_model_lacks_is_refused_alone(large_tokenizer: str) -> None:
    llm = LLM("demo", tokenizer=large_tokenizer, num_kv_blocks=64)
    engine = llm.llm_engine
    engine.add_request("innocent", PROMPTS[0], greedy(5))
    engine.step()
    texts: list[Any] = ["Hello <|extra|> there", {"prompt": "<|extra|>"}, "<|extra|>" * 5]
    for text in texts:
        for params in (greedy(1), SamplingParams(prompt_logprobs=1, max_tokens=1)):
            with pytest.raises(
                InvalidRequestError, match=r"'<\|extra\|>' \(id 4096\).*vocabulary.*0 to 4095"
            ) as caught:
                engine.add_request("stranger", text, params)
            assert caught.value.param == "prompt"
    # A word that the model has no token for can't come anyway.
    (free,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=5, bad_words=["<|extra|>"]))
    assert len(free.outputs[0].token_ids) == 5
    engine.check_integrity()


def test_wrong_counts_and_types(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 sampling params for 3 prompts"):
        llm.generate(PROMPTS, [greedy(1), greedy(1)])
    with pytest.raises(InvalidRequestError, match="1 priorities for 3 prompts"):
        llm.generate(PROMPTS, greedy(1), priority=[1])
    with pytest.raises(InvalidRequestError, match="must be SamplingParams; it is {"):
        llm.generate("x", {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest or a .*Request; it is <object"):
        llm.generate("x", greedy(1), lora_request=object())  # type: ignore[arg-type]


def test_unknown_and_bad_options() -> None:
    with pytest.raises(ConfigError, match="'max_modellen'.*'max_model_len'"):
        LLM(model="demo", max_modellen=3)
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer, from 1 to 100000, got 0"):
        LLM(model="demo", max_num_seqs=0)
    with pytest.raises(ConfigError, match="^gpu_memory_utilization/.* must be a number, over 0, at most 1, got 1.5"):
        LLM(model="demo", gpu_memory_utilization=1.5)
    with pytest.raises(NotYetSupportedError, match="enable_dbo"):
        LLM(model="demo", enable_dbo=True)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(model="demo", max_model_len=10**6)


def test_an_unknown_architecture_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    with pytest.raises(
        ModelLoadError, match="'MambaForCausalLM' .* is not supported; supported are .*LlamaForCausalLM"
    ):
        LLM(model=str(tmp_path), load_format="dummy", hf_overrides=sizes)


def test_a_vllm_script_with_its_usual_options_runs(caplog: pytest.LogCaptureFixture) -> None:
    one = LLM(
        "demo",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.2,
        swap_space=4,
        enforce_eager=True,
        trust_remote_code=True,
        max_model_len=128,
        seed=3,
        dtype="half",
        show_progress=False,
    )
    assert "never runs code that comes with a model" in caplog.text
    (output,) = one.generate(PROMPTS[0], SamplingParams(temperature=0.8, top_p=0.95), use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_skip_tokenizer_init() -> None:
    one = LLM(model="demo", skip_tokenizer_init=True, show_progress=False)
    (output,) = one.generate([[5, 6, 7]], greedy(3), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == ""
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        one.generate("text", greedy(1))
    with pytest.raises(InvalidRequestError, match="stop needs a tokenizer"):
        one.generate([[5]], SamplingParams(stop="x"))


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(3))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "input: " in shown
    assert "output: " in shown


def test_a_raising_logits_processor_ends_only_its_own_request(llm: LLM) -> None:
    def broken(output_ids, logits):
        raise RuntimeError("boom")

    expected = [o.outputs[0].text for o in llm.generate(PROMPTS, greedy(5), use_tqdm=False)]
    params = [greedy(5), greedy(5, logits_processors=[broken]), greedy(5)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "boom" in str(outputs[1].outputs[0].stop_reason)
    assert [outputs[0].outputs[0].text, outputs[2].outputs[0].text] == [expected[0], expected[2]]


def test_interrupt_leaves_nothing_behind(llm: LLM) -> None:
    def interrupt(output_ids, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(5, logits_processors=[interrupt]), use_tqdm=False)


def test_interrupt_while_requests_are_queued_leaves_none_of_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, queued = llm.llm_engine.submit, []

    def interrupt(entry):
        submit(entry)
        queued.append(entry)
        if len(queued) == 2:
            raise KeyboardInterrupt  # as the shield does when it is left

    monkeypatch.setattr(llm.llm_engine, "submit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(5), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm.llm_engine.core.has_unfinished()


def test_priority_needs_the_policy_of_priorities(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="priority=5 needs an engine with scheduling_policy='priority'"):
        llm.generate("Once", greedy(1), priority=5)
    assert llm.generate("Once", greedy(1), priority=0, use_tqdm=False)


@pytest.mark.parametrize("name", ["reward", "token_embed", "token_classify"])
def test_methods_that_are_not_there_yet_say_so(llm: LLM, name: str) -> None:
    with pytest.raises(NotYetSupportedError, match=f"^LLM.{name} is not supported yet: models here generate, embed"):
        getattr(llm, name)("Once")
    assert not hasattr(llm, name)
    with pytest.raises(
        NotYetSupportedError, match="^LLM.start_profile is not supported: 'quire bench step MODEL' shows"
    ):
        llm.start_profile()
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'xyzzy'"):
        llm.xyzzy  # noqa: B018


@pytest.mark.parametrize("options", [{"num_kv_blocks": 2**62}, {"num_kv_blocks": 2**48, "block_size": 2**14}])
def test_a_cache_that_no_memory_holds(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="there is no memory for a KV cache"):
        LLM("demo", skip_tokenizer_init=True, **options)
