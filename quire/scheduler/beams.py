"""Beam search: the sequences of a request are its best beginnings so far, and go on in lockstep.

A continuation of the scheduler's. Each step ranks candidates for every beam; once those of all beams are there, the
best beginnings of all are chosen together. What ends, and when the search does, are as in transformers' beam search. It
knows tokens and log-probabilities, and nothing of blocks, queues or plans.
"""

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import NamedTuple

from quire.protocol.requests import SamplingTask
from quire.protocol.step import Sampling, SequenceResult, TokenLogprobs
from quire.scheduler.continuation import Branch, Continuation, Ending


class Node(NamedTuple):
    """A beginning: one token after another beginning. Those that share tokens share nodes."""

    parent: "Node | None"  # None: this is the prompt alone
    entry: TokenLogprobs  # of the token, which comes first in it
    score: float  # sum of the tokens' log-probabilities
    length: int  # output tokens

    def entries(self) -> list[TokenLogprobs]:
        """Of all output tokens, first to last."""
        found, node = [], self
        while node.parent is not None:
            found.append(node.entry)
            node = node.parent
        return found[::-1]


_PROMPT = Node(None, TokenLogprobs([], [], []), 0.0, 0)


class Hypothesis(NamedTuple):
    """A beginning that has ended."""

    score: float  # length penalty included
    node: Node
    end: tuple[str, int | None]  # finish_reason and stop_reason


class _Candidate(NamedTuple):
    """A token that one of the beams may go on with."""

    score: float  # of the beam and the token
    rank: int  # of the beam
    place: int  # among the beam's candidates
    token_id: int


class Beams(Continuation):
    """A request's beams, at most `task.num_beams`; fewer where there are not so many candidates.

    Which beginnings are kept depends on the request alone: equal scores go by the beams' rank, then by the candidates'.
    """

    tells_tokens = False

    def __init__(self, task: SamplingTask) -> None:
        self._task = task
        self._width = task.num_beams
        self._min_tokens = 0 if task.has_grammar else task.params.min_tokens  # as its group's
        self._beams = [(0, _PROMPT)]  # (index, its tokens), the best first
        self._hypotheses: list[Hypothesis] = []  # the best first, at most `width`
        # Of the beams that sit out: their candidates, and the likeliest tokens of all, where asked for.
        self._found: dict[int, tuple[TokenLogprobs, list[TokenLogprobs]]] = {}

    def sampling(self, index: int) -> tuple[Sampling, int]:
        """So many candidates that enough of them go on, whichever stop."""
        return Sampling.RANK, self._task.num_candidates

    def advance(self, index: int, num_output_tokens: int, result: SequenceResult) -> list[Branch] | None:
        """The beams' next tokens, once the candidates of all of them are known."""
        assert result.candidates is not None, "a beam's candidates were not ranked"
        self._found[index] = result.candidates, result.logprobs or []
        if len(self._found) < len(self._beams):
            return None
        task, length = self._task, num_output_tokens + 1
        running: list[_Candidate] = []
        ended: list[Hypothesis] = []
        for place, candidate in enumerate(islice(self._candidates(), task.num_candidates)):
            stops = candidate.token_id in task.stop_token_ids and length >= self._min_tokens
            if not stops and length < task.max_tokens:
                if len(running) < self._width:
                    running.append(candidate)
            elif place < self._width:  # what comes after them is there to go on only
                ended.append(self._end(candidate, stops))
        self._hypotheses = sorted(self._hypotheses + ended, key=lambda hypothesis: -hypothesis.score)[: self._width]
        branches = [] if self._is_over(running, length) else self._branches(running)
        self._found = {}
        return branches

    def endings(self) -> list[Ending]:
        """The best hypotheses."""
        return [Ending(each.node.entries(), each.end) for each in self._hypotheses]

    def carries(self, index: int, unfinished: set[int]) -> bool:
        """Any output may come of any beam."""
        return bool(unfinished)

    # The choice.

    def _candidates(self) -> Iterator[_Candidate]:
        """Those of all beams, the best first."""
        ranked: list[list[_Candidate]] = []
        for rank, (index, node) in enumerate(self._beams):
            found, _ = self._found[index]
            tokens = enumerate(zip(found.logprobs, found.token_ids, strict=True))
            ranked.append([_Candidate(node.score + logprob, rank, i, token) for i, (logprob, token) in tokens])
        return merge(*ranked, key=lambda candidate: (-candidate.score, candidate.rank, candidate.place))

    def _node(self, candidate: _Candidate) -> Node:
        index, parent = self._beams[candidate.rank]
        (found, tops), place = self._found[index], candidate.place
        entry = TokenLogprobs([candidate.token_id], [found.logprobs[place]], [found.ranks[place]])
        for top in tops:
            entry.token_ids.extend(top.token_ids[1:])
            entry.logprobs.extend(top.logprobs[1:])
            entry.ranks.extend(top.ranks[1:])
        return Node(parent, entry, parent.score + entry.logprobs[0], parent.length + 1)

    def _end(self, candidate: _Candidate, stops: bool) -> Hypothesis:
        node, token_id = self._node(candidate), candidate.token_id
        score = node.score / node.length**self._task.params.length_penalty
        stop_reason = token_id if stops and token_id != self._task.eos_token_id else None
        return Hypothesis(score, node, ("stop" if stops else "length", stop_reason))

    def _is_over(self, running: list[_Candidate], length: int) -> bool:
        """Whether nothing better can come, or nothing more at all."""
        early_stopping, penalty = self._task.params.early_stopping, self._task.params.length_penalty
        if not running:
            return True
        if len(self._hypotheses) < self._width:
            return False
        if early_stopping is True:
            return True
        # The length at which the best beam may score best, or (False) the one that it has.
        reach = self._task.max_tokens if early_stopping == "never" and penalty > 0.0 else length
        return running[0].score / reach**penalty <= self._hypotheses[-1].score

    def _branches(self, running: list[_Candidate]) -> list[Branch]:
        """The chosen ones take the places of beams: a beam's best child its own, the others those that came free."""
        parents = {candidate.rank for candidate in running}
        kept = {self._beams[rank][0] for rank in parents}
        free = iter([index for index in range(self._width) if index not in kept])
        branches: list[Branch] = []
        beams: list[tuple[int, Node]] = []
        for candidate in running:
            parent = self._beams[candidate.rank][0]
            index = next(free) if candidate.rank not in parents else parent
            parents.discard(candidate.rank)
            beams.append((index, self._node(candidate)))
            branches.append(Branch(index, candidate.token_id, None, parent))
        self._beams = beams
        return branches


def continuation_of(task: SamplingTask) -> Continuation:
    """What a request's results mean."""
    return Beams(task) if task.num_beams else Continuation(task)
