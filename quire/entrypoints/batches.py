"""Prompts of one call run to their end: all of them are queued, or none, and one that fails takes the others along.

`LLM` has one of these for its engine. It knows prepared lists, of one entry a prompt, and nothing of the many forms in
which callers give them.
"""

import itertools
from collections.abc import Sequence
from threading import RLock
from typing import Any

from tqdm import tqdm

from quire.engine.llm_engine import LLMEngine
from quire.errors import InvalidRequestError
from quire.inputs import PromptType
from quire.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from quire.pooling_params import PoolingParams
from quire.protocol.core import CallName
from quire.protocol.requests import Terms
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.text.tokenizer import Tokenizer


class Batches:
    """What runs batches on an engine, one after another; threads wait for their turn.

    Attributes:
        turn: held by the thread whose turn it is.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._request_ids = itertools.count()
        self.turn = RLock()  # a step hands out whatever outputs there are

    def call(self, name: CallName, *arguments: Any) -> Any:
        """Call a method of the engine's core, by its name."""
        with self.turn:
            return self._engine.core.call(name, *arguments)

    def run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams],
        terms: Sequence[Terms],
        *,
        use_tqdm: bool = False,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """The final output of each prompt, in order.

        Args:
            use_tqdm: show a progress bar with input and output tokens per second.
            add_special_tokens: those that the tokenizer puts around a text.

        Raises:
            InvalidRequestError: a prompt or its parameters break a rule; the message says which prompt.
        """
        processed = []
        for place, (prompt, one, served) in enumerate(zip(prompts, params, terms, strict=True)):
            try:
                prepared = self._engine.prepare(prompt, one, add_special_tokens)
                prepared.params.output_kind = RequestOutputKind.FINAL_ONLY  # no text is built that nobody reads
                processed.append(self._engine.process_input(str(next(self._request_ids)), prepared, terms=served))
            except InvalidRequestError as error:
                raise of_prompt(error, place, len(prompts)) from None
        ids = [entry.request.request_id for entry in processed]
        with self.turn:
            try:
                for place, entry in enumerate(processed):
                    try:
                        self._engine.submit(entry)
                    except InvalidRequestError as error:
                        raise of_prompt(error, place, len(prompts)) from None
                return self._finish(ids, use_tqdm)
            except BaseException:  # Ctrl-C as well: leave nothing behind a caller who goes on
                self._engine.abort_request(ids)
                self._engine.discard_outputs(ids)
                raise

    def _finish(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """Step until every one of these requests has its final output."""
        waiting = set(ids)
        done: dict[str, RequestOutput] = {}
        num_input = num_output = 0
        with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while waiting:
                for output in self._engine.step():
                    if not output.finished or output.request_id not in waiting:
                        continue
                    waiting.remove(output.request_id)
                    error, num_tokens = output.error, sum(len(part.token_ids) for part in output.outputs)
                    if error is not None and error.param is not None and not num_tokens:
                        raise of_prompt(error, ids.index(output.request_id), len(ids))
                    done[output.request_id] = output
                    num_input += len(output.prompt_token_ids or ())
                    num_output += num_tokens
                    elapsed = max(bar.format_dict["elapsed"], 1e-6)
                    speeds = f"input: {num_input / elapsed:.1f} toks/s, output: {num_output / elapsed:.1f} toks/s"
                    bar.set_postfix_str(speeds, False)
                    bar.update()
        return [done[request_id] for request_id in ids]


def beams_of(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """What a prompt's search found (InvalidRequestError where it failed)."""
    sequences: list[BeamSearchSequence] = []
    for part in output.outputs:
        if part.finish_reason == "error":
            raise InvalidRequestError(str(part.stop_reason), "params")
        tokens = output.prompt_token_ids + part.token_ids
        shown = tokens[:-1] if part.finish_reason == "stop" and not params.include_stop_str_in_output else tokens
        text = None if tokenizer is None else tokenizer.decode(shown)
        scored = (part.logprobs or [], None, part.cumulative_logprob or 0.0)
        sequences.append(BeamSearchSequence(tokens, *scored, text, part.finish_reason, part.stop_reason))
    return BeamSearchOutput(sequences)


def of_prompt(error: InvalidRequestError, place: int, num_prompts: int, name: str = "prompts") -> InvalidRequestError:
    """The error, told of which of several prompts it is: ``prompts[1]`` is the second."""
    if num_prompts == 1:
        return error
    return InvalidRequestError(f"{name}[{place}] (of {num_prompts}): {error}", error.param)
