"""Several engines' answers as one."""

from quire.entrypoints.server.totals import total_reply, total_snapshot, total_stats
from quire.errors import RequestFailedError
from quire.protocol.core import Fault, Reply
from quire.protocol.stats import BlockGroup, Counts, EngineSnapshot, EngineStats, Limits, SpeculationStats, TierStats

LIMITS = Limits(8, 64, "fcfs", {}, 8, 64)


def stats_of(number: int) -> EngineStats:
    return EngineStats(
        num_requests_running=number,
        num_requests_waiting=2 * number,
        kv_cache_usage_perc=number / 4,
        num_preemptions_total=0,
        prefix_cache_queries_total=100 * number,
        prefix_cache_hits_total=10,
        waiting_reasons={"blocks": number, f"only {number}": 1},
        kv_block_residency=[Counts([number, 0], 1.5)] * number,
        tiers=TierStats(host_hits_total=number) if number == 1 else None,
        speculation=SpeculationStats(num_accepted_tokens_per_pos=[5] * number),
        limits=LIMITS,
        sleep_state="discard_all",
    )


def test_counts_are_summed_and_shares_averaged() -> None:
    total = total_stats([stats_of(1), stats_of(3)])
    assert (total.num_requests_running, total.num_requests_waiting) == (4, 8)
    assert total.kv_cache_usage_perc == 0.5
    assert total.waiting_reasons == {"blocks": 4, "only 1": 1, "only 3": 1}
    assert total.kv_block_residency == [Counts([4, 0], 3.0), Counts([3, 0], 1.5), Counts([3, 0], 1.5)]
    assert total.tiers is not None
    assert total.tiers.host_hits_total == 1
    assert total.speculation is not None
    assert total.speculation.num_accepted_tokens_per_pos == [10, 5, 5]
    assert (total.limits, total.sleep_state) == (LIMITS, "discard_all")


def test_one_engine_is_itself() -> None:
    stats = stats_of(2)
    assert total_stats([stats]) is stats


def test_a_snapshot_has_each_engines_blocks_as_groups_of_their_own() -> None:
    parts = [EngineSnapshot(stats_of(n), [], n, bytes([n]) * n, 16) for n in (1, 2)]
    total = total_snapshot(parts)
    assert total.num_sequences == 3
    assert (total.blocks, total.block_groups) == (b"\1\2\2", [BlockGroup(1), BlockGroup(2)])


def test_an_error_is_everybodys() -> None:
    no = Fault.of(RequestFailedError("no"))
    assert total_reply([Reply(1, True), Reply(1, fault=no)]).fault == no
    assert total_reply([Reply(1, True), Reply(1, False)]).value is False
    assert total_reply([Reply(1, True), Reply(1, True)]).value is True
    assert total_reply([Reply(1, LIMITS), Reply(1, LIMITS)]).value == LIMITS
