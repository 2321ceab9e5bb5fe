"""One sequence's text as its tokens come: increments that add up to the whole, and stop strings.

The output processor keeps one per sequence that wants text. The text is what `Tokenizer.decode` gives for prompt and
output together, less the prompt's part. Tokens are looked at one at a time, so nothing depends on how many arrive at
once. It knows nothing of requests, logprobs or token-level stops.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat

from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one output sequence; a token costs the same however many came before, unless it takes characters back.

    A stop string counts when it ends in the text of a token after the first `min_tokens`. The earliest match in the
    text wins among those that one token completes; of two at one place, the one listed first.

    Attributes:
        output_text: all text so far, with what a delta would still hold back.
        num_tokens: output tokens taken in so far.
    """

    __slots__ = (
        "_begun", "_firsts", "_include_stop", "_min_tokens", "_num_held", "_num_sent", "_settled", "_shorter",
        "_stable", "_stop", "_stream", "num_tokens", "output_text",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        skips = params.skip_special_tokens
        self._stream = tokenizer.new_stream(prompt_token_ids, skips, skips or params.spaces_between_special_tokens)
        self._stop = list(params.stop)
        self._firsts, self._shorter = {stop[0] for stop in self._stop}, [_shorter(stop) for stop in self._stop]
        self._begun = [0] * len(self._stop)  # characters of each stop string that the stable text ends with
        self._include_stop, self._min_tokens = params.include_stop_str_in_output, params.min_tokens
        self.output_text = ""
        self._num_sent = 0  # characters
        self._stable = self._num_held = 0  # the stable length last looked at, and how much of it is held back
        self._settled = False
        self.num_tokens = 0

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> str | None:
        """Take new output tokens, up to the one that completes a stop string; returns that, or None.

        The text ends with the stop string then, or before it, and must not be updated again.

        Args:
            stop_terminated: the last of them is an end-of-sequence or stop token, which is kept out of the text
                unless include_stop_str_in_output.
        """
        num_tokens = self.num_tokens + len(new_token_ids)
        for token_id in new_token_ids[:-1] if stop_terminated and not self._include_stop else new_token_ids:
            drop, new = self._stream.push(token_id)
            text, self.output_text = self.output_text, ""  # where nobody else has it, Python lets it grow in its place
            if drop:
                text = text[:-drop]  # never any that was handed out
            text += new
            self.output_text = text
            self.num_tokens += 1
            if self._stop and new and self.num_tokens > self._min_tokens and (found := self._find_stop(len(new))):
                return found
        self.num_tokens = num_tokens
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Text to hand out: what is new since the last call if `delta`, else all of it.

        Until `finished`, text that may turn out to begin a stop string, or to change, is held back.
        """
        if finished and not self._settled:
            self._settled = True
            drop, new = self._stream.finish()
            self.output_text = self.output_text[: len(self.output_text) - drop] + new
        end = len(self.output_text)
        if not finished:
            end -= self._stream.num_unstable
            if self._stop and not (self._include_stop or self._settled):
                end -= self._held_before(end)
        if not delta:
            return self.output_text[:end]
        text = self.output_text[self._num_sent : end]
        self._num_sent += len(text)
        return text

    def _find_stop(self, num_new: int) -> str | None:
        """Look for a stop string that ends in the last `num_new` characters; cut the text there if there is one."""
        text = self.output_text
        best, found = len(text), None
        for stop in self._stop:
            place = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if 0 <= place < best:
                best, found = place, stop
        if found is not None:
            self._settled = True
            self.output_text = text[: best + len(found) * self._include_stop]
        return found

    def _held_before(self, end: int) -> int:
        """Characters before this place that may turn out to begin a stop string."""
        piece, self._stable = self.output_text[self._stable : end], end
        if self._num_held or not self._firsts.isdisjoint(piece):
            for char in piece:
                self._begun = [*map(_go_on, self._stop, self._shorter, self._begun, repeat(char))]
            self._num_held = max(self._begun)
        return self._num_held


def _go_on(stop: str, shorter: list[int], num: int, char: str) -> int:
    """With how many characters of a stop string, short of all, a text ends that ended with `num` of them before."""
    while num and stop[num] != char:
        num = shorter[num - 1]
    num += stop[num] == char
    return num if num < len(stop) else shorter[-1]


@lru_cache(256)
def _shorter(stop: str) -> list[int]:
    """With how many of its first characters each beginning of a stop string ends, short of itself."""
    found = [0]
    for char in stop[1:]:
        found.append(_go_on(stop, found, found[-1], char))
    return found
