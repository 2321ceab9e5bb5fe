"""The compiled sampler against its numpy twin: the same tokens, errors and log-probabilities, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.native.library import Target, default_target
from quire.protocol.step import Failure, FailureKind
from quire.sampling import native, sampler
from quire.sampling.lanes import Draw
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import SamplerOutput
from quire.sampling.state import SamplingState, masks_of
from quire.sampling_params import SamplingParams
from tests.tokens import tokens_of

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="needs the compiled library"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, of logits near the largest float
]
# The level stays the same for all examples of a test.
same_level = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def sample(logits, states, num_samples, target=None) -> SamplerOutput:
    return sampler.sample(
        logits, [Draw(*of) for of in zip(states, range(len(states)), num_samples, strict=True)], target
    )


def in_numpy(function: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return function(*arguments)


def random_logits(generator: np.random.Generator, size: int, kind: str) -> np.ndarray:
    row = generator.standard_normal(size).astype(np.float32) * 3
    if kind == "ties":
        row = generator.integers(-4, 4, size).astype(np.float32) * np.float32(0.5)
        row[row == 0] *= np.float32(-1) ** generator.integers(0, 2, int((row == 0).sum()))  # both zeros
    elif kind == "equal":
        row[:] = -2.5
    elif kind == "masked":
        row[generator.random(size) < 0.9] = -np.inf
        row[size // 2] = 1.0
    elif kind == "all masked":
        row[:] = -np.inf
    elif kind == "nan":
        row[generator.integers(size)] = np.nan * (-1) ** int(generator.integers(2))
        row[generator.integers(size)] = np.inf
    elif kind == "infinite":
        row[generator.integers(size)] = np.inf
        row[generator.integers(size)] = -np.inf
    elif kind == "huge":
        row *= np.float32(1e37)
    elif kind == "tiny":
        row *= np.float32(1e-40)
    elif kind == "peaked":
        row[generator.integers(size)] = 40.0
    elif kind == "flat":
        row *= np.float32(1e-3)
    return row


KINDS = ["plain", "plain", "ties", "ties", "equal", "masked", "all masked", "nan", "infinite", "huge", "tiny"]
KINDS += ["peaked", "flat"]
PARAMETERS = dict(
    temperature=[0.0, 0.01, 0.37, 1.0, 1.0, 1.0, 2.0],
    top_k=[0, 0, 0, 1, 2, 7, 50, 1024, 1025, 3000],
    top_p=[1.0, 1.0, 1e-9, 0.1, 0.5, 0.95, 1.0 - 2**-53],
    min_p=[0.0, 0.0, 1e-9, 1e-3, 0.2, 1.0],
    logprobs=[None, None, None, 0, 1, 5, 40, 1024, 2000, -1],
    repetition_penalty=[1.0, 1.0, 0.3, 1.7],
    presence_penalty=[0.0, 0.0, -1.3, 0.7],
    frequency_penalty=[0.0, 0.0, -0.9, 0.3],
    min_tokens=[0, 0, 3],
)


def random_state(generator: np.random.Generator, vocab: int) -> SamplingState:
    def ids(most: int) -> list[int]:
        return generator.integers(0, vocab, int(generator.integers(1, most))).tolist()

    def sometimes(value: Any) -> Any:
        return value if generator.random() < 0.2 else None

    parameters = {name: values[generator.integers(len(values))] for name, values in PARAMETERS.items()}
    if parameters["logprobs"] == -1 and vocab > 10_000:
        parameters["logprobs"] = 3
    parameters["logit_bias"] = sometimes({i: float(generator.normal() * 5) for i in ids(30)})
    parameters["allowed_token_ids"] = sometimes(ids(60))
    return SamplingState(
        SamplingParams(max_tokens=100, **parameters),
        tokens_of(ids(80), ids(40)[1:], room=3),
        seed=int(generator.integers(2**63)) * int(generator.choice([1, -1, 2])),
        sequence_index=int(generator.integers(2 ** int(generator.integers(1, 60)))),
        vocab_size=vocab,
        stop_token_ids=sometimes(ids(4)) or [],
        bad_words_token_ids=sometimes([ids(4) for _ in range(40)]) or [],
    )


def batch(seed: int, vocab: int, dtype: torch.dtype, num_rows: int) -> tuple[Tensor, list[SamplingState], list[int]]:
    generator = np.random.default_rng(seed)
    rows = [random_logits(generator, vocab, KINDS[generator.integers(len(KINDS))]) for _ in range(num_rows)]
    states = [random_state(generator, vocab) for _ in range(num_rows)]
    num_samples = [int(generator.choice([0, 1, 1, 1, 2, 9])) for _ in range(num_rows)]
    return torch.from_numpy(np.stack(rows)).to(dtype), states, num_samples


seeds = st.integers(0, 2**32)
vocabs = st.integers(1, 50) | st.sampled_from([511, 512, 513, 1024, 1025, 3001, 9999, 20_011])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@settings(same_level, max_examples=80)
@given(seeds, vocabs, dtypes, st.integers(1, 5), st.sampled_from([1, 2]))
def test_native_and_numpy_are_equal_step_after_step(level, seed, vocab, dtype, num_rows, num_threads) -> None:
    logits, states, num_samples = batch(seed, vocab, dtype, num_rows)
    generator = np.random.default_rng(seed)
    target = Target(level, num_threads)
    for _ in range(3):
        output = sample(logits, states, num_samples, target)
        assert output == in_numpy(sample, logits, states, num_samples)
        for row, state in enumerate(states):
            alone = sample(logits[row : row + 1], [state], num_samples[row : row + 1])
            assert alone.token_ids == output.token_ids[row : row + 1]
            assert alone.logprobs == output.logprobs[row : row + 1]
            assert alone.failures.get(0) == output.failures.get(row)
        for state, tokens in zip(states, output.token_ids, strict=True):
            state.tokens.append(tokens[0] if tokens else int(generator.integers(vocab)))


@settings(same_level, max_examples=60)
@given(seeds, vocabs, dtypes, st.integers(1, 5))
def test_masks_are_applied_alike(level, seed, vocab, dtype, num_rows) -> None:
    """Bits of a few tokens, of none, of all, and of the tokens that stop; two positions of a sequence in one call."""
    logits, states, num_samples = batch(seed, vocab, dtype, num_rows)
    generator = np.random.default_rng(seed)
    masks: list[Any] = []
    for state in states:
        mask = generator.integers(0, 2**32, -(-vocab // 32), np.uint32)
        if generator.random() < 0.5:
            mask[:] = generator.choice(np.array([0, 2**32 - 1], np.uint32), len(mask))
        if generator.random() < 0.3 and state.stop_token_ids is not None:
            mask[:] = 0
            for token_id in state.stop_token_ids.tolist():
                mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        masks.append(mask if generator.random() < 0.8 else None)
    draws = [Draw(states[i], i, num_samples[i], m if m is None else masks_of(m[None])[0]) for i, m in enumerate(masks)]
    output = sampler.sample(logits, draws, Target(level, 1))
    assert output == in_numpy(sampler.sample, logits, draws)
    for token_ids, mask in zip(output.token_ids, masks, strict=True):
        assert mask is None or all(mask[t >> 5] >> np.uint32(t & 31) & 1 for t in token_ids)


def test_a_grammar_may_end_before_min_tokens_where_nothing_else_is_left() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=9)
    state = SamplingState(params, tokens_of([1], [2], 3), seed=1, sequence_index=0, vocab_size=64, stop_token_ids=[7])
    logits = torch.zeros(1, 64)
    only, others = np.array([1 << 7, 0], np.uint32), np.array([1 << 7, 1 << 3], np.uint32)
    for mask, token_id in ((only, 7), (others, 35), (only, 7)):
        draws = [Draw(state, 0, mask=masks_of(mask[None])[0])]
        assert (
            sampler.sample(logits, draws).token_ids == in_numpy(sampler.sample, logits, draws).token_ids == [[token_id]]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_and_numpy_are_equal_at_the_size_of_a_real_vocabulary(level: str, dtype: torch.dtype) -> None:
    logits, states, num_samples = batch(5, 151_936, dtype, 40)
    assert sample(logits, states, num_samples, Target(level, 2)) == in_numpy(sample, logits, states, num_samples)


@settings(same_level, max_examples=40)
@given(seeds, vocabs, dtypes, st.sampled_from([0, 1, 5, 60, 1024]))
def test_prompt_logprobs_are_equal(level: str, seed: int, vocab: int, dtype: torch.dtype, k: int) -> None:
    logits, _, _ = batch(seed, vocab, dtype, 3)
    targets = np.random.default_rng(seed).integers(0, vocab, 3).tolist()
    assert prompt_logprobs(logits, targets, k) == in_numpy(prompt_logprobs, logits, targets, k)


@pytest.mark.slow
@settings(same_level, max_examples=12)
@given(seeds, st.sampled_from([1, 30, 600, 20_011]), dtypes)
def test_many_draws_are_equal(level: str, seed: int, vocab: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(random_logits(generator, vocab, "plain")[None]).to(dtype)
    for params in ({}, {"top_p": 0.6}, {"top_k": 9}, {"top_k": 1500, "top_p": 0.9, "min_p": 0.01}, {"min_p": 0.3}):
        state = SamplingState(SamplingParams(**params), tokens_of([]), seed=seed, sequence_index=0, vocab_size=vocab)
        assert sample(logits, [state], [200]) == in_numpy(sample, logits, [state], [200])


def make_states(num: int, vocab: int, **params: Any) -> list[SamplingState]:
    return [
        SamplingState(SamplingParams(**params), tokens_of([1], room=1), seed=i, sequence_index=0, vocab_size=vocab)
        for i in range(num)
    ]


def test_rows_with_logits_processors_go_the_other_way_among_the_rest() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(1))
    states = make_states(6, 700, logprobs=2)
    for row in (1, 4):
        (states[row],) = make_states(1, 700, logits_processors=[lambda _, logits: logits * 2], logprobs=2)
    states[2] = make_states(1, 700, allowed_token_ids=[3], logit_bias={3: -5.0})[0]
    logits[3] = torch.nan
    output = sample(logits, states, [1, 2, 1, 1, 1, 3])
    assert list(output.failures) == [3]
    assert output.token_ids[2] == [3]
    assert output == in_numpy(sample, logits, states, [1, 2, 1, 1, 1, 3])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.half(),
        lambda x: x.double(),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, :333],
        lambda x: torch.cat([x, x], 1).bfloat16()[:, 333:],
        lambda x: x[:1].expand(4, 333),
        lambda x: x.clone().requires_grad_(),
    ],
)
def test_any_float_type_and_layout_will_do(change: Any) -> None:
    logits = change(torch.randn(4, 333, generator=torch.Generator().manual_seed(2)))
    states = make_states(4, 333, logprobs=3)
    plain = logits.detach().float().contiguous()
    assert sample(logits, states, [1] * 4) == in_numpy(sample, plain, states, [1] * 4)
    assert prompt_logprobs(logits, [5] * 4, 3) == in_numpy(prompt_logprobs, plain, [5] * 4, 3)


def test_ids_outside_the_logits_and_shapes_that_do_not_fit_are_refused() -> None:
    penalised = make_states(2, 50, repetition_penalty=1.2)
    penalised[1].tokens.append(45)
    assert sample(torch.zeros(2, 50), penalised, [1, 1]).failures == {}
    failure = Failure(FailureKind.INTERNAL, "IndexError while its token was chosen")
    assert sample(torch.zeros(2, 40), penalised, [1, 1]).failures == {1: failure}
    with pytest.raises(IndexError, match="vocabulary of 40"):
        native.sample_rows(default_target(), torch.zeros(2, 40), [Draw(state, i) for i, state in enumerate(penalised)])
    one, two = make_states(2, 50)
    compiled = default_target()
    with pytest.raises(ValueError, match="rows"):
        native.sample_rows(compiled, torch.zeros(2, 50), [Draw(one, 0), Draw(two, 2)])
    with pytest.raises(ValueError, match="logits must be"):
        native.sample_rows(compiled, torch.zeros(100), [Draw(one, 0), Draw(two, 1)])


def test_a_token_each_is_what_the_sampler_draws() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.8), SamplingParams(top_k=5)]
    states = [
        SamplingState(one, tokens_of([1], room=4), seed=i, sequence_index=0, vocab_size=90)
        for i, one in enumerate(params)
    ]
    assert native.SampleCall.of_each(states) is None  # whose records nobody has made yet
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(3))
    expected = sampler.sample(logits, [Draw(state, i) for i, state in enumerate(states)]).token_ids
    call = native.SampleCall.of_each(states)
    assert call is not None
    assert call.run(logits, None) == {}
    assert [[token_id] for token_id in call.token_ids] == expected
    assert native.SampleCall.of_each([*states, None]) is None
    logits[1] = torch.nan
    assert list(call.run(logits, None)) == [1]


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"presence_penalty": 0.5}])
def test_who_looks_back_or_reports_has_no_fixed_record(params: dict[str, Any]) -> None:
    state = SamplingState(SamplingParams(**params), tokens_of([1], room=4), seed=1, sequence_index=0, vocab_size=90)
    sampler.sample(torch.zeros(1, 90), [Draw(state, 0)])
    assert native.SampleCall.of_each([state]) is None
