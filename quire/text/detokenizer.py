"""One sequence's text as its tokens come: increments that add up to the whole, and stop strings.

The output processor keeps one per sequence that wants text. The text is what `Tokenizer.decode` gives for prompt and
output together, less the prompt's part. Tokens are looked at one at a time, so nothing depends on how many arrive at
once. It knows nothing of requests, logprobs or token-level stops.
"""

from collections.abc import Sequence

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
        "_include_stop", "_min_tokens", "_num_held", "_num_sent", "_overlap", "_settled", "_stable", "_stop", "_stream",
        "num_tokens", "output_text",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        skips = params.skip_special_tokens
        self._stream = tokenizer.new_stream(prompt_token_ids, skips, skips or params.spaces_between_special_tokens)
        self._stop = list(params.stop)
        self._overlap = max(map(len, self._stop), default=1) - 1  # characters of a stop string that may be old
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
        if end != self._stable:  # else nothing new: in a long unstable run, looking again would be slow
            tail = self.output_text[max(0, end - self._overlap) : end]
            self._stable, self._num_held = end, self._held(tail)
        return self._num_held

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string, short of being one."""
        held = 0
        for stop in self._stop:
            place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while place >= 0:
                if stop.startswith(text[place:]):
                    held = max(held, len(text) - place)
                    break
                place = text.find(stop[0], place + 1)
        return held
