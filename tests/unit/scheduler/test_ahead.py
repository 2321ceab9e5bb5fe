"""Several plans in flight, drafts, ranked candidates, plans that are forgotten, a scheduler that goes on elsewhere."""

import pytest

from quire.config.draft_tree import DraftTree
from quire.protocol.requests import SamplingTask
from quire.protocol.step import Sampling, SequenceResult, TokenLogprobs
from quire.scheduler.continuation import Branch, Continuation, Ending

# --- plans in flight


def test_a_decoding_sequence_is_planned_by_count_alone(driver) -> None:
    d = driver()
    d.add("a", 4, max_tokens=3)
    assert d.schedule() == {"a": 4}
    first = d.plan
    assert d.schedule() == {"a": 1}
    second = d.plan
    assert [output.new_token_ids for output in d.update(plan=first)] == [[7]]
    assert d.schedule() == {"a": 1}, "the third and last token"
    third = d.plan
    assert d.schedule() == {}, "it may not have a fourth"
    d.update(plan=second)
    (output,) = d.update(plan=third)
    assert output.finish_reason == "length"


def test_a_result_of_a_sequence_that_ended_a_plan_before_is_dropped(driver) -> None:
    d = driver()
    d.add("a", 4, stop={9})
    d.schedule()
    first = d.plan
    d.schedule()
    (output,) = d.update(9, plan=first)
    assert output.finish_reason == "stop"
    assert d.num_free() == 100
    assert d.update() == []
    assert d.schedule() == {}
    assert (d.removed(), d.plan.ended_request_ids) == (["a"], ["a"])


def test_forks_wait_for_their_first_tokens(driver) -> None:
    d = driver()
    d.add("a", 6, n=2, max_tokens=4)
    d.schedule()
    assert d.schedule() == {}, "what comes next depends on the draws"
    d.update(lambda name, sample: 100 + sample)
    assert d.schedule() == {"a": 1, "a/1": 1}
    first = d.plan
    assert [fork.token_id for fork in first.forks] == [101]
    assert d.schedule() == {"a": 1, "a/1": 1}
    assert d.plan.forks == []
    d.update(plan=first)
    d.update()


def test_who_is_preempted_in_flight_comes_back_when_its_tokens_are_known(driver) -> None:
    d = driver(num_blocks=4, caching=False)
    d.add("a", 8, max_tokens=8)
    d.add("b", 7, max_tokens=2)
    assert d.schedule() == {"a": 8, "b": 7}
    first = d.plan
    assert d.schedule() == {"a": 1}, "a took b's blocks"
    second = d.plan
    assert d.waiting_reasons() == {"result": 1}
    assert d.why("b") == "result: it was preempted, and its next token is being computed"
    d.update(plan=first)
    assert d.waiting_reasons() == {"blocks": 1}
    d.update(plan=second)
    while "b" not in d.schedule():
        d.update()
    (new,) = d.plan.new_sequences
    assert new.output_token_ids == [7]
    (output,) = d.update()
    assert (output.request_id, output.finish_reason) == ("b", "length")


def test_results_come_in_the_order_of_plans(driver) -> None:
    d = driver()
    d.add("a")
    d.schedule()
    d.schedule()
    with pytest.raises(AssertionError, match="another step"):
        d.update()


# --- drafts


def test_drafts_are_planned_and_accepted_ones_count_as_computed(driver) -> None:
    d = driver()
    d.add("a", 5, max_tokens=20)
    d.step(drafts={"a": [1, 2, 3]})
    assert d.schedule() == {"a": 4}
    (item,) = d.plan.scheduled
    assert (item.num_drafts, item.sampling, item.draft_token_ids) == (3, Sampling.DRAW, [])
    assert d.schedule() == {}, "the next step depends on how many are right"
    (output,) = d.update(tokens={"a": [1, 2, 8]}, drafts={"a": [4]})
    assert output.new_token_ids == [1, 2, 8]
    assert d.schedule() == {"a": 2}, "one token that is known, and a draft"
    d.update(tokens={"a": [5]})
    assert d.schedule() == {"a": 1}
    d.update()
    assert d.finish() == {"a/0": "length"}


def test_a_stop_token_among_accepted_drafts_ends_the_sequence_there(driver) -> None:
    d = driver()
    d.add("a", 5, max_tokens=20, stop={2}, logprobs=0)
    entries = [TokenLogprobs([token], [0.0], [1]) for token in (1, 2, 3, 4)]
    d.step(drafts={"a": [1, 2, 3]}, logprobs={"a": entries[:1]})
    d.schedule()
    (output,) = d.update(tokens={"a": [1, 2, 3, 4]}, logprobs={"a": entries})
    assert (output.new_token_ids, output.finish_reason, output.logprobs) == ([1, 2], "stop", entries[:2])
    assert d.num_free() == 100


def test_drafts_never_go_beyond_the_limit_and_preempt_nobody(driver) -> None:
    d = driver(num_blocks=4)
    d.add("a", 7, max_tokens=4)
    d.add("b", 7, max_tokens=9)
    d.step(drafts={"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4]})
    assert d.schedule() == {"a": 1, "b": 1}, "no block is left for drafts"
    assert d.num_preemptions() == 0
    d.update()
    d.scheduler.abort("b")
    d.schedule()
    d.update(drafts={"a": [1, 2, 3, 4, 5]})
    assert d.schedule() == {"a": 1}, "one token more is its last"


def test_drafts_take_no_block_that_another_needs(driver) -> None:
    d = driver(num_blocks=5)
    d.add("drafts", 7, max_tokens=6)
    d.add("grows", 8, max_tokens=6)
    d.step(drafts={"drafts": [1, 2, 3]})
    assert d.schedule() == {"drafts": 1, "grows": 1}, "the last block is for the one that can't go on without"
    assert d.num_preemptions() == 0


def test_drafts_take_no_block_that_others_wait_for(driver) -> None:
    d = driver(num_blocks=12)
    d.add("drafts", 7, max_tokens=9)
    d.step(drafts={"drafts": [1, 2, 3]})
    d.add("waits", 41, max_tokens=4)
    assert d.schedule() == {"drafts": 1}, "its blocks are full"
    assert d.num_free() == 10
    d.update(drafts={"drafts": [1, 2, 3, 4]})
    d.scheduler.abort("waits")
    assert d.schedule() == {"drafts": 5}


def test_drafts_leave_a_token_to_those_who_are_behind(driver) -> None:
    d = driver(policy="priority", max_num_batched_tokens=6, long_prefill_token_threshold=2)
    d.add("later", 2, priority=2)
    d.step()
    d.add("first", 20, priority=1)
    d.step(drafts={"later": [1, 2, 3, 4, 5]})
    assert d.schedule() == {"later": 5, "first": 1}


def test_blocks_of_accepted_drafts_are_found_by_their_tokens(driver) -> None:
    d = driver()
    d.add("a", [1, 2, 3], max_tokens=6)
    d.step(4, drafts={"a": [5, 6, 7]})
    d.schedule()
    d.update(tokens={"a": [5, 6, 7, 8]})
    d.scheduler.abort("a")
    d.add("b", [1, 2, 3, 4, 5, 6, 7, 9, 9])
    assert d.schedule() == {"b": 5}, "four of its tokens are found"


# --- ranked candidates


class Pair(Continuation):
    """Two sequences: the second goes on from the first's second token, with the second candidate."""

    tells_tokens = True

    def __init__(self, task: SamplingTask) -> None:
        self.has_second = False

    def sampling(self, index: int) -> tuple[Sampling, int]:
        return Sampling.RANK, 1

    def advance(self, index: int, num_output_tokens: int, result: SequenceResult) -> list[Branch]:
        assert result.candidates is not None
        best, second, *_ = result.candidates.token_ids
        if self.has_second or num_output_tokens < 1:
            return [Branch(index, best)]
        self.has_second = True
        return [Branch(0, best), Branch(1, second)]

    def endings(self) -> list[Ending]:
        return []

    def carries(self, index: int, unfinished: set[int]) -> bool:
        return index == 0 and not self.has_second and 1 in unfinished

    def state(self) -> bool:
        return self.has_second

    def restore(self, state: bool) -> None:
        self.has_second = state


def test_the_row_is_told_what_became_of_its_candidates(driver) -> None:
    d = driver(make_continuation=Pair)
    d.add("a", 6, n=2, max_tokens=4)
    d.schedule()
    assert [item.sampling for item in d.plan.scheduled] == [Sampling.RANK]
    assert d.schedule() == {}, "it waits for its token to be chosen"
    (output,) = d.update(candidates={"a": [11, 12]})
    assert (output.sequence_index, output.new_token_ids) == (0, [11])
    d.schedule()
    assert [item.chosen_token_id for item in d.plan.scheduled] == [11]
    outputs = d.update(candidates={"a": [21, 22]})
    assert [(o.sequence_index, o.new_token_ids) for o in outputs] == [(0, [21]), (1, [11, 22])]
    d.schedule()
    assert [(fork.token_id, fork.num_tokens) for fork in d.plan.forks] == [(22, 7)]
    chosen = {d.names[item.sequence_id]: item.chosen_token_id for item in d.plan.scheduled}
    assert chosen == {"a": 21, "a/1": -1}, "the fork brought its token along"
    d.update(candidates={"a": [31, 32], "a/1": [41, 42]})
    d.schedule()
    ends = [o.finish_reason for o in d.update(candidates={"a": [5, 6], "a/1": [5, 6]})]
    assert ends == ["length", "length"]


def test_a_sequence_that_has_ended_goes_on_while_another_is_to_come_from_it(driver) -> None:
    d = driver(make_continuation=Pair)
    d.add("a", 6, n=2, max_tokens=4)
    d.step(candidates={"a": [11, 12]})
    d.scheduler.finish_sequence("a", 0)
    (output,) = d.step(candidates={"a": [21, 22]})
    assert (output.sequence_index, output.new_token_ids) == (1, [11, 22])
    assert d.schedule() == {"a/1": 1}


# --- forgetting and going on


def test_forgotten_plans_are_made_again(driver) -> None:
    d = driver()
    d.add("a", 6, n=2, max_tokens=4)
    d.add("b", 6, max_tokens=3)
    d.step()
    d.schedule()
    d.schedule()
    d.scheduler.cancel()
    d.scheduler.check_integrity()
    assert d.num_free() == 100
    assert d.schedule() == {"a": 3, "a/1": 3, "b": 3}, "a block of each is found"
    plan = d.plan
    assert [request.request_id for request in plan.new_requests] == ["a", "b"]
    assert [new.output_token_ids for new in plan.new_sequences] == [[7], [7], [7]]
    assert (plan.removed_sequence_ids, plan.ended_request_ids, plan.forks) == ([], [], [])
    d.update()
    assert set(d.finish().values()) == {"length"}


def test_an_id_that_is_used_again_at_once_is_not_forgotten(driver) -> None:
    d = driver()
    d.add("a")
    d.step()
    d.scheduler.abort("a")
    d.add("a")
    d.schedule()
    assert [request.request_id for request in d.plan.new_requests] == ["a"]
    assert d.plan.ended_request_ids == []
    assert len(d.plan.removed_sequence_ids) == 1
    d.update()


def test_of_a_tree_so_many_levels_are_planned_as_the_limit_allows(driver) -> None:
    tree = DraftTree.read("[(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)]")
    for max_tokens, planned in ((20, 6), (5, 6), (4, 5), (3, 3), (2, 0)):
        d = driver(draft_tree=tree, max_num_drafts=6)
        d.add("a", 5, max_tokens=max_tokens)
        d.step(drafts={"a": [1, 2, 3, 4, 5, 6]})
        assert d.schedule() == {"a": 1 + planned}, max_tokens
        assert d.plan.scheduled[0].num_drafts == planned
    d = driver(draft_tree=tree, max_num_drafts=6, max_num_batched_tokens=5)
    d.add("a", 5, max_tokens=20)
    d.step(drafts={"a": [1, 2, 3, 4, 5, 6]})
    assert d.schedule() == {"a": 5}, "as many nodes as the budget has tokens"
    d.update(tokens={"a": [2, 5]}, drafts={"a": []})
    stats = d.scheduler.stats().speculation
    assert stats is not None
    assert (stats.num_draft_tokens, stats.num_accepted_tokens_per_pos) == (4, [1, 0])
