"""The model runner: carries out one step plan on one device.

The worker calls `execute`: bring the rows up to date, gather the inputs, run the model, sample, remember the new
tokens. It keeps rows and KV tensors and knows nothing of queues, policies or text.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.step import Step
from quire.models.compiled import CompiledModel
from quire.models.registry import CausalLM
from quire.protocol.cache import group_layers
from quire.protocol.step import NewSequence, PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from quire.sampling.logprobs import prompt_logprobs
from quire.sampling.sampler import SamplerOutput, sample
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.worker.gather import InputBatch, gather
from quire.worker.rows import RowTable

logger = logging.getLogger(__name__)

# Rows of logits held at once for prompt logprobs: 128 rows of a 152k vocabulary are 78 MB in fp32.
PROMPT_LOGPROBS_ROWS = 128


class ModelRunner:
    """Rows, KV cache and model of one worker.

    Args:
        model: the loaded model, as it is or recorded for the native kernels.
        backend: the attention backend that the model was built with.
        kv_caches: one tensor per layer, in the backend's shape.
        table: the persistent rows, empty.
        poison: debug aid: fill freshly assigned block space with NaN, so that reading what was never written shows.
    """

    def __init__(
        self,
        model: CausalLM | CompiledModel,
        backend: AttentionBackend,
        kv_caches: list[Tensor],
        table: RowTable,
        poison: bool = False,
    ) -> None:
        self.model = model
        self._target = model.target if isinstance(model, CompiledModel) else None  # where sampling is done
        self.backend = backend
        self.kv_caches = kv_caches
        self.table = table
        self.poison = poison
        self._num_groups = len(group_layers(model.cache_layers))
        self._broken: dict[int, str] = {}  # sequences without a sampling state of their own, and why

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens; returns one sampled token per sample asked for."""
        self._update_rows(plan)
        if not plan.scheduled:
            return StepResult(step_id=plan.step_id, token_ids=[])
        batch = gather(plan, self.table)
        metadata = self.backend.build(batch.attention)
        step = Step(batch.positions, self.kv_caches, [metadata] * self._num_groups)
        hidden = self.model(batch.input_ids, step)
        prompt = self._prompt_logprobs(plan, batch, hidden)
        self.table.num_computed[batch.rows] += np.diff(batch.query_start_loc)
        return self._sample(plan, batch, hidden, prompt)

    def _update_rows(self, plan: StepPlan) -> None:
        for sequence_id in plan.removed_sequence_ids:
            self._broken.pop(sequence_id, None)
            if sequence_id in self.table:
                self.table.remove(sequence_id)
        for sequence in plan.new_sequences:
            self.table.add(sequence, self._new_state(sequence))
            if self.poison:
                first_fresh = -(-sequence.num_computed_tokens // self.table.block_size)
                self._poison(sequence.block_ids[first_fresh:])
        for scheduled in plan.scheduled:
            self.table.append_blocks(scheduled)
            if self.poison:
                self._poison(scheduled.new_block_ids)
        for copy in plan.copies:
            self.table.replace_block(copy)
        if plan.copies:
            sources = torch.tensor([c.source for c in plan.copies])
            destinations = torch.tensor([c.destination for c in plan.copies])
            for cache in self.kv_caches:
                self.backend.copy_blocks(cache, sources, destinations)

    def _new_state(self, sequence: NewSequence) -> SamplingState:
        """Its sampling state; where that can't be made, a plain one in its place, and an error when it is sampled."""
        try:
            return self._make_state(sequence, sequence.sampling_params)
        except Exception as error:
            logger.exception("request %s: its sampling parameters can't be used", sequence.request_id)
            self._broken[sequence.sequence_id] = f"{type(error).__name__} in its sampling parameters"
            return self._make_state(sequence, SamplingParams())

    def _make_state(self, sequence: NewSequence, params: SamplingParams) -> SamplingState:
        return SamplingState(
            params,
            sequence.prompt_token_ids,
            seed=sequence.seed,
            sequence_index=sequence.sequence_index,
            vocab_size=self.model.vocab_size,
            stop_token_ids=sequence.stop_token_ids,
            bad_words_token_ids=sequence.bad_words_token_ids,
            output_token_ids=sequence.output_token_ids,
        )

    def _poison(self, block_ids: list[int]) -> None:
        if block_ids:
            blocks = torch.tensor(block_ids)
            for cache in self.kv_caches:
                self.backend.fill_blocks(cache, blocks, float("nan"))

    def _sample(
        self, plan: StepPlan, batch: InputBatch, hidden: Tensor, prompt: dict[int, PromptLogprobs]
    ) -> StepResult:
        scheduled = [plan.scheduled[i] for i in batch.sampled]
        if not scheduled:
            return StepResult(step_id=plan.step_id, token_ids=[], prompt_logprobs=prompt)
        logits = self.model.compute_logits(_take_rows(hidden, batch.sampled_tokens))
        states = [self.table.state(s.sequence_id) for s in scheduled]
        output: SamplerOutput = sample(logits, states, [s.num_samples for s in scheduled], self._target)
        token_ids: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for i, s in enumerate(scheduled):
            error = self._broken.get(s.sequence_id) or output.errors.get(i)
            if error is not None:
                errors[s.sequence_id] = error
                token_ids.extend([-1] * s.num_samples)
                continue
            token_ids.extend(output.token_ids[i])
            entry = output.logprobs[i]
            if entry is not None:
                logprobs[s.sequence_id] = entry
            # The forks of a request with n > 1 arrive as new sequences; this row goes on as the first of them.
            self.table.append_token(s.sequence_id, output.token_ids[i][0])
        return StepResult(
            step_id=plan.step_id, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt, errors=errors
        )

    def _prompt_logprobs(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> dict[int, PromptLogprobs]:
        """This step's share of the prompt logprobs: token p's row predicts prompt token p + 1."""
        found: dict[int, PromptLogprobs] = {}
        for i, s in enumerate(plan.scheduled):
            row = int(batch.rows[i])
            state = self.table.state(s.sequence_id)
            top = state.params.prompt_logprobs
            start = int(batch.starts[i])
            end = min(start + s.num_new_tokens, int(self.table.num_prompt_tokens[row]) - 1)
            if top is None or end <= start:
                continue
            first = int(batch.query_start_loc[i]) - start  # hidden row of position p is first + p
            entries: list[TokenLogprobs] = []
            for low in range(start, end, PROMPT_LOGPROBS_ROWS):
                high = min(low + PROMPT_LOGPROBS_ROWS, end)
                logits = self.model.compute_logits(hidden[first + low : first + high])
                targets = self.table.token_ids[row, low + 1 : high + 1].tolist()
                entries.extend(prompt_logprobs(logits, targets, top, self._target))
            found[s.sequence_id] = PromptLogprobs(start=start + 1, entries=entries)
        return found


def _take_rows(hidden: Tensor, rows: np.ndarray) -> Tensor:
    """Rows [R] of hidden states [T, H], ascending; all of them as they are.

    Not by torch's indexing: it wakes OpenMP threads, which then spin on the cores that the kernels' own threads need.
    """
    if len(rows) == hidden.shape[0]:
        return hidden
    bits = hidden.view(torch.int32 if hidden.dtype.itemsize == 4 else torch.int16)
    return torch.from_numpy(bits.numpy()[rows]).view(hidden.dtype)
