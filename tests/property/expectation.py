"""What a request must bring, whatever happens around it: the same as when it runs alone.

`world` keeps an `Expectation` for each request that the engine took, feeds it the engine's news, and so notices any
token too many, too few or of somebody else. It knows requests and the fake model, and nothing of engines.
"""

from dataclasses import dataclass, field

from fake_grammars import EOS_TOKEN, allowed
from groves import Grove, grow_alone, search_alone
from simulated import FakeModel, extend, root_fingerprint

from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import SequenceOutput
from quire.scheduler.beams import continuation_of
from quire.scheduler.continuation import Continuation

USER_STOP_TOKEN = 17
STOP_TOKENS = frozenset({EOS_TOKEN, USER_STOP_TOKEN})


def stop_string_found(output_token_ids: list[int]) -> bool:
    """The rule that plays the part of stop strings: two tokens in a row."""
    return len(output_token_ids) > 1 and (output_token_ids[-1] * 7 + output_token_ids[-2]) % 29 == 0


def is_grove(task: SamplingTask) -> bool:
    """Whether a request's sequences grow out of each other; most of those with several do not."""
    return task.num_sequences > 1 and task.seed % 3 == 0 and not task.num_beams


def make_continuation(task: SamplingTask) -> Continuation:
    """What a request's results mean."""
    return Grove(task) if is_grove(task) else continuation_of(task)


@dataclass
class Expectation:
    """A request as its user sees it: what it must bring, what it has brought."""

    request: NewRequest
    has_stop_string: bool = False
    faults: dict[int, int] = field(default_factory=dict)  # sequence index -> fails in place of this output token
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    num_prompt_logprobs: int = 1
    num_cached_tokens: int | None = None
    grown: dict[int, tuple[list[int], str]] = field(default_factory=dict)

    @property
    def task(self) -> SamplingTask:
        assert isinstance(self.request.task, SamplingTask)
        return self.request.task

    @property
    def missing(self) -> set[int]:
        """The sequences that have not ended."""
        return set(range(self.task.num_sequences)) - self.ended.keys()

    def take(self, output: SequenceOutput) -> int | None:
        """Note the news of one sequence; returns the number of tokens after which a stop string ends it, if any."""
        task, index = self.task, output.sequence_index
        assert index in self.missing, "invariant 3: news of a sequence that has ended, or that nobody asked for"
        tokens = self.outputs.setdefault(index, [])
        self._take_prompt_logprobs(output)
        if output.new_token_ids:
            if self.num_cached_tokens is None:
                self.num_cached_tokens = output.num_cached_tokens
            assert output.num_cached_tokens == self.num_cached_tokens, "invariant 4: what was cached changes afterwards"
            if task.params.logprobs is not None and not is_grove(task):
                assert output.logprobs is not None
                assert [entry.token_ids[0] for entry in output.logprobs] == output.new_token_ids
        for place, token_id in enumerate(output.new_token_ids, 1):
            tokens.append(token_id)
            ends_anyway = place == len(output.new_token_ids) and output.finish_reason
            if self.has_stop_string and stop_string_found(tokens) and not ends_anyway:
                return len(tokens)
        return None

    def end(self, output: SequenceOutput, reason: str, model: FakeModel) -> None:
        """A sequence has ended: what it brought must be what it brings alone (invariants 4, 8 and 10)."""
        index = output.sequence_index
        self.ended[index] = reason
        tokens = self.outputs[index]
        whole, why = self.alone(model, index)
        if reason in ("abort", "error"):
            assert tokens == whole[: len(tokens)], "what came before the end differs from the request run alone"
        else:
            assert (tokens, reason) == (whole, why), "the output differs from that of the request run alone"
        needs_reason = reason == "stop" and tokens[-1] != EOS_TOKEN
        assert output.stop_reason == (tokens[-1] if needs_reason else None) or reason == "string"
        assert (output.failure is not None) == (reason == "error")

    def alone(self, model: FakeModel, index: int) -> tuple[list[int], str]:
        """A sequence's whole output, and why it ends, when its request runs alone and without a fault."""
        if is_grove(self.task) or self.task.num_beams:
            if not self.grown:
                self.grown = (grow_alone if is_grove(self.task) else search_alone)(self.request, model)
            found, why = self.grown.get(index, ([], "error"))  # a grammar may leave a search with too few outputs
        else:
            found, why = self._drawn_alone(model, index)
        for length in range(1, len(found)):
            if self.has_stop_string and stop_string_found(found[:length]):
                return found[:length], "string"
        return found, why

    def _take_prompt_logprobs(self, output: SequenceOutput) -> None:
        part = output.prompt_logprobs
        if part is not None:
            assert part.start == self.num_prompt_logprobs, "prompt logprobs twice, or a gap"
            self.num_prompt_logprobs += len(part.entries)
        if output.new_token_ids and self.task.params.prompt_logprobs is not None:
            assert self.num_prompt_logprobs == len(self.request.prompt_token_ids), "prompt logprobs are missing"

    def _drawn_alone(self, model: FakeModel, index: int) -> tuple[list[int], str]:
        task, found = self.task, []
        fingerprint = root_fingerprint(self.request.cache_salt)
        for token_id in self.request.prompt_token_ids:
            fingerprint = extend(fingerprint, token_id)
        while True:
            mask = allowed(task, found)
            token_id = model.draw(fingerprint, task.seed, task.first_sequence_index + index, len(found), mask)
            found.append(token_id)
            fingerprint = extend(fingerprint, token_id)
            if token_id in task.stop_token_ids and (task.has_grammar or len(found) >= task.params.min_tokens):
                return found, "stop"
            if len(found) == task.max_tokens:
                return found, "length"
