"""Outputs: fields, times, and a repr a person can read."""

import copy
import dataclasses
import pickle

from quire.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def make_output(num_tokens: int = 3) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="a b",
        token_ids=list(range(num_tokens)),
        cumulative_logprob=-1.5,
        logprobs=[{i: Logprob(-0.5, 1, "a")} for i in range(num_tokens)],
        finish_reason="stop",
        stop_reason="b",
    )
    return RequestOutput("r-1", "hello", [5, 6], None, [completion], True, RequestMetrics(1.0, 1.5, 2.0, 4.0), 0)


def test_fields_are_in_the_documented_order() -> None:
    output = make_output()
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == (
        "r-1",
        "hello",
        [5, 6],
        True,
    )
    assert (output.prompt_logprobs, output.num_cached_tokens, output.lora_request) == (None, 0, None)
    assert output.outputs[0].finished()
    assert not CompletionOutput(0, "", []).finished()
    assert Logprob(-0.25) == Logprob(logprob=-0.25, rank=None, decoded_token=None)
    assert pickle.loads(pickle.dumps(output)) == output


def test_the_time_in_the_queue_is_a_difference_or_none() -> None:
    assert RequestMetrics(1.0).time_in_queue is None
    assert RequestMetrics(1.0, 1.5, 2.0, 4.0).time_in_queue == 0.5
    assert RequestMetrics(1.0).first_token_latency is None
    assert RequestMetrics(1.0, 1.5, 2.0, 4.0).first_token_latency == 1.0


def test_vllms_names_of_what_outputs_tell() -> None:
    metrics, output = RequestMetrics(1.0, 1.5, 2.0, 4.0), make_output(3)
    names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "last_token_time")
    assert [getattr(metrics, name) for name in names] == [1.0, 1.5, 2.0, 4.0, 4.0]
    assert (output.kv_transfer_params, output.encoder_prompt, output.encoder_prompt_token_ids) == (None, None, None)


def test_repr_says_what_matters_and_cuts_what_is_long() -> None:
    shown = repr(make_output(500))
    for words in ("RequestOutput(request_id='r-1'", "text='a b'", "finish_reason='stop'", "... 500 tokens]"):
        assert words in shown
    assert "lora_request" not in shown
    assert len(shown) < 600
    assert "token_ids=[0, 1, 2]" in repr(make_output(3))


def test_a_completion_is_a_dataclass_as_vllm_s_is() -> None:
    output = CompletionOutput(0, "so", [1], -1.0, [{1: Logprob(-1.0)}])
    told = dataclasses.asdict(output)
    assert (
        told.keys() == {field.name for field in dataclasses.fields(output)} == set(CompletionOutput.__struct_fields__)
    )
    assert told["logprobs"] == [{1: {"logprob": -1.0, "rank": None, "decoded_token": None}}]
    assert dataclasses.replace(output, text="it goes").text == "it goes"
    assert pickle.loads(pickle.dumps(output)) == copy.copy(output) == output
