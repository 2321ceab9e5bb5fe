"""A continuation for tests: sequences that branch off each other at any time, from ranked candidates.

As beams, it never lets a token be drawn: each step ranks candidates, and it chooses. Where each sequence begins,
and on which token, depends on its request alone, so that the order of steps can't matter.
"""

from fake_grammars import allowed
from simulated import FakeModel, extend, root_fingerprint

from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import Sampling, SequenceResult, TokenLogprobs
from quire.scheduler.beams import Beams
from quire.scheduler.continuation import Branch, Continuation, Ending


class Grove(Continuation):
    """Sequence c > 0 branches off an earlier one, after a few tokens or, at the latest, where that one ends."""

    tells_tokens = True

    def __init__(self, task: SamplingTask) -> None:
        self._task = task
        self._unborn = set(range(1, task.num_sequences))

    def sampling(self, index: int) -> tuple[Sampling, int]:
        return Sampling.RANK, 1

    def advance(self, index: int, num_output_tokens: int, result: SequenceResult) -> list[Branch]:
        assert result.candidates is not None
        branches: list[Branch] = []
        self._grow(index, num_output_tokens, result.candidates.token_ids, branches)
        return branches

    def endings(self) -> list[Ending]:
        return []

    def carries(self, index: int, unfinished: set[int]) -> bool:
        return any(self._bearer(child) == index for child in self._unborn & unfinished)

    def ends(self, token_id: int, num_output_tokens: int) -> str | None:
        """Why a sequence ends with its num_output_tokens-th token, if it does."""
        min_tokens = 0 if self._task.has_grammar else self._task.params.min_tokens
        if token_id in self._task.stop_token_ids and num_output_tokens >= min_tokens:
            return "stop"
        return "length" if num_output_tokens >= self._task.max_tokens else None

    def _grow(self, index: int, num_output_tokens: int, candidates: list[int], branches: list[Branch]) -> None:
        token_id = candidates[(index + num_output_tokens) % len(candidates)]
        branches.append(Branch(index, token_id, [TokenLogprobs([token_id], [-1.0], [1])]))
        ended = self.ends(token_id, num_output_tokens + 1)
        for child in sorted(self._unborn):
            if self._parent(child) == index and (ended or num_output_tokens >= (self._task.seed + child) % 4):
                self._unborn.discard(child)
                self._grow(child, num_output_tokens, candidates, branches)

    def _parent(self, index: int) -> int:
        return (self._task.seed * 7 + index * 13) % index

    def _bearer(self, index: int) -> int:
        """The sequence there is already that an unborn one will come from, or the ancestors that are to come first."""
        while index in self._unborn:
            index = self._parent(index)
        return index


def search_alone(request: NewRequest, model: FakeModel) -> dict[int, tuple[list[int], str]]:
    """The best outputs of a beam search, and why each ends, when its request runs alone."""
    assert isinstance(request.task, SamplingTask)
    beams = Beams(request.task)
    live: dict[int, list[int]] = {0: []}
    while True:
        branches: list[Branch] | None = None
        for index, outputs in live.items():
            fingerprint = root_fingerprint(request.cache_salt)
            for token_id in [*request.prompt_token_ids, *outputs]:
                fingerprint = extend(fingerprint, token_id)
            mask = allowed(request.task, outputs)
            found = SequenceResult(candidates=model.rank(fingerprint, beams.sampling(index)[1], mask))
            branches = beams.advance(index, len(outputs), found)
        assert branches is not None, "all candidates are there, and nothing is chosen"
        if not branches:
            endings = enumerate(beams.endings())
            return {i: ([entry.token_ids[0] for entry in logprobs], end[0]) for i, (logprobs, end) in endings}
        live = {branch.index: [*live[branch.parent], branch.token_id] for branch in branches}


def grow_alone(request: NewRequest, model: FakeModel) -> dict[int, tuple[list[int], str]]:
    """Every sequence's outputs, and why it ends, when a request's grove grows alone."""
    assert isinstance(request.task, SamplingTask)
    grove, live, grown = Grove(request.task), [(0, [])], {}
    while live:
        index, outputs = live.pop()
        fingerprint = root_fingerprint(request.cache_salt)
        for token_id in [*request.prompt_token_ids, *outputs]:
            fingerprint = extend(fingerprint, token_id)
        candidates = model.rank(fingerprint, grove.sampling(index)[1], allowed(request.task, outputs))
        for branch in grove.advance(index, len(outputs), SequenceResult(candidates=candidates)):
            found = [*outputs, branch.token_id]
            why = grove.ends(branch.token_id, len(found))
            if why is None:
                live.append((branch.index, found))
            else:
                grown[branch.index] = (found, why)
    return grown
