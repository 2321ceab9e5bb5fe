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

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> tuple[str | None, int]:
        """Take new output tokens.

        Args:
            stop_terminated: the last of them is an end-of-sequence or stop token, which is kept out of the text
                unless include_stop_str_in_output.

        Returns:
            The stop string found, or None; and how many of the new tokens were used up to it (else all). The text
            ends with the stop string then, or before it, and must not be updated again.
        """
        num_new = len(new_token_ids)
        for index in range(num_new - (stop_terminated and not self._include_stop)):
            drop, new = self._stream.push(new_token_ids[index])
            if drop or new:
                self._append(drop, new)
                if self._stop and new and self.num_tokens + index >= self._min_tokens:
                    found = self._find_stop(len(self.output_text) - len(new))
                    if found is not None:
                        self.num_tokens += index + 1
                        return found, index + 1
        self.num_tokens += num_new
        return None, num_new

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Text to hand out: what is new since the last call if `delta`, else all of it.

        Until `finished`, text that may turn out to begin a stop string, or to change, is held back.
        """
        if finished and not self._settled:
            self._settled = True
            self._append(*self._stream.finish())
        end = len(self.output_text) if finished else self._safe_length()
        if not delta:
            return self.output_text[:end]
        start, self._num_sent = self._num_sent, max(self._num_sent, end)
        return self.output_text[start:end]

    def _append(self, drop: int, new: str) -> None:
        """Take the last `drop` characters away, never any that were handed out, and add new ones."""
        text, self.output_text = self.output_text, ""  # where nobody else has it, Python lets it grow in its place
        if drop:
            text = text[:-drop]
        text += new
        self.output_text = text

    def _find_stop(self, start: int) -> str | None:
        """Look for a stop string that ends beyond character `start`; cut the text there if there is one."""
        text = self.output_text
        best, found = len(text), None
        for stop in self._stop:
            place = text.find(stop, max(0, start - len(stop) + 1))
            if 0 <= place < best:
                best, found = place, stop
        if found is not None:
            self._settled = True
            self.output_text = text[: best + len(found) * self._include_stop]
        return found

    def _safe_length(self) -> int:
        """Characters that neither a stop string nor an unstable end can take back."""
        stable = len(self.output_text) - self._stream.num_unstable
        if not self._stop or self._include_stop or self._settled:
            return stable
        if stable != self._stable:  # else nothing new: in a long unstable run, looking again would be slow
            tail = self.output_text[max(0, stable - self._overlap) : stable]
            self._stable, self._num_held = stable, self._held(tail)
        return stable - self._num_held

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
