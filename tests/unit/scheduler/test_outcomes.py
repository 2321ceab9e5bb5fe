"""What a step's result means: forks, ends, errors, and what ends from outside."""

import pytest

from quire.protocol.step import StepResult, TokenLogprobs


def numbered(name: str, sample: int) -> int:
    return 100 + sample


def test_forks_get_their_own_first_token_and_share_the_prompt(driver) -> None:
    d = driver()
    d.add("a", 6, n=3, max_tokens=3, first_sequence_index=5)
    d.schedule()
    assert d.plan.scheduled[0].num_samples == 3
    outputs = d.update(numbered)
    assert [(o.sequence_index, o.new_token_ids) for o in outputs] == [(0, [100]), (1, [101]), (2, [102])]
    assert d.num_free() == 98
    d.schedule()
    assert [s.num_new_tokens for s in d.plan.scheduled] == [1, 1, 1]
    assert [(f.sequence_index, f.token_id, f.num_tokens) for f in d.plan.forks] == [(6, 101, 6), (7, 102, 6)]
    assert d.plan.new_sequences == []
    copies, edits = d.plan.moves.copies, [s.edits for s in d.plan.scheduled]
    assert len(copies) == 2, "the last of three writes in place"
    assert [edit for one in edits for edit in one] == [(0, 1, destination) for _, _, destination in copies]
    assert d.num_free() == 96
    d.update()
    assert d.finish() == {"a/0": "length", "a/1": "length", "a/2": "length"}


def test_best_of_draws_more_than_it_returns(driver) -> None:
    d = driver()
    d.add("a", 6, n=1, best_of=2, max_tokens=2)
    assert [o.sequence_index for o in d.step()] == [0, 1]


def test_forks_without_a_place_wait_and_end_too(driver) -> None:
    d = driver(max_num_seqs=2)
    d.add("a", 6, n=4, max_tokens=2)
    assert len(d.step()) == 4
    d.add("b", 6, max_tokens=1)
    stats = d.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 3)
    d.step()
    assert d.schedule() == {"a/2": 3, "a/3": 3}, "one block of the prompt is found; b comes later"
    assert [new.output_token_ids for new in d.plan.new_sequences] == [[7], [7]]
    d.update()
    assert d.finish() == {"b/0": "length"}


@pytest.mark.parametrize("ending", [{0}, {1}, {0, 1, 2}])
def test_forks_may_end_at_their_first_token(driver, ending: set[int]) -> None:
    d = driver()
    d.add("a", 6, n=3, max_tokens=2, stop={1})
    outputs = d.step(lambda name, sample: 1 if sample in ending else 2)
    assert {o.sequence_index for o in outputs if o.finish_reason == "stop"} == ending
    assert d.scheduler.stats().num_requests_running == 3 - len(ending)
    ends = d.finish()
    assert len(ends) == 3 - len(ending)


def test_stop_tokens(driver) -> None:
    d = driver()
    d.add("a", stop={1, 2}, stop_token_ids=[2], eos_token_id=1)
    d.add("b", stop={1, 2}, stop_token_ids=[2], eos_token_id=1)
    d.add("c", stop={1, 2}, stop_token_ids=[2], eos_token_id=1, min_tokens=2)
    d.add("e")
    outputs = {o.request_id: o for o in d.step(lambda name, _: 1 if name in "a" else 2)}
    assert {name: (o.finish_reason, o.stop_reason) for name, o in outputs.items()} == {
        "a": ("stop", None),
        "b": ("stop", 2),
        "c": (None, None),
        "e": (None, None),
    }
    (c, _) = d.step(2)
    assert (c.finish_reason, c.stop_reason) == ("stop", 2)


def test_a_second_end_of_sequence_id_is_the_reason_to_stop(driver) -> None:
    d = driver()
    d.add("a", stop={1, 2}, eos_token_id=1)
    (output,) = d.step(2)
    assert (output.finish_reason, output.stop_reason) == ("stop", 2)


def test_length_ends_by_max_tokens_or_by_the_context(driver) -> None:
    d = driver(max_model_len=8)
    d.add("a", 5, max_tokens=2)
    d.add("b", 5, max_tokens=20)
    d.step()
    assert [o.finish_reason for o in d.step()] == ["length", None]
    assert [o.finish_reason for o in d.step()] == ["length"]


def test_a_stop_token_wins_over_length(driver) -> None:
    d = driver()
    d.add("a", max_tokens=1, stop={1})
    assert [o.finish_reason for o in d.step(1)] == ["stop"]


def test_logprobs_go_with_their_sequence(driver) -> None:
    d = driver()
    entries = [TokenLogprobs([token], [-1.0], [1]) for token in (100, 101)]
    d.add("a", n=2, logprobs=0)
    outputs = d.step(numbered, logprobs={"a": entries})
    assert [o.logprobs for o in outputs] == [[entries[0]], [entries[1]]]
    outputs = d.step(logprobs={"a": entries[:1]})
    assert [o.logprobs for o in outputs] == [[entries[0]], None]


def test_an_error_ends_its_whole_request_and_no_other(driver) -> None:
    d = driver()
    d.add("a", n=3)
    d.add("b")
    d.step()
    d.schedule()
    outputs = d.update(errors={"a/1": "its processor raised"})
    assert [
        (o.request_id, o.sequence_index, o.finish_reason, o.failure and o.failure.message, o.new_token_ids)
        for o in outputs
    ] == [
        ("a", 0, "error", "its processor raised", []),
        ("a", 1, "error", "its processor raised", []),
        ("a", 2, "error", "its processor raised", []),
        ("b", 0, None, None, [7]),
    ]
    assert d.schedule() == {"b": 1}
    assert set(d.removed()) == {"a", "a/1", "a/2"}


def test_an_error_at_the_first_token_ends_every_sequence(driver) -> None:
    d = driver()
    d.add("a", n=2)
    d.schedule()
    outputs = d.update(-1, errors={"a": "no"})
    assert [(o.sequence_index, o.finish_reason) for o in outputs] == [(0, "error"), (1, "error")]


def test_abort_ends_each_unfinished_sequence_once(driver) -> None:
    d = driver()
    d.add("a", n=3, max_tokens=5, stop={1})
    d.add("b", n=2)
    d.step(lambda name, sample: 1 if (name, sample) == ("a", 1) else 2)
    d.add("c", n=2)
    outputs = [output for name in ("a", "nobody", "c") for output in d.scheduler.abort(name)]
    assert [(o.request_id, o.sequence_index) for o in outputs] == [("a", 0), ("a", 2), ("c", 0), ("c", 1)]
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert d.scheduler.abort("a") == []
    d.scheduler.check_integrity()
    assert d.schedule() == {"b": 1, "b/1": 1}
    assert d.removed() == ["a"], "the others had no row yet"


def test_results_of_what_was_aborted_during_the_step_are_dropped(driver) -> None:
    d = driver()
    d.add("a")
    d.add("b")
    d.schedule()
    assert len(d.scheduler.abort("a")) == 1
    d.add("a", max_tokens=1)  # the id is free at once
    assert [o.request_id for o in d.update(errors={"a": "too late"})] == ["b"]
    assert d.schedule() == {"b": 1, "a": 5}
    assert [o.finish_reason for o in d.update()] == [None, "length"]


def test_finish_sequence_is_silent_and_happens_once(driver) -> None:
    d = driver()
    d.add("a", n=2)
    d.step()
    d.step()
    d.scheduler.finish_sequence("a", 0)
    d.scheduler.finish_sequence("a", 0)
    d.scheduler.finish_sequence("nobody", 0)
    assert d.schedule() == {"a/1": 1}
    assert d.removed() == ["a"]
    d.scheduler.finish_sequence("a", 1)
    assert d.update() == []
    assert not d.scheduler.has_unfinished()


def test_finish_sequence_before_the_fork(driver) -> None:
    d = driver(max_num_batched_tokens=4)
    d.add("a", 6, n=3, max_tokens=2)
    d.step()
    d.scheduler.finish_sequence("a", 0)
    d.scheduler.finish_sequence("a", 1)
    assert [(o.sequence_index, o.new_token_ids) for o in d.step(numbered)] == [(2, [102])]
    assert d.finish() == {"a/2": "length"}
    d.add("b", 6, n=2)
    d.step()
    d.scheduler.finish_sequence("b", 1)
    d.scheduler.finish_sequence("b", 0)
    assert not d.scheduler.has_unfinished()
    d.scheduler.check_integrity()


def test_what_a_finished_sequence_computed_is_found_later(driver) -> None:
    d = driver()
    d.add("a", [1, 2, 3, 4, 5], max_tokens=4)
    d.finish()
    d.add("b", [1, 2, 3, 4, 5, 7, 7, 7, 7, 8])
    assert d.schedule() == {"b": 2}


def test_plans_and_results_must_match(driver) -> None:
    d = driver()
    d.add("a")
    d.schedule()
    with pytest.raises(AssertionError, match="another step"):
        d.scheduler.update(d.plan, StepResult(step_id=99, results=[]), 0.0)
    d.update()
    with pytest.raises(AssertionError, match="without a plan in flight"):
        d.update()
