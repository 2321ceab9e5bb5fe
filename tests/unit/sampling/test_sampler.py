"""The sampler: order of processing, exactness of every row, logprobs, failures that stay in their row."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.sampling import sampler
from quire.sampling.lanes import Draw
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.processing import process_logits
from quire.sampling.sampler import SamplerOutput
from quire.sampling.select import candidates
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from tests.tokens import tokens_of

VOCAB = 60


def sample(logits, states, num_samples) -> SamplerOutput:
    return sampler.sample(logits, [Draw(*of) for of in zip(states, range(len(states)), num_samples, strict=True)])


def make_state(
    prompt=(1, 2, 3), output=(), vocab=VOCAB, seed=7, index=0, stop=(), bad_words=(), **params
) -> SamplingState:
    return SamplingState(
        SamplingParams(**params),
        tokens_of(prompt, output, room=200),
        seed=seed,
        sequence_index=index,
        vocab_size=vocab,
        stop_token_ids=frozenset(stop),
        bad_words_token_ids=[list(word) for word in bad_words],
    )


def make_logits(num_rows=1, vocab=VOCAB, seed=0, dtype=torch.float32) -> Tensor:
    return (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def one(logits: Tensor, state: SamplingState) -> int:
    output = sample(logits, [state], [1])
    assert not output.failures
    return output.token_ids[0][0]


def processed(logits: Tensor, state: SamplingState) -> Tensor:
    """What the row looks like when a token is chosen: seen by way of processing.py."""
    row = logits.clone().numpy()
    process_logits(row, state)
    return torch.from_numpy(row)


# ---- greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_among_equals_at_any_row(dtype: torch.dtype) -> None:
    for vocab in (5, 60, 1000, 9001):
        logits = torch.zeros(7, vocab, dtype=dtype)
        first, second = vocab // 2, vocab - 1
        logits[:, [first, second]] = 4.0
        logits[3] = 1.0  # all equal
        output = sample(logits, [make_state(temperature=0, vocab=vocab) for _ in range(7)], [1] * 7)
        assert [tokens[0] for tokens in output.token_ids] == [first] * 3 + [0] + [first] * 3


def test_greedy_obeys_penalties_and_ignores_the_rest() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 4.0, 3.0
    assert one(logits, make_state(temperature=0, top_k=1, top_p=0.1, min_p=0.9)) == 5
    assert one(logits, make_state(prompt=[5], temperature=0, repetition_penalty=2.0)) == 6
    assert one(logits, make_state(output=[5], temperature=0, presence_penalty=1.5)) == 6
    assert one(logits, make_state(output=[5], temperature=0, frequency_penalty=0.6)) == 5
    assert one(logits, make_state(output=[5, 5], temperature=0, frequency_penalty=0.6)) == 6


# ---- processing


def dense_twin(logits: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """Penalties over the whole vocabulary, in float32, as their definition says."""
    vocab = len(logits)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab).float()
    seen = torch.zeros(vocab, dtype=torch.bool)
    seen[prompt + output] = True
    divided = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    logits = torch.where(seen, divided, logits)
    logits = logits - params.frequency_penalty * counts
    return logits - params.presence_penalty * (counts > 0)


@pytest.mark.parametrize("penalties", [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -1.1), (0.6, -2.0, 2.0)])
def test_penalties_equal_a_dense_twin_as_tokens_come(penalties: tuple[float, float, float]) -> None:
    repetition, presence, frequency = penalties
    params = dict(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    vocab, generator = 300, np.random.default_rng(2)
    prompt = generator.integers(0, vocab, 40).tolist()
    state = make_state(prompt, vocab=vocab, **params)
    drawn: list[int] = []
    for step in range(150):  # long enough for the count arrays to grow
        logits = make_logits(1, vocab, step)[0]
        assert torch.equal(processed(logits, state), dense_twin(logits, prompt, drawn, SamplingParams(**params)))
        drawn.append(int(generator.integers(0, vocab // 2)))
        state.tokens.append(drawn[-1])
    resumed = make_state(prompt, output=drawn, vocab=vocab, **params)
    assert torch.equal(processed(logits, resumed), processed(logits, state))


def test_allowed_ids_bias_and_stop_ids_before_min_tokens() -> None:
    logits = make_logits()
    row = processed(logits[0], make_state(allowed_token_ids=[3, 9, 3]))
    assert torch.isfinite(row).nonzero().flatten().tolist() == [3, 9]
    assert row[9] == logits[0, 9]
    row = processed(logits[0], make_state(logit_bias={4: 2.5, 5: -1e9}))
    assert row[4] == logits[0, 4] + 2.5
    assert row[5] == logits[0, 5] - 100
    state = make_state(stop=[8, 11], min_tokens=2, temperature=0)
    logits[0, 8] = 99.0
    for _ in range(2):
        assert state.processes
        token = one(logits, state)
        assert token not in (8, 11)
        state.tokens.append(token)
    assert not state.processes
    assert one(logits, state) == 8


def test_bad_words_of_one_and_of_several_tokens() -> None:
    logits = torch.zeros(VOCAB)
    state = make_state(bad_words=[[4], [5, 6], [7, 8, 9], [], [999]])
    assert torch.isinf(processed(logits, state)).nonzero().flatten().tolist() == [4]
    for token, banned in [(5, [4, 6]), (7, [4]), (8, [4, 9]), (7, [4]), (1, [4])]:
        state.tokens.append(token)
        assert torch.isinf(processed(logits, state)).nonzero().flatten().tolist() == banned


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    state = make_state(stop=[VOCAB + 5], min_tokens=3, bad_words=[[VOCAB]], logit_bias={VOCAB: 1.0})
    assert not state.processes
    assert sample(make_logits(), [state], [1]).failures == {}


# ---- logits processors


def test_logits_processors_get_what_they_ask_for_in_their_place() -> None:
    calls = []

    def two(output_ids, logits):
        calls.append((output_ids, logits.dtype, tuple(logits.shape)))
        logits[5] = 50.0
        return logits

    class Three:
        def __call__(self, prompt_ids, output_ids, logits):
            calls.append((prompt_ids, output_ids, float(logits[5])))
            return logits.double() + 0.0

    def with_option(output_ids, logits, strength=3.0):
        return logits * strength

    state = make_state(
        [1, 2], output=[5, 4], temperature=0, logits_processors=[two, Three(), with_option], repetition_penalty=2.0
    )
    assert one(make_logits(dtype=torch.bfloat16), state) == 5
    assert calls == [([5, 4], torch.float32, (VOCAB,)), ([1, 2], [5, 4], 50.0)]
    row = processed(make_logits()[0], state)
    assert row[5] == 75.0  # (50 * 3) / 2: penalties come last


def test_a_processor_cannot_change_the_sequence_or_the_raw_logprobs() -> None:
    def meddle(prompt_ids, output_ids, logits):
        prompt_ids.clear()
        output_ids.append(3)
        return logits.fill_(0.0)

    logits = make_logits()
    kept = logits.clone()
    state = make_state([1, 2], output=[5], temperature=0, logits_processors=[meddle], logprobs=2)
    output = sample(logits, [state], [1])
    assert (state.tokens.prompt(), state.tokens.output()) == ([1, 2], [5])
    assert torch.equal(logits, kept)
    assert output.token_ids == [[0]]
    assert output.logprobs[0] == prompt_logprobs(kept, [0], 2)


def raises(output_ids, logits):
    raise KeyError("no such state")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (raises, ["raises", "KeyError", "no such state"]),
        (lambda output_ids, logits: None, ["NoneType"]),
        (lambda output_ids, logits: logits[:-1], ["[60]", "[59]"]),
        (lambda output_ids, logits: logits > 0, ["torch.bool"]),
        (lambda output_ids, logits: logits.numpy(), ["ndarray"]),
        (lambda output_ids, logits: logits.fill_(-math.inf), ["no token is left"]),
        (lambda output_ids, logits: logits / 0.0 * 0.0, ["not finite", "nan"]),
        (lambda: None, ["TypeError"]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_failing_row_fails_alone(processor, words, temperature: float) -> None:
    logits = make_logits(3)
    params = dict(temperature=temperature, logprobs=1)
    alone = [sample(logits[[row]], [make_state(**params)], [1]) for row in range(3)]
    bad = make_state(logits_processors=[processor], **params)
    output = sample(logits, [make_state(**params), bad, make_state(**params)], [1, 1, 1])
    assert list(output.failures) == [1]
    for word in words:
        assert word in output.failures[1].message
    assert output.token_ids == [alone[0].token_ids[0], [], alone[2].token_ids[0]]
    assert output.logprobs == [alone[0].logprobs[0], None, alone[2].logprobs[0]]


def test_a_row_that_breaks_the_sampler_fails_alone() -> None:
    logits = make_logits(3)
    good, bad = make_state(temperature=1.0), make_state(temperature=1.0)
    bad.choice = ("hot", *bad.choice[1:])  # type: ignore[assignment]  # what nobody has thought of
    output = sample(logits, [good, bad, good], [1, 2, 1])
    assert list(output.failures) == [1]
    assert "while its token was chosen" in output.failures[1].message
    alone = [sample(logits[[row]], [good], [1]).token_ids[0] for row in (0, 2)]
    assert output.token_ids == [alone[0], [], alone[1]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [dict(temperature=0), dict(temperature=1), dict(top_p=0.5), dict(logprobs=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_numbers_fail_their_row(value, params, dtype) -> None:
    logits = make_logits(2, 9000, dtype=dtype)
    logits[0] = value
    output = sample(logits, [make_state(vocab=9000, **params)] * 2, [1, 1])
    assert list(output.failures) == [0]
    assert [len(tokens) for tokens in output.token_ids] == [0, 1]


# ---- exactness

KINDS: list[dict] = [
    dict(temperature=0),
    dict(temperature=0, logprobs=3),
    dict(),
    dict(temperature=0.6),
    dict(temperature=1.7, logprobs=0),
    dict(top_p=0.9),
    dict(top_p=0.3, temperature=2.0),
    dict(top_k=5),
    dict(top_k=2000, top_p=0.7),
    dict(min_p=0.1, logprobs=-1),
    dict(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    dict(temperature=0, presence_penalty=0.5, frequency_penalty=0.2, logprobs=5),
    dict(logit_bias={1: 3.0}, bad_words=[[2], [3, 4]]),
    dict(allowed_token_ids=[1, 5, 9, 12], top_k=50),
    dict(stop=[0, 1], min_tokens=9),
    dict(logits_processors=[lambda output_ids, logits: logits - 1.0]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [60, 5003, 20011])
def test_a_row_is_the_same_alone_or_in_any_batch_at_any_row(vocab: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(vocab)
    num_rows = 2 * len(KINDS)
    logits = make_logits(num_rows, vocab, dtype=dtype)
    states = [
        make_state([1, 2, 3], [4] * (row % 4), vocab, seed=row * 2**60, index=row, **KINDS[row % len(KINDS)])
        for row in range(num_rows)
    ]
    num_samples = [1 + 2 * (row % 3 == 0) for row in range(num_rows)]
    alone = [sample(logits[[row]], [states[row]], [num_samples[row]]) for row in range(num_rows)]
    for size in (2, 7, num_rows):
        rows = generator.permutation(num_rows)[:size]
        output = sample(logits[rows], [states[row] for row in rows], [num_samples[row] for row in rows])
        for place, row in enumerate(rows):
            assert output.token_ids[place] == alone[row].token_ids[0]
            assert output.logprobs[place] == alone[row].logprobs[0]
        assert output.failures == {}
    for row in range(0, num_rows, 5):  # a view into a wider matrix
        padded = torch.cat([logits[[row]], logits[[row]]], 1)[:, :vocab]
        assert sample(padded, [states[row]], [1]).token_ids[0][0] == alone[row].token_ids[0][0]


def test_bf16_logits_give_what_their_float32_values_give() -> None:
    logits = make_logits(len(KINDS), 9000, dtype=torch.bfloat16)
    states = [make_state(vocab=9000, **kind) for kind in KINDS]
    assert sample(logits, states, [1] * len(KINDS)) == sample(logits.float(), states, [1] * len(KINDS))


@pytest.mark.parametrize("params", [dict(), dict(top_p=0.8), dict(top_k=9)])
@pytest.mark.parametrize("vocab", [60, 9000])
def test_n_samples_are_those_of_n_sequences(params: dict, vocab: int) -> None:
    logits = make_logits(1, vocab)
    together = sample(logits, [make_state(vocab=vocab, **params, logprobs=2)], [20])
    apart = [sample(logits, [make_state(vocab=vocab, index=i, **params, logprobs=2)], [1]) for i in range(20)]
    assert together.token_ids[0] == [output.token_ids[0][0] for output in apart]
    assert together.logprobs[0] == [output.logprobs[0][0] for output in apart if output.logprobs[0]]
    assert len(set(together.token_ids[0])) > 3


def test_seed_sequence_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(1, 5000)
    draws = [one(logits, make_state(vocab=5000, seed=seed)) for seed in range(20)]
    draws += [one(logits, make_state(vocab=5000, index=index)) for index in range(1, 20)]
    draws += [one(logits, make_state(vocab=5000, output=[0] * position)) for position in range(1, 20)]
    assert len(set(draws)) > 50
    assert one(logits, make_state(vocab=5000)) == one(logits, make_state(vocab=5000))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_by_temperature_alone(temperature: float) -> None:
    logits = make_logits(1, 20)
    num_draws = 5000
    tokens = sample(logits, [make_state(vocab=20, temperature=temperature)], [num_draws]).token_ids[0]
    expected = num_draws * torch.softmax(logits[0].double() / temperature, 0)
    common = expected >= 5
    counts = torch.bincount(torch.tensor(tokens), minlength=20).double()
    rest = (counts[~common].sum() - expected[~common].sum()) ** 2 / expected[~common].sum().clamp(min=1)
    chi_square = ((counts - expected) ** 2 / expected)[common].sum() + rest
    assert chi_square < 52  # 20 degrees of freedom at most: 1 in 10,000


# ---- edges


def test_inference_mode_and_gradients_make_no_difference() -> None:
    states = [make_state(logits_processors=[lambda output_ids, logits: logits.mul_(2)], logprobs=1)]
    plain = sample(make_logits(), states, [1])
    with torch.inference_mode():
        assert sample(make_logits(), states, [1]) == plain
    assert sample(make_logits().requires_grad_(), states, [1]) == plain


def test_no_rows_and_no_samples() -> None:
    assert sample(torch.zeros(0, 9), [], []).token_ids == []
    assert sample(
        torch.zeros(2, 9), [make_state(vocab=9, logprobs=1), make_state(vocab=9, top_k=2)], [0, 0]
    ).token_ids == [[], []]


# ---- an independent implementation


@pytest.mark.slow  # imports transformers
def test_processing_agrees_with_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    prompt, output = [1, 2, 3, 3], [4, 4, 7]
    ids = torch.tensor([prompt + output])
    for seed in range(3):
        logits = make_logits(1, VOCAB, seed)
        row = processed(logits[0], make_state(prompt, output, repetition_penalty=1.4))
        assert torch.allclose(row, processors.RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone())[0])
        bad_words = [[9], [7, 5], [4, 6]]
        row = processed(logits[0], make_state(prompt, output, bad_words=bad_words))
        assert torch.equal(
            row, processors.NoBadWordsLogitsProcessor(bad_words, eos_token_id=59)(ids, logits.clone())[0]
        )
        row = processed(logits[0], make_state(prompt, output, stop=[8], min_tokens=5))
        twin = processors.MinNewTokensLengthLogitsProcessor(len(prompt), 5, 8, device="cpu")
        assert torch.equal(row, twin(ids, logits.clone())[0])


@pytest.mark.slow
def test_truncation_agrees_with_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for seed in range(5):
        logits = make_logits(1, 500, seed)
        for top_k, top_p, min_p in [(17, 1.0, 0.0), (500, 0.83, 0.0), (500, 1.0, 0.07), (40, 0.6, 0.02)]:
            twin = logits / 0.8
            twin = processors.MinPLogitsWarper(min_p)(ids, twin)
            twin = processors.TopKLogitsWarper(top_k)(ids, twin)
            twin = processors.TopPLogitsWarper(top_p)(ids, twin)
            table, mass = candidates(logits[0].numpy(), float(logits.max()), 0.8, top_k, top_p, min_p)
            assert mass == 0
            assert table.ids is not None
            assert table.ids.tolist() == torch.isfinite(twin[0]).nonzero().flatten().tolist()
