"""Continuations: what the results of a request's sequences mean, and which sequences go on from them.

The scheduler asks a request's continuation what to do at a sequence's last position and, where that is more than one
draw, what became of it. Independent samples are here; `quire.scheduler.beams` has another. It knows tokens
and logprobs, and nothing of queues, blocks or plans.
"""

from dataclasses import dataclass
from typing import NamedTuple

from quire.protocol.requests import SamplingTask
from quire.protocol.step import Sampling, SequenceResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence that goes on from another's result: that one itself, or a new one that shares its tokens so far."""

    index: int  # of the sequence in its request
    token_id: int  # its next token
    logprobs: list[TokenLogprobs] | None = None  # the one of it
    parent: int = -1  # whose tokens it shares; -1: the sequence that `advance` was asked about


class Ending(NamedTuple):
    """A whole output, told at once when its request ends."""

    logprobs: list[TokenLogprobs]  # one per token, which comes first in it
    end: tuple[str, int | None]  # finish_reason and stop_reason


class Continuation:
    """How the sequences of one request go on. A sequence is known by its index.

    A request begins with its root, index 0; every other index has to come from `advance` while its parent lives.

    What is here are `num_sequences` samples that share nothing but the prompt: drawn together at its end, then each by
    itself. Another continuation has all of these methods of its own.

    Attributes:
        tells_tokens: sequences' tokens are told as they come, and 0 .. num_sequences - 1 are their indices; otherwise
            nothing is told before the `endings`.
    """

    tells_tokens = True

    def __init__(self, task: SamplingTask) -> None:
        self._num_sequences = task.num_sequences
        self._forked = task.num_sequences == 1

    def sampling(self, index: int) -> tuple[Sampling, int]:
        """What is done at a sequence's last position, and the number of samples; asked again after each `advance`.

        A single DRAW is appended to the sequence without a question. Here: one draw, or all first tokens at once.
        """
        return Sampling.DRAW, 1 if self._forked else self._num_sequences

    def advance(self, index: int, num_output_tokens: int, result: SequenceResult) -> list[Branch] | None:
        """What goes on from a sequence's result; without a branch of its own index it ends without a word.

        None: that depends on siblings whose results are still to come, and it sits out until then. The answer to the
        last of them is for all that sit out; no branch at all means that the request is over.

        Here: the prompt is computed, and each sequence gets its own first token.
        """
        self._forked = True
        logprobs = [[one] for one in result.logprobs] if result.logprobs else [None] * self._num_sequences
        return [Branch(i, token_id, logprobs[i]) for i, token_id in enumerate(result.token_ids)]

    def endings(self) -> list[Ending]:
        """The request's outputs, the best first; asked once `advance` has returned no branch."""
        return []

    def carries(self, index: int, unfinished: set[int]) -> bool:
        """Whether a sequence must go on although its own index has ended, as others are still to come from it.

        Here: the root computes the prompt for all.
        """
        return not self._forked and bool(unfinished)
