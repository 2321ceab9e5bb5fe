"""The scheduler's state as messages: what it takes to go on elsewhere, with other workers and an empty KV cache.

`Scheduler.state` makes it, `Scheduler.restore` takes it. Tokens and decisions are in it; rows, blocks and plans in
flight are not, as every sequence is computed anew: a request's tokens don't depend on how.
"""

from typing import Any

import msgspec

from quire.protocol.requests import NewRequest
from quire.protocol.stats import Limits, SpeculationStats


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """A live sequence."""

    sequence_id: int
    index: int
    output_token_ids: list[int]
    draft_token_ids: list[int] = []  # of its next step


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """A live request."""

    request: NewRequest
    order: int  # requests added before it
    unfinished: list[int]  # indices, ascending
    num_cached_tokens: int | None
    num_prompt_logprobs: int
    continuation: Any  # as the continuation says it
    sequences: list[SequenceState]


class PlanCounts(msgspec.Struct):
    """What the planner has counted since the start; each field is one of `EngineStats`."""

    num_preemptions_total: int = 0  # sequences whose blocks were taken from them
    num_forks_total: int = 0  # sequences that began with the blocks of another
    prefix_cache_queries_total: int = 0  # prompt tokens looked up, at requests' first admission
    prefix_cache_hits_total: int = 0  # and found


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler between two calls."""

    requests: list[RequestState]
    num_added: int
    num_sequences: int
    step_id: int  # of the next plan
    counts: PlanCounts
    limits: Limits
    policy: Any  # as the policy says it
    speculation: SpeculationStats | None = None
