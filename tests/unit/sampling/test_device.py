"""The device's sampler against the host's: the same tokens, failures and log-probabilities, bit for bit.

On a GPU where there is one, else interpreted on CPU tensors.
"""

import mmap
import os
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
triton = pytest.importorskip("triton")

from quire.ops.triton import sampler as kernels  # noqa: E402
from quire.sampling import sampler  # noqa: E402
from quire.sampling.device import DeviceSampler  # noqa: E402
from quire.sampling.lanes import Draw  # noqa: E402
from quire.sampling.sampler import SamplerOutput  # noqa: E402
from quire.sampling.state import (  # noqa: E402
    Mask,
    SamplingState,
    masks_of,
)
from quire.sampling_params import SamplingParams  # noqa: E402
from tests.tokens import tokens_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, of logits near the largest float
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # and of rows that can't be sampled
]


KINDS = ["plain", "plain", "plain", "ties", "ties", "equal", "masked", "all masked", "nan", "infinite", "huge", "flat"]
PARAMETERS: dict[str, list[Any]] = dict(
    temperature=[0.0, 0.01, 0.37, 1.0, 1.0, 2.0],
    top_k=[0, 0, 0, 1, 2, 7, 50, 64, 65, 1024, 1025, 1500],
    top_p=[1.0, 1.0, 1e-9, 0.1, 0.5, 0.95, 1.0 - 2**-53],
    min_p=[0.0, 0.0, 1e-9, 1e-3, 0.2, 1.0],
    logprobs=[None, None, None, 0, 1, 5, 40, 1024],
    repetition_penalty=[1.0, 1.0, 0.3, 1.7],
    presence_penalty=[0.0, 0.0, -1.3, 0.7],
    frequency_penalty=[0.0, 0.0, -0.9, 0.3],
    min_tokens=[0, 0, 2, 30],
)


def sampler_of(num_rows: int, vocab: int) -> DeviceSampler:
    return DeviceSampler(torch.zeros(num_rows, dtype=torch.int32, device=DEVICE), vocab)


def random_row(generator: np.random.Generator, size: int) -> np.ndarray:
    row = generator.standard_normal(size).astype(np.float32) * 3
    match KINDS[generator.integers(len(KINDS))]:
        case "ties":
            row = generator.integers(-4, 4, size).astype(np.float32) * np.float32(0.5)
            row[row == 0] *= np.float32(-1) ** generator.integers(0, 2, int((row == 0).sum()))  # both zeros
        case "equal":
            row[:] = -2.5
        case "masked":
            row[generator.random(size) < 0.9] = -np.inf
            row[size // 2] = 1.0
        case "all masked":
            row[:] = -np.inf
        case "nan":
            row[generator.integers(size)] = np.nan
            row[generator.integers(size)] = np.inf
        case "infinite":
            row[generator.integers(size)] = np.inf
            row[generator.integers(size)] = -np.inf
        case "huge":
            row *= np.float32(1e37)
        case "flat":
            row *= np.float32(1e-3)
        case _:
            pass
    return row


def random_state(generator: np.random.Generator, vocab: int, room: int) -> SamplingState:
    def ids(most: int) -> list[int]:
        return generator.integers(0, vocab, int(generator.integers(1, most))).tolist()

    def sometimes(value: Any) -> Any:
        return value if generator.random() < 0.25 else None

    # Half of all has no penalties: they'd leave few rows unprocessed.
    simple = generator.random() < 0.5
    parameters = {
        name: values[0 if simple and "penalty" in name else generator.integers(len(values))]
        for name, values in PARAMETERS.items()
    }
    parameters["logit_bias"] = sometimes({i: float(generator.normal() * 5) for i in ids(30)})
    parameters["allowed_token_ids"] = sometimes(ids(60))
    return SamplingState(
        SamplingParams(max_tokens=100, **parameters),
        tokens_of(ids(80), ids(40)[1:], room=room),
        seed=int(generator.integers(2**63)) * int(generator.choice([1, -1, 2])),
        sequence_index=int(generator.integers(2 ** int(generator.integers(1, 60)))),
        vocab_size=vocab,
        stop_token_ids=sometimes(ids(4)) or [],
        bad_words_token_ids=sometimes([[i] for i in ids(10)]) or [],
    )


def random_masks(generator: np.random.Generator, vocab: int, num_rows: int) -> list[Mask | None] | None:
    if generator.random() < 0.6:
        return None
    words = generator.integers(0, 2**32, (num_rows, -(-vocab // 32)), np.uint32)
    words[generator.random(num_rows) < 0.2] = 0
    words[generator.random(num_rows) < 0.2, : 1 + vocab // 64] = 1
    return [mask if generator.random() < 0.6 else None for mask in masks_of(words)]


def on_host(logits: Tensor, states: list[SamplingState], masks: list[Mask | None] | None = None) -> SamplerOutput:
    return sampler.sample(logits, [Draw(s, i, mask=masks[i] if masks else None) for i, s in enumerate(states)])


def compare(seed: int, vocab: int, dtype: torch.dtype, num_rows: int, num_steps: int) -> None:
    """Steps of a batch on the device, all in flight, and then on the host."""
    generator = np.random.default_rng(seed)
    states = [random_state(generator, vocab, num_steps) for _ in range(num_rows)]
    rows = generator.permutation(num_rows + 2)[:num_rows].tolist()
    drawer = sampler_of(num_rows + 2, vocab)
    for row, state in zip(rows, states, strict=True):
        assert drawer.can_draw(state)
        drawer.assign(row, state)
    starts = [state.tokens.position for state in states]
    batches = [
        torch.from_numpy(np.stack([random_row(generator, vocab) for _ in states])).to(dtype) for _ in range(num_steps)
    ]
    masks = [random_masks(generator, vocab, num_rows) for _ in range(num_steps)]
    pending = [
        drawer.launch(logits.to(DEVICE), rows, [start + step for start in starts], guides)
        for step, (logits, guides) in enumerate(zip(batches, masks, strict=True))
    ]
    alive = list(range(num_rows))
    for logits, guides, launched in zip(batches, masks, pending, strict=True):
        found, wanted = launched(), on_host(logits, states, guides)
        for i in alive:
            assert found.failures.get(i) == wanted.failures.get(i)
            assert found.token_ids[i] == wanted.token_ids[i], states[i].params
            assert found.logprobs[i] == wanted.logprobs[i], states[i].params
        alive = [i for i in alive if i not in wanted.failures]
        for i in alive:
            states[i].tokens.append(wanted.token_ids[i][0])


def simple_state(vocab: int, seed: int = 0, **params: Any) -> SamplingState:
    tokens = tokens_of([1, 2, 2], [3], room=50)
    return SamplingState(SamplingParams(**params), tokens, seed=seed, sequence_index=0, vocab_size=vocab)


def normal_logits(num_rows: int, vocab: int, scale: float = 2.0) -> Tensor:
    return torch.randn((num_rows, vocab), generator=torch.Generator().manual_seed(vocab)) * scale


def draw_all(drawer: DeviceSampler, logits: Tensor, states: list[SamplingState]) -> SamplerOutput:
    for row, state in enumerate(states):
        drawer.assign(row, state)
    return drawer.launch(logits.to(DEVICE), range(len(states)), [state.tokens.position for state in states])()


seeds = st.integers(0, 2**32)
vocabs = st.sampled_from([5, 100, 1000, 2049])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
no_deadline = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@settings(no_deadline, max_examples=4)
@given(seeds, vocabs, dtypes, st.integers(1, 3))
def test_draws_what_the_host_draws_with_two_steps_in_flight(seed, vocab, dtype, num_rows) -> None:
    compare(seed, vocab, dtype, num_rows, 2)


@pytest.mark.slow
@settings(no_deadline, max_examples=60 if os.environ.get("QUIRE_NIGHTLY") == "1" else 5)
@given(seeds, vocabs | st.sampled_from([511, 8193, 20_011]), dtypes, st.integers(1, 4), st.integers(1, 4))
def test_draws_what_the_host_draws_for_longer(seed, vocab, dtype, num_rows, num_steps) -> None:
    compare(seed, vocab, dtype, num_rows, num_steps)


@pytest.mark.parametrize(("vocab", "dtype"), [(5, torch.bfloat16), (1100, torch.float32)])
def test_a_rehearsal_draws_in_every_way(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits are processed, cut to few and to many tokens, drawn from and ranked."""
    launches: list[tuple[kernels.Launch, list[Tensor]]] = []
    draw = kernels.draw

    def watched(launch: kernels.Launch, *told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        launches.append((launch, [x.cpu() for x in draw(launch, *told)]))
        return draw(launch, *told)

    monkeypatch.setattr(kernels, "draw", watched)
    kernels.rehearse(normal_logits(3, vocab).to(DEVICE, dtype))
    assert all(launch.num_draws == launch.num_processed == 3 for launch, _ in launches)
    for k, (_, (drawn, facts, listed)) in zip((1, min(vocab, 1024)), launches, strict=True):
        assert drawn[:, 1].tolist() == [0] * 3
        assert (facts[:, 0] > 0).all()
        assert listed.shape == (3, 64 if k <= 64 else 1024)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes an hour, interpreted")
def test_a_large_batch_of_a_large_vocabulary() -> None:
    compare(0, 151_936, torch.bfloat16, 256, 2)


def test_vocabularies_of_more_parts_than_are_read_at_once() -> None:
    vocab = 9001
    choices: list[dict[str, Any]] = [
        dict(top_p=0.3),
        dict(top_k=2000, top_p=0.5, logprobs=3), dict(top_k=1200, min_p=0.01), dict(top_k=40, top_p=0.9),
    ]  # fmt: skip
    states = [simple_state(vocab, i, **choice) for i, choice in enumerate(choices)]
    logits = normal_logits(len(states), vocab, 0.5)
    assert draw_all(sampler_of(4, vocab), logits, states) == on_host(logits, states)


def test_tokens_beyond_top_p_are_drawn_again() -> None:
    vocab = 1100  # more than are listed, and equal: one of ten first draws is within the mass
    states = [simple_state(vocab, seed, top_p=0.1) for seed in range(4)]
    logits = torch.zeros((4, vocab))
    found = draw_all(sampler_of(4, vocab), logits, states)
    assert found == on_host(logits, states)
    assert all(token_ids[0] < 110 for token_ids in found.token_ids)


def test_the_first_token_beyond_top_p_is_drawn_again() -> None:
    vocab = 2048  # equal ones: the first half of them has half of the mass, and these seeds draw 1024 and 1023 first
    states = [simple_state(vocab, seed, top_p=0.5) for seed in (1525, 2182, 1569)]
    found = draw_all(sampler_of(3, vocab), torch.zeros((3, vocab)), states)
    assert found == on_host(torch.zeros((3, vocab)), states)
    assert max(found.token_ids) == found.token_ids[2] == [1023]


def test_of_listed_tokens_the_first_that_have_top_p_are_left() -> None:
    vocab = 8  # equal ones; of five of them these seeds draw the fifth
    more = 0.5 + 2**-50  # the mass is rounded up
    states = [simple_state(vocab, seed, top_p=top_p) for seed, top_p in ((4, 0.5), (10, 0.5), (4, more), (10, more))]
    found = draw_all(sampler_of(4, vocab), torch.zeros((4, vocab)), states)
    assert found == on_host(torch.zeros((4, vocab)), states)
    assert found.token_ids == [[0], [2], [4], [4]]


def test_biases_are_found_wherever_their_tokens_are() -> None:
    vocab, biases = 9001, {8000: 5.0, 10: 3.0, 9000: 6.0, 2047: 4.0}
    drawer = sampler_of(1, vocab)
    while biases:
        state = simple_state(vocab, temperature=0.0, logit_bias=biases)
        best = max(biases, key=lambda token_id: biases[token_id])
        assert draw_all(drawer, torch.zeros((1, vocab)), [state]).token_ids == [[best]]
        biases.pop(best)


def test_presence_counts_in_the_output_alone() -> None:
    logits = torch.zeros((1, 100))
    logits[0, 2], logits[0, 50] = 2.0, 1.0  # 2 / 1.7 in the prompt, twice; 0.7 less would be below 1
    state = simple_state(100, temperature=0.0, repetition_penalty=1.7, presence_penalty=0.7, frequency_penalty=0.6)
    assert draw_all(sampler_of(1, 100), logits, [state]).token_ids == [[2]]


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    vocab, choices = 1000, (dict(temperature=0.0), dict(top_p=0.7), dict(top_k=5, logprobs=2))
    states = [simple_state(vocab, i, **choice) for i, choice in enumerate(choices)]  # type: ignore[arg-type]
    logits = normal_logits(3, vocab)
    together = draw_all(sampler_of(3, vocab), logits, states)
    for i, state in enumerate(states):
        alone = draw_all(sampler_of(1, vocab), logits[i : i + 1], [state])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[i], together.logprobs[i])


def test_last_tokens_are_on_the_device_before_the_host_waits() -> None:
    vocab = 100
    logits = normal_logits(2, vocab)
    logits[1] = -np.inf
    last = torch.full((5,), 77, dtype=torch.int32, device=DEVICE)
    drawer = DeviceSampler(last, vocab)
    states = [simple_state(vocab, i, temperature=0.0) for i in range(2)]
    drawer.assign(3, states[0])
    drawer.assign(0, states[1])
    pending = drawer.launch(logits.to(DEVICE), [3, 0], [1, 1])
    assert last.tolist() == [0, 77, 77, int(logits[0].argmax()), 77]
    assert pending().failures.keys() == {1}


def test_a_mask_may_be_written_to_once_it_is_launched() -> None:
    vocab, words = 100, np.full((1, 4), 0, np.uint32)
    words[0, 2] = 2  # token 65
    drawer = sampler_of(1, vocab)
    drawer.assign(0, simple_state(vocab))
    pending = drawer.launch(normal_logits(1, vocab).to(DEVICE), [0], [1], masks_of(words))
    words[:] = 1
    assert pending().token_ids == [[65]]


def test_rows_and_their_counts_pass_to_other_sequences() -> None:
    vocab, num_rows = 100, 6  # more than the counts begin with
    drawer, logits = sampler_of(num_rows, vocab), normal_logits(num_rows, vocab)
    for penalty in (2.0, 1.0):
        states = [simple_state(vocab, frequency_penalty=penalty, temperature=0.0) for _ in range(num_rows)]
        for row, state in enumerate(states):
            drawer.assign(row, state)
        for _ in range(2):
            found = drawer.launch(logits.to(DEVICE), range(num_rows), [s.tokens.position for s in states])()
            assert found == on_host(logits, states)
            for state, token_ids in zip(states, found.token_ids, strict=True):
                state.tokens.append(token_ids[0])
        drawer.release(2)


def test_the_log_probability_of_a_drawn_token_alone() -> None:
    """No row lists likely tokens: what would hold them has no elements, and comes to the host all the same."""
    vocab, logits = 100, normal_logits(2, 100)
    states = [simple_state(vocab, temperature=0.0, logprobs=0), simple_state(vocab, 1, logprobs=0)]
    assert draw_all(sampler_of(2, vocab), logits, states) == on_host(logits, states)

    class OnDevice:
        def numel(self) -> int:
            return 0

        def cpu(self) -> Tensor:
            return torch.empty(0, 64)

    drawer, stand_in = sampler_of(2, vocab), cast(Tensor, OnDevice())
    drawer._device = torch.device("cuda")
    assert drawer._fetch(stand_in).numpy().shape == (0, 64)


def test_an_interrupt_gives_no_two_rows_the_same_counts() -> None:
    class Interrupted(list[int]):
        def append(self, slot: int) -> None:
            super().append(slot)
            raise KeyboardInterrupt

    drawer, states = sampler_of(2, 100), [simple_state(100, frequency_penalty=1.0) for _ in range(2)]
    drawer.assign(0, states[0])
    drawer._free_counts = Interrupted(drawer._free_counts)
    with pytest.raises(KeyboardInterrupt):
        drawer.release(0)
    drawer._free_counts = [*drawer._free_counts]
    for row, state in enumerate(states):
        drawer.assign(row, state)
    assert drawer._records["counts"][0] != drawer._records["counts"][1]


def test_what_looks_back_or_lists_all_is_left_to_the_host() -> None:
    def can(**params: Any) -> bool:
        return DeviceSampler.can_draw(simple_state(100, **params))

    assert can(logprobs=1024, presence_penalty=1.0, min_tokens=3)
    assert not can(logprobs=-1)
    assert not can(logprobs=1025)
    assert not can(logits_processors=[lambda ids, logits: logits])
    word = SamplingState(
        SamplingParams(), tokens_of([1]), seed=0, sequence_index=0, vocab_size=9, bad_words_token_ids=[[1, 2]]
    )
    assert not DeviceSampler.can_draw(word)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="logits whose memory is never touched")
def test_logits_may_lie_more_than_31_bits_apart() -> None:
    vocab, stride = 100, 2**31 + 64
    no_reserve = 0x4000
    with mmap.mmap(-1, 2 * (stride + vocab), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve) as memory:
        logits = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((2, vocab), (stride, 1))
        logits.copy_(normal_logits(2, vocab))
        states = [simple_state(vocab, i, top_p=0.9, top_k=30, logprobs=2, presence_penalty=1.0) for i in range(2)]
        assert draw_all(sampler_of(2, vocab), logits, states) == on_host(logits, states)
        del logits
