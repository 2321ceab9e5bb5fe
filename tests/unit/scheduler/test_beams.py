"""Beams: chosen together, told at the end, never in each other's way for good; what they and forks cost in blocks."""

from typing import Any

import msgspec
import pytest

from quire.errors import InvalidRequestError
from quire.protocol.step import Failure, FailureKind, Sampling, SequenceResult, StepResult, TokenLogprobs

BEAMS = {"use_beam_search": True, "temperature": 0.0}


def ranked(*candidates: tuple[int, float]) -> TokenLogprobs:
    """Candidates with their log-probabilities, best first."""
    token_ids, logprobs = map(list, zip(*candidates, strict=True))
    return TokenLogprobs(token_ids, logprobs, list(range(1, len(candidates) + 1)))


EVEN = ranked((11, -1.0), (12, -1.5), (13, -4.0), (14, -5.0), (15, -6.0), (16, -7.0))


def finish(d: Any, name: str = "a") -> dict[int, tuple[list[int], str]]:
    """Step until idle; the outputs of one request, whole, and why they end."""
    found: dict[int, tuple[list[int], str]] = {}
    for _ in range(200):
        if not d.scheduler.has_unfinished():
            break
        if not d.schedule():
            continue
        for output in d.update():
            if output.request_id == name and output.finish_reason:
                found[output.sequence_index] = (output.new_token_ids, output.finish_reason)
    assert d.kv.num_free_blocks == d.kv.num_blocks
    return found


# --- the search


def test_beams_are_chosen_together_and_told_at_the_end(driver) -> None:
    d = driver()
    d.add("a", 6, n=2, max_tokens=3, stop=[15], **BEAMS)
    assert d.schedule() == {"a": 6}
    (item,) = d.plan.scheduled
    assert (item.sampling, item.num_samples) == (Sampling.RANK, 4), "twice as many as beams, as one may end"
    d.candidates = ranked((11, -1.0), (12, -2.0), (13, -3.0), (14, -9.0))
    assert d.update() == []
    assert d.schedule() == {"a": 1, "a/1": 1}
    assert [(f.token_id, f.num_tokens) for f in d.plan.forks] == [(12, 6)]
    assert [item.chosen_token_id for item in d.plan.scheduled] == [11, -1]

    # Both children of the second beam are better than any of the first.
    second = ranked((21, -0.1), (22, -0.2), (23, -8.0), (24, -9.0))
    beams = {d.names[item.sequence_id]: item.sequence_id for item in d.plan.scheduled}
    results = {"a": ranked((15, -1.9), (31, -7.0), (32, -8.0), (33, -9.0)), "a/1": second}
    outputs = step_with(d, results)
    assert outputs == []
    d.schedule()
    assert d.removed() == ["a"]
    (fork,) = d.plan.forks
    assert (fork.parent_id, fork.token_id) == (beams["a/1"], 22)
    assert {item.sequence_id for item in d.plan.scheduled} == {beams["a/1"], fork.sequence_id}
    d.candidates = ranked((41, -0.5), (42, -0.6), (43, -0.7), (44, -9.0))
    first, last = d.update()
    assert (first.sequence_index, first.new_token_ids, first.finish_reason) == (0, [12, 21, 41], "length")
    assert (last.sequence_index, last.new_token_ids) == (1, [12, 21, 42])
    assert [entry.logprobs for entry in first.logprobs or ()] == [[-2.0], [-0.1], [-0.5]]
    assert not d.scheduler.has_unfinished()
    assert d.num_free() == 100


def step_with(d: Any, results: dict[str, TokenLogprobs]) -> list[Any]:
    """Take in candidates of each beam of the plan."""
    found = []
    for item in d.plan.scheduled:
        found.append(SequenceResult(candidates=results[d.names[item.sequence_id]]))
    outputs = d.scheduler.update(d.plan, StepResult(step_id=d.plan.step_id, results=found), 0.0)
    d.scheduler.check_integrity()
    return outputs


def test_an_end_counts_only_among_the_best(driver) -> None:
    """A token that ends a sequence below the best `width` is no output, as in transformers."""
    d = driver()
    d.add("a", 6, n=2, max_tokens=2, stop=[13], eos_token_id=13, **BEAMS)
    d.candidates = EVEN
    assert finish(d) == {0: ([11, 11], "length"), 1: ([11, 12], "length")}


def test_too_few_outputs_are_an_error_by_name(driver) -> None:
    d = driver()
    d.add("a", 6, n=3, max_tokens=2, stop=[], **BEAMS)
    d.candidates = ranked((11, -1.0))
    d.step()
    first, *others = d.step()
    assert (first.new_token_ids, first.finish_reason) == ([11, 11], "length")
    for output in others:
        assert output.finish_reason == "error"
        assert output.failure is not None
        assert output.failure.kind == FailureKind.BAD_REQUEST
        assert "n = 3 outputs were asked for, and the beam search found 1" in output.failure.message
    assert d.num_free() == 100


def test_one_beams_failure_ends_the_request(driver) -> None:
    d = driver()
    d.add("a", 6, n=3, max_tokens=4, **BEAMS)
    d.candidates = EVEN
    d.step()
    d.schedule()
    outputs = d.update(errors={"a/2": "broken"})
    assert [(o.sequence_index, o.finish_reason) for o in outputs] == [(i, "error") for i in range(3)]
    assert outputs[0].failure == Failure(FailureKind.INTERNAL, "broken")
    assert d.num_free() == 100


def test_abort_and_outputs_that_nobody_wants_any_more(driver) -> None:
    d = driver()
    d.candidates = EVEN
    for name in "ab":
        d.add(name, 6, n=2, best_of=3, max_tokens=4, **BEAMS)
    d.step()
    d.step()
    assert [o.sequence_index for o in d.scheduler.abort("a")] == [0, 1]
    d.scheduler.finish_sequence("b", 0)
    assert list(finish(d, "b")) == [1]


# --- those that sit out


def crowded(driver: Any) -> Any:
    """Two beams, of which the second has lost its blocks to an earlier request while the first sits out."""
    d = driver(num_blocks=5, caching=False)
    d.candidates = EVEN
    d.add("first", 3, max_tokens=5)
    d.add("a", 8, n=2, max_tokens=5, **BEAMS)
    d.step()  # 1 block and 2
    d.step()  # a block more for each beam
    assert d.schedule() == {"first": 1, "a": 1}
    assert d.removed() == ["a/1"]
    d.update()
    assert d.schedule() == {"first": 1}, "a sits out"
    assert d.waiting_reasons() == {"blocks": 1}
    assert d.num_free() == 0
    d.update()
    return d


EXPECTED = {0: ([11, 11, 11, 11, 11], "length"), 1: ([11, 11, 11, 11, 12], "length")}


def test_one_that_sits_out_makes_room_for_its_sibling(driver) -> None:
    d = crowded(driver)
    assert d.schedule() == {"first": 1}
    d.update()
    assert d.schedule() == {"a/1": 10}, "nobody else could go on"
    assert d.waiting_reasons() == {"siblings": 1}
    assert "siblings: " in (d.why("a") or "")
    d.update()
    assert "siblings" not in d.waiting_reasons()
    assert finish(d) == EXPECTED
    assert d.num_preemptions() > 1


def test_beams_of_two_requests_never_keep_each_other_waiting(driver) -> None:
    """Seats for three, and each of two requests has two beams: one beam after the other."""
    d = driver(max_num_seqs=3)
    d.candidates = EVEN
    d.add("a", 6, n=2, max_tokens=5, **BEAMS)
    d.add("b", 6, n=3, max_tokens=5, **BEAMS)
    found = finish(d, "b")
    assert found[0] == EXPECTED[0]
    assert len(found) == 3


def test_it_begins_anew_with_the_same_outcome(driver) -> None:
    d = crowded(driver)
    d.scheduler.cancel()
    assert d.waiting_reasons()["siblings"] == 1
    d.scheduler.check_integrity()
    assert finish(d) == EXPECTED


# --- what can never be


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 9}, "n", "n = 9 beams are more than this engine runs at once, 8 (max_num_seqs"),
        ({"n": 2, "best_of": 9}, "best_of", "best_of = 9 beams are more than"),
        ({"n": 4, "max_tokens": 100}, "max_tokens", "4 beams of 6 prompt tokens and max_tokens=100 need up to 105 KV"),
        ({"n": 8, "stop": range(2048)}, "n", "8 beams with 2048 tokens that end them need 16392 candidates each"),
    ],
)
def test_what_can_never_run_at_once_is_refused(driver, fields: dict[str, Any], param: str, message: str) -> None:
    d = driver()
    with pytest.raises(InvalidRequestError) as refused:
        d.add("a", 6, **BEAMS, **fields)
    assert refused.value.param == param
    assert message in str(refused.value)
    assert "ower " in str(refused.value)
    d.add("a", 6, n=8, max_tokens=40, **BEAMS)  # 1 + 8 * 11 blocks of 100
    d.candidates = EVEN
    assert len(finish(d)) == 8


# --- what forks cost


@pytest.mark.parametrize("num_prompt", [7, 8, 10])
def test_samples_share_the_prompt_and_its_last_block(driver, num_prompt: int) -> None:
    """Full blocks of the prompt once, and for each sample what it adds; its last partial block is copied."""
    d = driver()
    d.add("a", num_prompt, n=5, max_tokens=9)
    d.step()
    assert 100 - d.num_free() == -(-num_prompt // 4), "nothing is copied before it is written"
    for num_computed in range(num_prompt + 1, num_prompt + 9):
        d.schedule()
        assert 100 - d.num_free() == num_prompt // 4 + 5 * (-(-num_computed // 4) - num_prompt // 4)
        d.update()


def test_beams_hold_what_their_beginnings_differ_in(driver) -> None:
    """All of one parent in each step, so that only the block that is being written is each one's own."""
    d = driver(caching=False)
    d.add("a", 10, n=4, max_tokens=12, **BEAMS)
    d.candidates = ranked((11, -0.001), (12, -0.002), (13, -0.003), (14, -0.004), (15, -9.0), (16, -9.0))
    d.step()
    d.candidates = ranked((11, -10.0), (12, -10.1), (13, -10.2), (14, -10.3))
    for num_computed in range(11, 21):
        d.schedule()
        assert 100 - d.num_free() <= (num_computed - 1) // 4 + 4 * 1 <= 2 + 4 * (-(-num_computed // 4) - 2)
        best = min(d.plan.scheduled, key=lambda item: d.names[item.sequence_id]).sequence_id
        results = {d.names[i.sequence_id]: d.candidates for i in d.plan.scheduled}
        results[d.names[best]] = ranked((21, -0.1), (22, -0.2), (23, -0.3), (24, -0.4))
        step_with(d, results)


def size_of_forks(driver: Any, num_prompt: int, **fields: Any) -> int:
    """Bytes of the plan that forks seven sequences at the end of a prompt."""
    d = driver(num_blocks=1000, max_model_len=1000, max_num_batched_tokens=1000)
    d.add("a", num_prompt, n=8, max_tokens=9, **fields)
    d.candidates = ranked(*((100 + i, -float(i)) for i in range(16)))
    d.step()
    d.schedule()
    assert len(d.plan.forks) == 7
    return len(msgspec.msgpack.encode(d.plan))


@pytest.mark.parametrize("fields", [{}, BEAMS])
def test_a_fork_costs_the_same_on_the_wire_for_any_prompt(driver, fields: dict[str, Any]) -> None:
    # A number may take two bytes more where it is large.
    assert size_of_forks(driver, 900, **fields) <= size_of_forks(driver, 10, **fields) + 8 * 8


def test_beams_go_on_where_fewer_may_run_than_there_are(driver) -> None:
    """Limits may be lowered while they run: those that have a place keep it, and others get on by turns."""
    d = driver(max_num_seqs=4)
    d.candidates = EVEN
    d.add("a", 6, n=3, max_tokens=6, **BEAMS)
    d.step()
    d.scheduler.set_limits({"max_num_seqs": 1})
    with pytest.raises(InvalidRequestError, match="n = 2 beams are more than this engine runs at once, 1"):
        d.add("b", 6, n=2, max_tokens=6, **BEAMS)
    assert len(finish(d)) == 3
