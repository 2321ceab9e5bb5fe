"""Every rule of SamplingParams at its edges, and what normalising does."""

import copy
import math
import pickle
import subprocess
import sys
import warnings

import msgspec
import numpy as np
import pytest

from quire.errors import InvalidRequestError, NotYetSupportedError
from quire.pooling_params import PoolingParams
from quire.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

NAN, INF = math.nan, math.inf


def noop(output_ids, logits):
    return logits


VALID = [
    *(("n", v) for v in (1, 2, 16384)),
    *(("best_of", v) for v in (None, 1, 16384)),
    *((f, v) for f in ("presence_penalty", "frequency_penalty") for v in (-2, -2.0, 0, 2.0, 2)),
    *(("repetition_penalty", v) for v in (1e-6, 1, 100.0)),
    *(("temperature", v) for v in (0, 0.0, 0.01, 1, 2, 2.0)),
    *(("top_p", v) for v in (1e-9, 0.5, 1, 1.0)),
    *(("top_k", v) for v in (-1, 0, 1, 10**9)),
    *(("min_p", v) for v in (0, 0.0, 1, 1.0)),
    *(("seed", v) for v in (None, 0, 2**64 - 1, -(2**63))),
    *(("stop", v) for v in ([], ["a"], ["a", "bc"])),
    *(("stop_token_ids", v) for v in ([], [0], [5, 7])),
    *(("bad_words", v) for v in ([], ["a"])),
    *((f, v) for f in ("include_stop_str_in_output", "ignore_eos", "detokenize") for v in (True, False)),
    *((f, v) for f in ("skip_special_tokens", "spaces_between_special_tokens", "speculative") for v in (True, False)),
    *(("max_tokens", v) for v in (None, 1, 10**6)),
    *(("min_tokens", v) for v in (0, 16)),
    *((f, v) for f in ("logprobs", "prompt_logprobs") for v in (None, -1, 0, 20)),
    *(("logit_bias", v) for v in (None, {}, {0: 1.0}, {5: -100.0})),
    *(("allowed_token_ids", v) for v in (None, [0], [3, 1])),
    *(("truncate_prompt_tokens", v) for v in (None, -1, 1)),
    *(("logits_processors", v) for v in (None, [], [noop])),
    *(("output_kind", v) for v in RequestOutputKind),
    *(("extra_args", v) for v in (None, {}, {"a": [1, {"b": "c"}]})),
    ("use_beam_search", False),  # True: see below
    *(("length_penalty", v) for v in (1, 1.0)),
    ("early_stopping", False),
]

INVALID = [
    *(("n", v) for v in (0, -1, 16385, 1.0, True, None, "1")),
    *(("best_of", v) for v in (0, 16385, 2.0, True)),
    *(
        (f, v)
        for f in ("presence_penalty", "frequency_penalty")
        for v in (-2.001, 2.001, NAN, INF, -INF, None, True, "0")
    ),
    *(("repetition_penalty", v) for v in (0, 0.0, -1.0, INF, NAN, None, True)),
    *(("temperature", v) for v in (-1e-9, 2.001, INF, NAN, None, True, "1", 10**400)),
    *(("top_p", v) for v in (0, 0.0, -0.1, 1.001, NAN, INF, None, True)),
    *(("top_k", v) for v in (-2, 1.0, True, None, NAN)),
    *(("min_p", v) for v in (-0.001, 1.001, NAN, None, False)),
    *(("seed", v) for v in (2**64, -(2**63) - 1, 1.0, True, "1")),
    *(("stop", v) for v in ("", [""], ["a", ""], [1], 3, {"a": 1}, b"a")),
    *(("stop_token_ids", v) for v in ([-1], [1.0], [True], ["1"], "12", 3)),
    *(("bad_words", v) for v in ([""], "a", [None])),
    *((f, v) for f in ("include_stop_str_in_output", "ignore_eos", "detokenize") for v in (1, 0, None, "yes")),
    *((f, v) for f in ("skip_special_tokens", "spaces_between_special_tokens", "speculative") for v in (1, None)),
    *(("max_tokens", v) for v in (0, -1, 1.0, True, "16")),
    *(("min_tokens", v) for v in (-1, 17, 1.0, True, None)),
    *((f, v) for f in ("logprobs", "prompt_logprobs") for v in (-2, 1.0, "5")),
    *(("logit_bias", v) for v in ({-1: 1.0}, {"a": 1.0}, {1.5: 1.0}, {True: 1.0}, {1: NAN}, {1: "2"}, {1: True}, [1])),
    ("logit_bias", {"9" * 5000: 1.0}),
    *(("allowed_token_ids", v) for v in ([], [-1], [True], ["1"], 4)),
    *(("truncate_prompt_tokens", v) for v in (-2, 1.0, True)),
    *(("logits_processors", v) for v in ([3], noop, ["noop"])),
    *(("output_kind", v) for v in (0, "DELTA", None, True)),
    *(("extra_args", v) for v in (3, [], "a")),
    *(("use_beam_search", v) for v in (1, None, "yes")),
    *(("length_penalty", v) for v in (-10.001, 10.001, NAN, INF, None, True, "1", 2.0)),
    *(("early_stopping", v) for v in (1, 0, None, "always", True, "never")),
]


@pytest.mark.parametrize(("field", "value"), VALID)
def test_values_within_the_rule_are_taken(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), INVALID)
def test_values_beyond_the_rule_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be .*; it is ") as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.param == field
    assert len(str(caught.value)) < 250


def test_every_field_has_both_edges_tested() -> None:
    fields = set(SamplingParams.__struct_fields__) - {"structured_outputs", "guided_decoding"}
    assert fields == {field for field, _ in VALID} == {field for field, _ in INVALID}


BEAMS = {"use_beam_search": True, "temperature": 0, "best_of": 4, "n": 2}
NO_BEAMS = [
    *(("temperature", v) for v in (0.01, 1.0)),
    *(("top_p", v) for v in (0.5, 0.999)),
    ("top_k", 5),
    ("min_p", 0.1),
    *(("seed", v) for v in (0, 7)),
    *((f, v) for f in ("presence_penalty", "frequency_penalty") for v in (-1.0, 0.5)),
    ("repetition_penalty", 1.1),
    ("logit_bias", {5: 1.0}),
    ("logits_processors", [noop]),
    ("stop", ["a"]),
    *(("prompt_logprobs", v) for v in (0, 3)),
    *(("length_penalty", v) for v in (-10.001, 10.001, NAN)),
    *(("early_stopping", v) for v in (1, 0, None, "always")),
    *(("best_of", v) for v in (0, 1, 16385)),
]


@pytest.mark.parametrize(("field", "value"), NO_BEAMS)
def test_what_beams_do_not_go_with_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be .*; it is ") as caught:
        SamplingParams(**(BEAMS | {field: value}))
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.param == field


def test_what_beams_go_with() -> None:
    params = SamplingParams(
        **BEAMS, length_penalty=-10, early_stopping="never", logprobs=3, min_tokens=2, allowed_token_ids=[5], top_k=-1
    )
    assert params.clone() == params
    assert SamplingParams(**BEAMS, early_stopping=True, logit_bias={}, seed=-1, length_penalty=10).top_k == 0
    assert SamplingParams(use_beam_search=True, temperature=1e-6).temperature == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("beam_width", v) for v in (0, -1, 16385, 2.0, True, None, "2")),
        *(("max_tokens", v) for v in (0, 1.5)),
        ("temperature", 0.7),
        ("ignore_eos", 1),
        ("length_penalty", 11.0),
        ("early_stopping", "often"),
    ],
)
def test_beam_search_params_refuse_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field} must be .*; it is "):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | {field: value}))


def test_beam_search_params_are_sampling_params() -> None:
    asked = BeamSearchParams(4, 9, length_penalty=0.5, early_stopping=True).sampling_params()
    assert (asked.n, asked.best_of, asked.max_tokens, asked.temperature) == (4, None, 9, 0.0)
    assert (asked.use_beam_search, asked.length_penalty, asked.early_stopping) == (True, 0.5, True)
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams(beam_with=4, max_tokens=9)


def test_the_message_holds_value_and_range() -> None:
    with pytest.raises(ValueError, match=r"temperature must be a number in \[0, 2\]; it is 3\.5\."):
        SamplingParams(temperature=3.5)
    with pytest.raises(ValueError, match=r"n must be an integer in \[1, 16384\]; it is 0\."):
        SamplingParams(n=0)


def test_defaults_and_order_are_the_documented_ones() -> None:
    params = SamplingParams()
    assert (params.n, params.best_of, params.temperature, params.top_p, params.top_k) == (1, None, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.stop, params.bad_words) == (16, 0, [], [])
    assert (params.logprobs, params.detokenize, params.output_kind) == (None, True, RequestOutputKind.CUMULATIVE)
    assert SamplingParams(3) == SamplingParams(n=3)
    assert params.stop is not SamplingParams().stop


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens"), ("seeds", "seed")],
)
def test_an_unknown_keyword_names_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r}. Did you mean {meant!r}"):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError):
        SamplingParams(**{name: 1})


def test_too_many_positional_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(*range(100))  # type: ignore[arg-type]


def test_none_and_single_strings_are_lists() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == [0, 1]  # type: ignore[arg-type]


def test_numpy_numbers_become_pythons() -> None:
    params = SamplingParams(
        n=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=np.float64(0.5),
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        stop_token_ids=np.array([4, 5]),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float16(1.0)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(
        2, temperature=0.5, top_p=0.5, ignore_eos=True, stop_token_ids=[4, 5], logit_bias={3: 1}
    )
    assert [type(x) for x in (params.n, params.temperature, params.top_p, params.ignore_eos)] == [
        int,
        float,
        float,
        bool,
    ]
    assert type(params.stop_token_ids[0]) is int
    for field in ("n", "temperature", "ignore_eos"):
        with pytest.raises(InvalidRequestError, match=field):
            SamplingParams(**{field: np.array([1, 1])})
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=np.bool_(True))  # type: ignore[arg-type]


def test_logit_bias_is_clamped_and_takes_jsons_keys() -> None:
    assert SamplingParams(logit_bias={1: 1e9, "2": -INF, 3: 4}).logit_bias == {1: 100.0, 2: -100.0, 3: 4.0}  # type: ignore[dict-item]


def test_seed_minus_one_is_none_and_decides_the_type() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1).sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams(seed=0, temperature=0).sampling_type is SamplingType.GREEDY


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9.9e-6])
def test_greedy_resets_what_it_ignores(temperature: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.2)
    assert params.sampling_type is SamplingType.GREEDY
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize("temperature", [1e-5, 0.00999])
def test_a_tiny_temperature_is_raised_with_a_warning(temperature: float) -> None:
    with pytest.warns(UserWarning, match=f"temperature {temperature} is raised to the lowest, 0.01") as caught:
        assert SamplingParams(temperature=temperature).temperature == 0.01
    assert caught[0].filename == __file__


@pytest.mark.parametrize("given", [dict(n=2), dict(best_of=3), dict(n=2, best_of=2)])
def test_greedy_with_several_sequences_says_so(given: dict) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be 1 for greedy sampling .*; it is [23]"):
        SamplingParams(temperature=0, **given)


def test_rules_between_fields() -> None:
    with pytest.raises(InvalidRequestError, match="best_of must be at least n = 3; it is 2"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(InvalidRequestError, match=r"min_tokens must be in \[0, max_tokens = 4\]; it is 5"):
        SamplingParams(max_tokens=4, min_tokens=5)
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500
    with pytest.raises(InvalidRequestError, match="stop must be empty when detokenize is False"):
        SamplingParams(stop="a", detokenize=False)


def test_structured_outputs_in_any_spelling() -> None:
    schema = {"type": "object"}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == '{"type": "object"}'
    assert params == SamplingParams(structured_outputs={"json": schema})
    assert params == SamplingParams(guided_decoding=GuidedDecodingParams(json='{"type": "object"}', backend="auto"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    for wrong in (5, "x", [schema]):
        with pytest.raises(InvalidRequestError, match=r"^structured_outputs must be "):
            SamplingParams(structured_outputs=wrong)
    with pytest.raises(InvalidRequestError, match=r"^guided_decoding must be None where "):
        SamplingParams(structured_outputs={"json": schema}, guided_decoding={"json": schema})


def test_clone_is_deep_and_checks_again() -> None:
    params = SamplingParams(0 + 2, stop=["a"], logit_bias={1: 2.0}, logits_processors=[noop], allowed_token_ids=[1])
    twin = params.clone()
    assert twin == params
    for field in ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "logits_processors"):
        assert getattr(twin, field) is not getattr(params, field)
    params.top_p = 7.0
    with pytest.raises(InvalidRequestError, match="top_p"):
        params.clone()


def test_travels_by_msgpack_pickle_and_copy() -> None:
    params = SamplingParams(
        2, seed=2**64 - 1, stop="x", logit_bias={3: 1.5}, temperature=0.3, output_kind=RequestOutputKind.DELTA
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    with pytest.raises(msgspec.ValidationError, match="temperature must be"):
        msgspec.json.decode(b'{"temperature": 5.0}', type=SamplingParams)


def test_repr_shows_what_was_set() -> None:
    assert repr(SamplingParams(temperature=0.5, stop="x")) == "SamplingParams(temperature=0.5, stop=['x'])"


def test_generation_defaults_and_what_overrides_them() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "max_new_tokens": 99, "do_sample": True}
    params = SamplingParams.from_generation_defaults(defaults)
    assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=99)
    assert SamplingParams.from_generation_defaults({"repetition_penalty": 1.1}).repetition_penalty == 1.1
    assert SamplingParams.from_generation_defaults(defaults, top_k=5, max_tokens=None).top_k == 5
    assert SamplingParams.from_generation_defaults({}) == SamplingParams()


def test_parameters_of_which_none_is_the_default() -> None:
    """As vLLM's callers pass on what a request may lack; its max_tokens are the context's, too, where they are None."""
    fields = {field: None for field in SamplingParams.__struct_fields__ if field != "max_tokens"}
    assert SamplingParams.from_optional(**fields) == SamplingParams.from_optional() == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    assert SamplingParams.from_optional(n=2, top_p=0.5, stop="x") == SamplingParams(n=2, top_p=0.5, stop=["x"])
    with pytest.raises(InvalidRequestError, match="^temperature must be a number"):
        SamplingParams.from_optional(temperature="hot")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(logprobs=21), "logprobs must be at most max_logprobs = 20"),
        (dict(prompt_logprobs=-1), "prompt_logprobs must be at most max_logprobs = 20"),
        (dict(stop_token_ids=[5, 100]), r"stop_token_ids must be of token ids in \[0, 99\].*it is 100"),
        (dict(allowed_token_ids=[100]), "allowed_token_ids"),
        (dict(logit_bias={100: 1.0}), "logit_bias"),
        (dict(truncate_prompt_tokens=65), "truncate_prompt_tokens must be at most the context length, 64; it is 65"),
        (dict(min_tokens=65, max_tokens=None), "min_tokens"),
    ],
)
def test_rules_that_depend_on_the_model(given: dict, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(**given).verify_against_model(vocab_size=100, max_model_len=64, max_logprobs=20)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_given_as_a_bool(field: str) -> None:
    """vLLM takes True for one alternative."""
    assert [getattr(SamplingParams(**{field: value}), field) for value in (True, False)] == [1, None]


def test_values_at_the_models_limits_are_taken() -> None:
    params = SamplingParams(
        logprobs=20,
        stop_token_ids=[99],
        allowed_token_ids=[99],
        logit_bias={99: 1.0},
        truncate_prompt_tokens=64,
        max_tokens=1000,
    )
    params.verify_against_model(vocab_size=100, max_model_len=64, max_logprobs=20)
    SamplingParams(logprobs=-1, prompt_logprobs=500).verify_against_model(100, 64, max_logprobs=-1)
    SamplingParams(logprobs=-1, prompt_logprobs=-1).verify_against_model(100, 64, max_logprobs=100)


def test_import_is_light() -> None:
    code = "import sys, quire.sampling_params; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_oldest_names_of_structures() -> None:
    assert SamplingParams(guided_regex="a+") == SamplingParams(structured_outputs={"regex": "a+"})
    assert SamplingParams(guided_json={"type": "object"}).structured_outputs == StructuredOutputsParams(
        json='{"type": "object"}'
    )
    assert SamplingParams(guided_choice=["a"], guided_grammar=None).structured_outputs == StructuredOutputsParams(
        choice=["a"]
    )
    assert SamplingParams(guided_json=None) == SamplingParams()
    with pytest.raises(InvalidRequestError, match=r"2 are given \(json, regex\)"):
        SamplingParams(guided_json="{}", guided_regex="a")
    for fields, param, reason in [
        ({"guided_regex": ""}, "guided_regex", "guided_regex must be a non-empty string"),
        ({"guided_json": 3}, "guided_json", "guided_json must be a dict, or JSON text"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "guided_json and guided_regex must have exactly one"),
        ({"guided_decoding": {}}, "guided_decoding", "guided_decoding must have exactly one"),
        ({"guided_decoding": {"regex": ""}}, "guided_decoding", r"guided_decoding\.regex must be a non-empty string"),
        ({"structured_outputs": {}}, "structured_outputs", "structured_outputs must have exactly one"),
    ]:
        with pytest.raises(InvalidRequestError, match=f"^{reason}") as caught:
            SamplingParams(**fields)
        assert caught.value.param == param
    with pytest.raises(InvalidRequestError, match="^guided_decoding must be "):
        SamplingParams(guided_json="{}", guided_decoding={"regex": "a"})
    with pytest.raises(InvalidRequestError, match="^guided_decoding must be None where "):
        SamplingParams(guided_json="{}", structured_outputs={"regex": "a"})
    with pytest.raises(TypeError, match="guided_jsn"):
        SamplingParams(guided_jsn="{}")


# All that vLLM 0.32's SamplingParams has and this has not, with what it is there by default.
NEUTRAL = {
    **{"skip_clone": False, "flat_logprobs": False, "stream_interval": None, "output_text_buffer_length": 0},
    **{"logprob_token_ids": None, "prompt_logprob_token_ids": None, "prompt_logprob_start": None},
    **{"skip_reading_prefix_cache": None, "thinking_token_budget": None, "repetition_detection": None},
    **{"watermarking": None, "routed_experts_prompt_start": 0, "trace_decode_token_ids": None},
}


def test_vllms_parameters_that_ask_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(top_p=0.5, **NEUTRAL) == SamplingParams(top_p=0.5)
    assert SamplingParams(skip_clone=True, prompt_logprob_start=0) == SamplingParams()
    assert SamplingParams(flat_logprobs=True, stream_interval=4) == SamplingParams(), "with a warning of each"
    assert "flat_logprobs has no effect: logprobs are a list" in caplog.text
    assert BeamSearchParams(2, 3, watermarking=None) == BeamSearchParams(2, 3)
    assert PoolingParams(step_tag_id=None, extra_kwargs=None, requires_token_ids=False) == PoolingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking_token_budget", 0),
        ("repetition_detection", {"min_count": 2}),
        ("watermarking", True),
        ("logprob_token_ids", [1]),
    ],
)
def test_vllms_parameters_that_are_refused(name: str, value: object) -> None:
    with pytest.raises(NotYetSupportedError, match=f"^{name} is not supported"):
        SamplingParams(**{name: value})
    with pytest.raises(TypeError, match="no argument 'top_pp'. Did"):
        SamplingParams(**{"top_pp": 1, **NEUTRAL})


def test_extra_args_stay_with_the_parameters() -> None:
    params = SamplingParams(extra_args={"tag": "a"})
    assert params.clone().extra_args == {"tag": "a"}
    assert msgspec.convert(msgspec.to_builtins(params), SamplingParams) == params
