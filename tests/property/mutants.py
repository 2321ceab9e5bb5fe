"""Bugs to plant: each a plausible mistake in one function of the scheduler, the KV cache or a worker's rows.

`test_mutations` plants them one at a time and lets the simulation run. A mutant wraps or replaces the right function,
so that it stays wrong in its one way whatever else changes there.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from simulated import SimulatedExecutor

from quire.kvcache import prefix
from quire.kvcache.disk import DiskTier
from quire.kvcache.events import KVEventLog
from quire.kvcache.groups import KVGroup
from quire.kvcache.manager import KVManager
from quire.kvcache.pool import BlockPool
from quire.kvcache.swap import SwapSpace
from quire.kvcache.table import BlockTable
from quire.protocol.kv_events import BlockStored
from quire.protocol.step import Moves
from quire.scheduler import sequence
from quire.scheduler.continuation import Branch
from quire.scheduler.guidance import Guidance
from quire.scheduler.outcomes import Outcomes
from quire.scheduler.planner import Planner
from quire.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.scheduler.waiting import WaitingQueue
from quire.structured.matcher import Matcher

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}


def plant(owner: type, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a wrong version of owner.name under its own name; it gets the right one as its first argument."""

    def register(wrong: Callable[..., Any]) -> Callable[..., Any]:
        right = getattr(owner, name)
        MUTANTS[wrong.__name__] = lambda patch: patch.setattr(owner, name, lambda *args: wrong(right, *args))
        return wrong

    return register


# Blocks and their owners.


@plant(KVManager, "free")
def a_leaked_block(right: Callable[..., None], kv: KVManager, table: BlockTable) -> None:
    """A sequence that ends in the middle of a block keeps it."""
    if table.num_tokens % kv.block_size == 1 and len(table.block_ids[0]) > 1:
        table.block_ids[0].pop()
    right(kv, table)


@plant(KVManager, "free")
def a_double_free(right: Callable[..., None], kv: KVManager, table: BlockTable) -> None:
    """A block that somebody else owns, too, is given back twice."""
    pool = kv._groups[0].pool
    shared = [block for block in table.block_ids[0][table.first_block[0] :] if pool.ref_counts[block] > 1]
    right(kv, table)
    for block in shared[:1]:
        pool.release(block)


@plant(Outcomes, "end_request")
def a_missed_release_on_abort(right: Callable[..., Any], outcomes: Outcomes, group: SequenceGroup, *args: Any) -> Any:
    """Of a request that is aborted while it runs, one owner of its first block stays."""
    blocks = [block for sequence in group.sequences.values() for block in sequence.table.block_ids[0][:1]]
    if blocks and args[0] == "abort":
        outcomes._kv._groups[0].pool.acquire(blocks[0])
    return right(outcomes, group, *args)


@plant(BlockPool, "acquire")
def an_eviction_of_a_live_block(right: Callable[..., None], pool: BlockPool, block: int) -> None:
    """A block found in the cache stays in the free list, to be handed out to the next who asks."""
    if pool.ref_counts[block]:
        right(pool, block)
    else:
        pool.ref_counts[block] = 1


@plant(KVManager, "fork")
def a_fork_that_is_not_copied_on_write(right: Callable[..., BlockTable], kv: KVManager, *args: Any) -> BlockTable:
    """Parent and child go on in the same half-filled block."""
    child = right(kv, *args)
    child.shared_block = args[0].shared_block = -1
    return child


@plant(KVGroup, "first_visible")
def a_window_that_forgets_too_early(right: Callable[..., int], group: KVGroup, num_computed_tokens: int) -> int:
    """A window's blocks are given back one block too early."""
    return right(group, num_computed_tokens) + (group.window is not None and num_computed_tokens > group.window)


# Names of prefixes.


def a_salt_that_keeps_nothing_apart(patch: pytest.MonkeyPatch) -> None:
    """Requests of different salts find each other's blocks."""
    patch.setattr(sequence, "root_hash", lambda cache_salt, adapter_digest: prefix.root_hash(None, adapter_digest))


MUTANTS["a_salt_that_keeps_nothing_apart"] = a_salt_that_keeps_nothing_apart


@plant(KVManager, "_hash_of")
def a_name_without_its_beginning(right: Callable[..., bytes], kv: KVManager, table: BlockTable, index: int) -> bytes:
    """A block is named by its own tokens, whatever came before them."""
    right(kv, table, index)
    size = kv.block_size
    table.hashes[index] = kv._hash(table.root, table.tokens(index * size, index * size + size))
    return table.hashes[index]


@plant(Outcomes, "_advance")
def a_commit_before_the_tokens_are_known(
    right: Callable[..., None], outcomes: Outcomes, sequence: Sequence, num_new_tokens: int
) -> None:
    """A block is offered to others when its last token is drawn, which is before its keys and values are computed."""
    right(outcomes, sequence, num_new_tokens)
    if sequence.status is SequenceStatus.RUNNING and sequence.table.num_slots >= sequence.num_tokens:
        outcomes._kv.commit(sequence.table, sequence.num_tokens)


# KV events.


@plant(KVEventLog, "stored")
def a_stored_block_that_is_not_told_of(
    right: Callable[..., None], log: KVEventLog, table: BlockTable, start: int, stop: int, name: Any
) -> None:
    """Of several blocks that a step has filled, the last."""
    right(log, table, start, stop - (stop - start > 1), name)


@plant(KVEventLog, "take")
def a_removal_told_before_what_came_before_it(right: Callable[..., list[Any]], log: KVEventLog) -> list[Any]:
    """The events of a step are told in another order."""
    return sorted(right(log), key=lambda event: isinstance(event, BlockStored))


# Queues, rows and results.


@plant(Planner, "_withdraw")
def a_stale_row(right: Callable[..., None], planner: Planner, sequence: Sequence) -> None:
    """Workers are not told that a sequence without outputs has lost its row."""
    if not sequence.output_token_ids:
        sequence.announced = False
    right(planner, sequence)


@plant(Planner, "_wake_readers")
def a_lost_wake_up(right: Callable[..., None], planner: Planner) -> None:
    """Of two that await the same prefix, the second is forgotten."""
    for readers in planner._prefixes.values():
        del readers[1:]
    right(planner)


@plant(Outcomes, "_settle")
def a_preempted_sequence_never_wakes(
    right: Callable[..., None], outcomes: Outcomes, sequence: Sequence, num_drafts: int
) -> None:
    """The result that a preempted sequence awaited came, and nobody says so."""
    status = sequence.status
    if status is SequenceStatus.PREPARING:
        sequence.num_in_flight += 1
    right(outcomes, sequence, num_drafts)
    if status is SequenceStatus.PREPARING:
        sequence.num_in_flight -= 1


@plant(Outcomes, "_advance")
def a_token_counted_twice(
    right: Callable[..., None], outcomes: Outcomes, sequence: Sequence, num_new_tokens: int
) -> None:
    """The last chunk of a prompt counts one token too many as computed."""
    right(outcomes, sequence, num_new_tokens + (1 < num_new_tokens < sequence.num_tokens - 2))


@plant(Outcomes, "_branch")
def a_sibling_is_lost(
    right: Callable[..., Any], outcomes: Outcomes, parent: Sequence, sampling: Any, found: Any, *args: Any
) -> Any:
    """Where one sequence branches off another, no news of it is told."""
    return right(outcomes, parent, sampling, found, *args)[:2]


@plant(Outcomes, "_choose")
def a_beam_loses_a_sibling(
    right: Callable[..., Any], outcomes: Outcomes, group: SequenceGroup, branches: list[Branch]
) -> Any:
    """Of the beams that go on, the last is not begun."""
    return right(outcomes, group, branches[:-1] if len(group.sequences) < len(branches) else branches)


@plant(Outcomes, "_choose")
def a_beam_gets_its_siblings_token(
    right: Callable[..., Any], outcomes: Outcomes, group: SequenceGroup, branches: list[Branch]
) -> Any:
    """Two beams go on with each other's tokens."""
    if len(branches) > 1:
        first, second, *rest = branches
        swapped = [replace(first, token_id=second.token_id), replace(second, token_id=first.token_id)]
        branches = swapped + rest
    return right(outcomes, group, branches)


@plant(WaitingQueue, "add")
def a_newcomer_jumps_the_queue(right: Callable[..., None], waiting: WaitingQueue, sequence: Sequence) -> None:
    """Who comes last is put one place too far to the front."""
    right(waiting, sequence)
    queue = waiting._lanes[sequence.group.lane]
    if len(queue) > 2 and queue[-1] is sequence:
        queue[-2:] = queue[:-3:-1]


@plant(Sequence, "forget_row")
def drafts_outlive_their_row(right: Callable[..., None], sequence: Sequence) -> None:
    """A preempted sequence still counts on the drafts that its old row had."""
    num_drafts = sequence.num_drafts
    right(sequence)
    sequence.num_drafts = num_drafts


@plant(Planner, "start_anew")
def an_interrupt_leaves_removed_rows(right: Callable[..., None], planner: Planner) -> None:
    """After Ctrl-C workers, who know no rows any more, are told to drop some."""
    removed = planner._removed
    right(planner)
    planner._removed = removed


@plant(SimulatedExecutor, "_draw")
def random_numbers_of_the_neighbour(
    right: Callable[..., int], executor: SimulatedExecutor, row: Any, sample: int, allowed: int
) -> int:
    """What is drawn depends on how many others are in the batch."""
    return right(executor, row, sample + (len(executor.rows) > 5), allowed)


# The host's blocks.


@plant(KVManager, "drop_swapped")
def a_swapped_sequence_that_ends_keeps_its_place(right: Callable[..., None], kv: KVManager, table: BlockTable) -> None:
    """What an aborted sequence has on the host stays there."""
    if any(table.block_ids):
        right(kv, table)


@plant(SwapSpace, "cancel")
def what_was_never_copied_is_believed(right: Callable[..., None], space: SwapSpace) -> None:
    """After Ctrl-C the host is still thought to hold what plans in flight were to write."""
    space._unproven.clear()
    space._out = {}
    right(space)


@plant(SwapSpace, "swap_out")
def a_swap_counts_a_token_too_many(right: Callable[..., bool], space: SwapSpace, table: BlockTable, num: int) -> bool:
    """The position that is only planned counts as computed."""
    return right(space, table, num + (num % 4 == 1 and num + 1 < table.num_tokens))


@plant(SwapSpace, "bring_in")
def a_block_is_brought_to_its_neighbours_place(
    right: Callable[..., list[int]], space: SwapSpace, table: BlockTable, number: int, found: list[int], *args: Any
) -> list[int]:
    """The wrong one of two host blocks is copied back."""
    on_host = [block for block in found if block < 0]
    wrong = dict(zip(on_host[1:], on_host, strict=False))
    return right(space, table, number, [wrong.get(block, block) for block in found], *args)


@plant(SwapSpace, "end_plan")
def a_swapped_block_is_read_before_it_is_back(right: Callable[..., Moves], space: Any, *args: Any) -> Moves:
    """What is brought in comes with the plan after the one that reads it."""
    moves = right(space, *args)
    late, space.late = getattr(space, "late", []), moves.in_
    return structs.replace(moves, in_=late)


# Beams.


@plant(Planner, "_unseat")
def beams_that_sit_out_never_make_room(right: Callable[..., None], planner: Planner, builder: Any) -> None:
    """Those that wait for a sibling keep its place and its blocks from it."""


@plant(Outcomes, "_choose")
def a_beam_goes_on_from_its_neighbour(
    right: Callable[..., Any], outcomes: Outcomes, group: SequenceGroup, branches: list[Branch]
) -> Any:
    """The last child shares the tokens of another parent than its own."""
    if len(branches) > 3 and branches[-1].index != branches[-1].parent:
        branches = [*branches[:-1], dataclasses.replace(branches[-1], parent=branches[0].parent)]
    return right(outcomes, group, branches)


# The disk.


@plant(DiskTier, "take")
def what_could_not_be_read_is_believed(right: Callable[..., Any], disk: DiskTier, news: Any) -> Any:
    """A file that is gone or damaged counts as read."""
    return right(disk, structs.replace(news, fetched=[(group, host, True) for group, host, _ in news.fetched]))


@plant(DiskTier, "owned")
def a_block_that_is_read_to_is_forgotten(right: Callable[..., list[int]], disk: DiskTier, group: int) -> list[int]:
    """The books miss a host block that awaits its content."""
    return right(disk, group)[1:]


# Grammars.


@plant(Matcher, "copy")
def a_fork_moves_its_parents_matcher(right: Callable[..., Matcher], matcher: Matcher) -> Matcher:
    """A fork and its parent take their tokens in one matcher."""
    return matcher


@plant(Matcher, "fill")
def a_mask_of_the_end_for_every_draft(right: Callable[..., None], matcher: Matcher, masks: Any, *args: Any) -> None:
    """The masks after drafts are all that of the position before them."""
    drafts, row = args
    right(matcher, masks, (), row)
    masks.array[row + 1 : row + 1 + len(drafts)] = masks.array[row]


@plant(Guidance, "wake")
def a_grammar_wakes_the_first_only(right: Callable[..., Any], guidance: Guidance, timeout: float) -> Any:
    """Of those who await the same grammar, one hears of it."""
    for groups in guidance._awaiting.values():
        del groups[1:]
    return right(guidance, timeout)


@plant(Outcomes, "_guided_drafts")
def drafts_that_the_grammar_forbids(
    right: Callable[..., int], outcomes: Outcomes, sequence: Sequence, proposed: list[int]
) -> int:
    """Tokens that are forced are verified as if the workers had drafted them."""
    num = right(outcomes, sequence, proposed)
    sequence.forces = False
    return num
