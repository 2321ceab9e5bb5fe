"""From sampled token ids to what a user reads: text, stop strings, logprobs, request outputs.

The engine calls `process` after each step with the scheduler's news; stop strings found here go back to the core as
sequences to finish. It keeps one record per request, and knows nothing of scheduling or tensors.
"""

import logging
from typing import NamedTuple

from msgspec import Struct, structs

from quire.config.engine_args import EngineArgs
from quire.engine.input_processor import WALL_CLOCK_OFFSET, ProcessedInput
from quire.errors import InvalidRequestError
from quire.lora.request import LoRARequest
from quire.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.protocol.requests import NUM_IDS
from quire.protocol.step import Failure, FailureKind, PromptLogprobs, SequenceOutput, TokenLogprobs
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from quire.utils.logs import logger, quoted

LogprobDict = dict[int, Logprob]


class ProcessedOutputs(NamedTuple):
    """What a step's news came to."""

    taken: list[SequenceOutput]  # the news that somebody awaits; a sequence that a stop string ended may get more
    ready: list["RequestRecord"]  # which have an output to hand out, each once
    stopped: list[tuple[str, int]]  # sequences that a stop string ended: (request_id, sequence_index)


class _SequenceRecord(Struct):
    """One sequence's output so far."""

    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = []
    logprobs: list[LogprobDict] = []
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_sent: int = 0  # tokens already handed out, for DELTA

    def completion(self, params: SamplingParams, delta: bool, index: int) -> CompletionOutput:
        """What to hand out: everything so far, or what is new since the last call."""
        start, reason = 0, self.finish_reason
        if delta:
            start, self.num_sent = self.num_sent, len(self.token_ids)
        text = "" if self.detokenizer is None else self.detokenizer.get_next_output_text(reason is not None, delta)
        logprobs = None if params.logprobs is None else self.logprobs[start:]
        total = self.cumulative_logprob if params.logprobs is not None or params.use_beam_search else None
        return CompletionOutput(index, text, self.token_ids[start:], total, logprobs, reason, self.stop_reason)


class RequestRecord:
    """One request's sequences and facts, from its arrival to its last output.

    Attributes:
        shown: what is handed out, but for what is said of sequences.
        num_left: sequences that go on.
    """

    def __init__(self, processed: ProcessedInput, tokenizer: Tokenizer | None, args: EngineArgs) -> None:
        self.request, self.params, self.tokenizer = processed.request, processed.params, tokenizer
        request, params, self.num_left = processed.request, processed.params, processed.request.task.num_sequences
        prompt_token_ids = request.prompt_token_ids[request.num_virtual :]  # as the user knows it
        self.shown = RequestOutput(request.request_id, processed.prompt, prompt_token_ids, num_cached_tokens=0)
        self.sequences = [_SequenceRecord(self._detokenizer()) for _ in range(self.num_left)]
        if params.prompt_logprobs is not None:
            self.shown.prompt_logprobs = [None for _ in prompt_token_ids]
        if not args.disable_log_stats:
            self.shown.metrics = RequestMetrics(request.arrival_time + WALL_CLOCK_OFFSET)
        if (adapter := request.adapter) is not None and not request.num_virtual:
            self.shown.lora_request = LoRARequest(adapter.name, adapter.adapter_id % NUM_IDS, adapter.path)
        self.failed = False
        self._interval, self._delta = args.stream_interval, params.output_kind == RequestOutputKind.DELTA
        self._is_ranked = self.num_left > params.n
        self._waits = self._is_ranked or params.output_kind == RequestOutputKind.FINAL_ONLY
        self._reads = not self._waits or bool(params.stop)  # text as it comes; else all of it in the end
        self._tells_text = self._delta and self.num_left == args.stream_interval == 1 and params.detokenize

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        if self.tokenizer is None or not self.params.detokenize:
            return None
        return IncrementalDetokenizer(self.tokenizer, self.shown.prompt_token_ids, self.params)

    def update(self, news: SequenceOutput, now: float) -> bool:
        """Take in one sequence's news; returns whether a stop string ended the sequence just now."""
        sequence, reason, stop_string = self.sequences[news.sequence_index], news.finish_reason, None
        detokenizer, token_ids, num_before = sequence.detokenizer, sequence.token_ids, len(sequence.token_ids)
        if not num_before:
            if news.num_cached_tokens:
                self.shown.num_cached_tokens = max(0, news.num_cached_tokens - self.request.num_virtual)
            if news.new_token_ids and (metrics := self.shown.metrics) and metrics.first_token_time is None:
                metrics.first_token_time = now + WALL_CLOCK_OFFSET
        if news.prompt_logprobs is not None:
            self._add_prompt_logprobs(news.prompt_logprobs)
        token_ids += news.new_token_ids
        if detokenizer is not None and (self._reads or reason is not None):
            # Where the model has no token for it, what a grammar ends with is text.
            ends = reason == "stop" and (news.stop_reason is not None or self.request.task.eos_token_id is not None)
            if (stop_string := detokenizer.update(token_ids[detokenizer.num_tokens :], ends)) is not None:
                del token_ids[detokenizer.num_tokens :]
        if news.logprobs is not None:
            for entry in news.logprobs[: len(token_ids) - num_before]:
                sequence.cumulative_logprob += entry.logprobs[0]
                if self.params.logprobs is not None:
                    sequence.logprobs.append(self._logprob_dict(entry))
        if stop_string is not None:
            self._end(sequence, "stop", stop_string)
            # The scheduler has ended it already when it ran out of room on the very same token.
            return reason is None
        if reason is not None:
            self.shown.pooled = news.pooled
            self._end(sequence, reason, news.stop_reason if news.failure is None else news.failure.message)
        if news.failure is not None:
            self._log_failure(news.failure)
        return False

    def _end(self, sequence: _SequenceRecord, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.num_left -= 1

    def _log_failure(self, failure: Failure) -> None:
        """A line for the first of its sequences that fails; at debug level where it is the caller's own fault."""
        if not self.failed:
            wrong = failure.kind == FailureKind.BAD_REQUEST
            self.shown.error = InvalidRequestError(failure.message, failure.param) if wrong else None
            level = logging.DEBUG if wrong else logging.WARNING
            logger.log(level, "request %s failed: %s", quoted(self.request.request_id), failure.message)
        self.failed = True

    def fail(self, message: str) -> list[tuple[str, int]]:
        """End every sequence with an error; returns those that the scheduler must still finish."""
        unfinished = [index for index, s in enumerate(self.sequences) if s.finish_reason is None]
        for index in unfinished:
            self._end(self.sequences[index], "error", message)
        return [(self.request.request_id, index) for index in unfinished]

    @property
    def is_ready(self) -> bool:
        """Whether there is something to say after a step."""
        return not (self.num_left and (self._waits or (self._delta and not any(map(self._is_due, self.sequences)))))

    def output(self) -> RequestOutput:
        """The output to hand out; of deltas what is new since the last one, however many steps ago."""
        finished, delta = not self.num_left, self._delta
        due = [(i, each) for i, each in enumerate(self._chosen()) if finished or not delta or self._is_due(each)]
        outputs = [sequence.completion(self.params, delta, index) for index, sequence in due]
        return structs.replace(self.shown, outputs=outputs, finished=finished)

    def ending(self, unfinished: str = "abort") -> tuple[str, list[str], int]:
        """What an observer hears of its end: its id, why each sequence ended, and prompt tokens that were cached.

        `unfinished` is why those end that went on until now.
        """
        reasons = [sequence.finish_reason or unfinished for sequence in self._chosen()]
        return self.request.request_id, reasons, self.shown.num_cached_tokens or 0

    def _chosen(self) -> list[_SequenceRecord]:
        if not self._is_ranked:
            return self.sequences
        # Stable: equal likelihoods keep the order of their draw.
        return sorted(self.sequences, key=lambda s: -s.cumulative_logprob)[: self.params.n]

    def text(self) -> str | None:
        """What is new of an only sequence's text while it goes on: its tokens come with the next output."""
        if not (self._tells_text and self.num_left):
            return None
        return self.sequences[0].detokenizer.get_next_output_text(False, True)  # type: ignore[union-attr]

    def _is_due(self, sequence: _SequenceRecord) -> bool:
        """Whether a stream's next piece of a sequence is large enough, or its first, or its last."""
        num_new, ends = len(sequence.token_ids) - sequence.num_sent, sequence.finish_reason is not None
        return num_new >= self._interval or (num_new > 0 and (ends or not sequence.num_sent))

    def _add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        # By position: a request that was preempted within its prompt computes, and reports, a part twice.
        assert self.shown.prompt_logprobs is not None
        for place, entry in enumerate(part.entries, part.start - self.request.num_virtual):
            if place > 0:  # a prompt's first token has none, whatever stands before it
                self.shown.prompt_logprobs[place] = self._logprob_dict(entry)

    def _logprob_dict(self, entry: TokenLogprobs) -> LogprobDict:
        found: LogprobDict = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            if token_id not in found:
                text = self.tokenizer.token_text(token_id) if self.tokenizer else None
                found[token_id] = Logprob(logprob=logprob, rank=rank, decoded_token=text)
        return found


class OutputProcessor:
    """Records of all live requests.

    Attributes:
        records: by id, in order of arrival; whoever takes one out closes it without an output.
    """

    def __init__(self, tokenizer: Tokenizer | None, args: EngineArgs) -> None:
        self._tokenizer, self._args = tokenizer, args
        self.records: dict[str, RequestRecord] = {}

    def add(self, processed: ProcessedInput) -> RequestRecord:
        """Open a record."""
        record = self.records[processed.request.request_id] = RequestRecord(processed, self._tokenizer, self._args)
        return record

    def note_scheduled(self, request_ids: list[str], now: float) -> None:
        """Note when requests were first part of a step; later times, after a preemption, do not count."""
        for request_id in request_ids:
            record = self.records.get(request_id)
            if record and (metrics := record.shown.metrics) and metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now + WALL_CLOCK_OFFSET

    def process(self, news: list[SequenceOutput], now: float) -> ProcessedOutputs:
        """Take in a step's news, in the order of the batch.

        `now`, in seconds of the clock of arrival times, is when the step brought them.
        """
        records, taken, stopped = self.records, [], []
        touched: dict[str, RequestRecord] = {}
        for item in news:
            record = records.get(item.request_id)
            if record is None or record.sequences[item.sequence_index].finish_reason is not None:
                continue
            taken.append(item)
            touched[item.request_id] = record
            try:
                if record.update(item, now):
                    stopped.append((item.request_id, item.sequence_index))
            except Exception as error:  # one request's text must not stop its neighbours
                logger.exception("request %s: its output could not be processed", quoted(item.request_id))
                stopped.extend(record.fail(f"{type(error).__name__} while its output was processed"))
        ready = [record for record in touched.values() if record.is_ready]
        for record in ready:
            if not record.num_left:
                del records[record.request.request_id]
                if record.shown.metrics is not None:
                    record.shown.metrics.finished_time = now + WALL_CLOCK_OFFSET
        return ProcessedOutputs(taken, ready, stopped)
