"""Snapshots of the engine: its counters and gauges under vLLM's metric names, and each sequence and block on its own.

`LLM.get_metrics` and the server's /metrics read the one, the server's live view the other. They come from what the
scheduler counts; nothing is measured here. A figure's type says what /metrics tells of it, and under which name, unless
that is its own.
"""

from typing import Annotated

import msgspec

_QUERIES, _HOST_USAGE = "vllm:prefix_cache_queries", "vllm:cpu_cache_usage_perc"


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """What a histogram has counted since the start."""

    counts: list[int]  # by bucket
    total: float  # of the values


class TierStats(msgspec.Struct):
    """The KV cache's host memory and disk: a gauge at a moment, and counters since the start, as /metrics has them."""

    # 0 to 1, of the fullest group
    host_cache_usage_perc: Annotated[float, "Share of the host's blocks that swapped sequences own.", _HOST_USAGE] = 0.0
    num_swaps_total: Annotated[int, "Preempted sequences whose blocks went to the host."] = 0
    swapped_out_blocks_total: Annotated[int, "KV blocks copied to the host, evicted prefixes included."] = 0
    swapped_in_blocks_total: Annotated[int, "KV blocks copied back."] = 0
    swapped_out_bytes_total: Annotated[int, "Bytes of them."] = 0
    swapped_in_bytes_total: Annotated[int, "Bytes of them."] = 0
    host_evictions_total: Annotated[int, "KV blocks of prefixes that were evicted to the host."] = 0
    host_hits_total: Annotated[int, "KV blocks of prefixes found on the host."] = 0
    disk_hits_total: Annotated[int, "KV blocks of prefixes read from the disk."] = 0
    disk_misses_total: Annotated[int, "KV blocks that should have been on the disk and were not."] = 0
    disk_written_blocks_total: Annotated[int, "KV blocks written to the disk."] = 0
    disk_failed_writes_total: Annotated[int, "KV blocks that the disk did not take."] = 0
    disk_damaged_files_total: Annotated[int, "Files of KV blocks that were damaged or foreign, and ignored."] = 0
    disk_removed_files_total: Annotated[int, "Files of KV blocks removed to stay within the limit."] = 0


class SpeculationStats(msgspec.Struct):
    """What became of drafts, since the start."""

    num_drafts: Annotated[int, "Times that a sequence's drafts were verified.", "vllm:spec_decode_num_drafts"] = 0
    num_draft_tokens: Annotated[int, "Draft tokens verified.", "vllm:spec_decode_num_draft_tokens"] = 0
    num_accepted_tokens: Annotated[int, "Draft tokens accepted.", "vllm:spec_decode_num_accepted_tokens"] = 0
    num_accepted_tokens_per_pos: list[int] = []  # by place among the drafts, the first first


class Limits(msgspec.Struct, frozen=True, tag=True):
    """What the scheduler keeps to, and how far that can be raised while it runs."""

    max_num_seqs: Annotated[int, "Most sequences that may run at once, now."]
    max_num_batched_tokens: Annotated[int, "Most tokens that a step may have, now."]
    policy: str
    policy_options: dict[str, float | None]  # those that the policy reads
    most_num_seqs: int  # what was reserved at the start, of this and the next
    most_num_batched_tokens: int


SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level; the words are vLLM's


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges at a moment, and counters since the start."""

    num_requests_running: Annotated[int, "Sequences that are being computed.", "vllm:num_requests_running"] = 0
    num_requests_waiting: Annotated[int, "Sequences that wait to be computed.", "vllm:num_requests_waiting"] = 0
    kv_cache_usage_perc: Annotated[float, "Share of the KV blocks in use; 1 is all.", "vllm:kv_cache_usage_perc"] = 0.0
    num_preemptions_total: Annotated[int, "Sequences whose blocks were taken from them.", "vllm:num_preemptions"] = 0
    prefix_cache_queries_total: Annotated[int, "Prompt tokens looked up in the prefix cache.", _QUERIES] = 0
    prefix_cache_hits_total: Annotated[int, "Prompt tokens found in the prefix cache.", "vllm:prefix_cache_hits"] = 0
    waiting_reasons: dict[str, int] = {}  # why the waiting wait -> how many
    num_forks_total: Annotated[int, "Sequences that began with the blocks of another.", "quire:forks"] = 0
    kv_blocks_shared: Annotated[int, "KV blocks with more than one owner."] = 0
    kv_blocks_pinned: Annotated[int, "KV blocks of pinned prefixes."] = 0
    prefix_cache_evictions_total: Annotated[int, "KV blocks whose cached content made room."] = 0
    # How long contents of blocks stay, as `residency_histograms` has them; [] until something was counted.
    kv_block_residency: list[Counts] = []
    tiers: TierStats | None = None  # where there is a second memory
    speculation: SpeculationStats | None = None  # where tokens are drafted
    limits: Limits | None = None
    sleep_state: str = SLEEP_STATES[0]


class SequenceSnapshot(msgspec.Struct):
    """One live sequence, for a person to look at."""

    request_id: str
    index: int  # among the request's sequences
    status: str  # "running" (holds blocks) or "waiting"
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int  # of the prompt, taken from the prefix cache
    num_blocks: int
    why: str | None  # why it waits, with numbers
    seconds: float  # since its arrival


class BlockGroup(msgspec.Struct, frozen=True):
    """A KV group, as far as a person looks at it."""

    num_blocks: int
    window: int | None = None  # tokens; None: full attention


class EngineSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The engine at a moment."""

    stats: EngineStats
    sequences: list[SequenceSnapshot]  # the running ones first, each in the policy's order; the first few hundred
    num_sequences: int  # all of them
    blocks: bytes  # one per KV block, group after group: 0 free, 1 unused but cached, 2 used
    block_size: int  # tokens of a block
    block_groups: list[BlockGroup] = []
