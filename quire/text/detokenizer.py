"""One sequence's text as its tokens come: increments that add up to the whole, and stop strings.

The output processor keeps one per sequence that wants text. The text is what `Tokenizer.decode` gives for prompt and
output together, less the prompt's part. Tokens are looked at one at a time, so nothing depends on how many arrive at
once. It knows nothing of requests, logprobs or token-level stops.
"""

from collections.abc import Sequence

from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one output sequence; amortised constant time per token.

    A stop string counts when it ends in the text of a token after the first `min_tokens`. The earliest match in the
    text wins among those that one token completes; of two at one place, the one listed first.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        skips = params.skip_special_tokens
        self._stream = tokenizer.new_stream(prompt_token_ids, skips, skips or params.spaces_between_special_tokens)
        self._stop = list(params.stop)
        self._overlap = max(map(len, self._stop), default=1) - 1  # characters of a stop string that may be old
        self._include_stop, self._min_tokens = params.include_stop_str_in_output, params.min_tokens
        self._pieces: list[str] = []  # the text, in parts; those before _num_sent_pieces have been handed out
        self._num_sent_pieces = 0
        self._num_sent = 0  # characters
        self._length = 0  # characters
        self._stable = self._num_held = 0  # the stable length last looked at, and how much of it is held back
        self._settled = False
        self.num_tokens = 0  # output tokens taken in so far

    @property
    def output_text(self) -> str:
        """All text so far, with what a delta would still hold back."""
        text = "".join(self._pieces)
        self._pieces[:] = [text[: self._num_sent], text[self._num_sent :]]
        self._num_sent_pieces = 1
        return text

    def update(self, new_token_ids: Sequence[int], stop_terminated: bool = False) -> tuple[str | None, int]:
        """Take new output tokens.

        Args:
            stop_terminated: the last of them is an end-of-sequence or stop token, which is kept out of the text
                unless include_stop_str_in_output.

        Returns:
            The stop string found, or None; and how many of the new tokens were used up to it (else all). The text
            ends with the stop string then, or before it, and must not be updated again.
        """
        visible = len(new_token_ids) - (stop_terminated and not self._include_stop)
        push, pieces = self._stream.push, self._pieces
        for index in range(visible):
            drop, text = push(new_token_ids[index])
            if drop:
                self._drop(drop)
            if text:
                start = self._length
                pieces.append(text)
                self._length += len(text)
                if self._stop and self.num_tokens + index >= self._min_tokens:
                    found = self._find_stop(start)
                    if found is not None:
                        self.num_tokens += index + 1
                        return found, index + 1
        self.num_tokens += len(new_token_ids)
        return None, len(new_token_ids)

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Text to hand out: what is new since the last call if `delta`, else all of it.

        Until `finished`, text that may turn out to begin a stop string, or to change, is held back.
        """
        if finished and not self._settled:
            self._settled = True
            drop, text = self._stream.finish()
            self._drop(drop)
            self._pieces.append(text)
            self._length += len(text)
        end = self._length if finished else self._safe_length()
        if not delta:
            return self.output_text[:end]
        num_new = end - self._num_sent
        if num_new <= 0:
            return ""
        unsent = "".join(self._pieces[self._num_sent_pieces :])
        new, held = unsent[:num_new], unsent[num_new:]
        self._pieces[self._num_sent_pieces :] = [new, held] if held else [new]
        self._num_sent_pieces += 1
        self._num_sent = end
        return new

    def _find_stop(self, start: int) -> str | None:
        """Look for a stop string that ends beyond character `start`; cut the text there if there is one."""
        base = max(0, start - self._overlap)
        window = self._text_from(base)
        best, found = len(window), None
        for stop in self._stop:
            place = window.find(stop, max(0, start - base - len(stop) + 1))
            if 0 <= place < best:
                best, found = place, stop
        if found is not None:
            self._settled = True
            self._drop(self._length - (base + best + (len(found) if self._include_stop else 0)))
        return found

    def _safe_length(self) -> int:
        """Characters that neither a stop string nor an unstable end can take back."""
        stable = self._length - self._stream.num_unstable
        if not self._stop or self._include_stop or self._settled:
            return stable
        if stable != self._stable:  # else nothing new: in a long unstable run, looking again would be slow
            tail = self._text_from(max(0, stable - self._overlap))
            self._stable, self._num_held = stable, self._held(tail[: len(tail) - self._stream.num_unstable])
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

    def _text_from(self, base: int) -> str:
        """The text from character `base` on."""
        first, index = self._length, len(self._pieces)
        while first > base:
            index -= 1
            first -= len(self._pieces[index])
        return "".join(self._pieces[index:])[base - first :]

    def _drop(self, count: int) -> None:
        """Take the last `count` characters away; never characters that were handed out."""
        self._length -= count
        while count:
            piece = self._pieces.pop()
            if len(piece) > count:
                self._pieces.append(piece[:-count])
            count -= min(count, len(piece))
