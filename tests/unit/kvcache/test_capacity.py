"""The size of the KV cache, from numbers to numbers."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from quire.errors import ConfigError
from quire.kvcache.capacity import CPU_SHARE, CacheRequest, plan_cache
from quire.protocol.cache import CacheGroup, CacheReport

BLOCK = 1 << 20
FULL = CacheGroup([0, 1])


def request(**options: Any) -> CacheRequest:
    """What the options of a model with a context of 256 tokens ask; max_model_len is asked where it is given."""
    asked = "max_model_len" in options
    values = {"max_model_len": 256, "max_num_seqs": 256, "max_num_batched_tokens": 64} | options
    return CacheRequest(block_size=16, is_max_model_len_asked=asked, **values)


def report(available: int = 10_000 * BLOCK, activations: int = 0, *windows: int | None) -> CacheReport:
    groups = [CacheGroup([number], window) for number, window in enumerate(windows)] or [FULL]
    sizes = [BLOCK] * len(groups)
    return CacheReport(available_bytes=available, activation_bytes=activations, groups=groups, block_bytes=sizes)


def planned(asked: CacheRequest, measured: CacheReport) -> tuple[list[int], int]:
    layout = plan_cache(asked, measured)
    assert layout.block_size == 16
    assert layout.groups == measured.groups
    return layout.num_blocks, layout.max_model_len


def test_no_more_blocks_than_all_contexts_can_use() -> None:
    assert planned(request(max_model_len=100, max_num_seqs=3), report()) == ([7 * 3], 100)


def test_share_of_free_memory_less_activations() -> None:
    measured = report(1000 * BLOCK, 100 * BLOCK)
    assert planned(request(max_num_seqs=1000), measured)[0] == [int(1000 * CPU_SHARE) - 100]
    assert planned(request(max_num_seqs=1000, gpu_memory_utilization=0.9), measured)[0] == [800]


def test_bytes_and_blocks_override() -> None:
    assert planned(request(kv_cache_memory=40 * BLOCK + 5), report())[0] == [40]
    assert planned(request(num_kv_blocks=33, kv_cache_memory=1), report())[0] == [33]


def test_context_is_shortened_only_when_left_open() -> None:
    assert planned(request(num_kv_blocks=3), report()) == ([3], 48)
    with pytest.raises(ConfigError, match=r"max_model_len=64 needs 4\.0 MiB.*3 blocks \(48 tokens\).*at most 48"):
        plan_cache(request(num_kv_blocks=3, max_model_len=64), report())


def test_no_memory_at_all() -> None:
    with pytest.raises(
        ConfigError, match=r"block of 16 tokens takes 1\.00 MiB, and 0\.00 MiB are left beside a step's 5 MiB"
    ):
        plan_cache(request(), report(5 * BLOCK, 5 * BLOCK))


# A window of 100 with the tile of keys it begins in: 163 tokens, 11 blocks of 16; 4 more for a step's 64 tokens.


def test_a_window_takes_what_as_many_contexts_show_and_the_tokens_of_a_step() -> None:
    measured = report(10_000 * BLOCK, 0, None, 100)
    assert planned(request(max_model_len=1024, max_num_seqs=3), measured) == ([64 * 3, 11 * 3 + 4], 1024)
    assert planned(request(max_model_len=1024, max_num_seqs=3, max_in_flight=2), measured)[0] == [64 * 3, 11 * 3 + 8]


def test_memory_is_divided_so_that_all_groups_run_out_together() -> None:
    layout = plan_cache(request(max_model_len=256, kv_cache_memory=1000 * BLOCK), report(0, 0, None, 100))
    full, windowed = layout.num_blocks
    assert 998 <= full + windowed <= 1000
    assert windowed == 4 + -(-11 * full // 16)


def test_beside_long_contexts_windows_have_a_quarter_for_more_sequences() -> None:
    """Sequences of a few blocks need as many for their windows as long ones do: they were 2 at once here."""
    measured = report(0, 0, None, 100)
    full, windowed = planned(request(max_model_len=8192, kv_cache_memory=1000 * BLOCK), measured)[0]
    assert windowed <= full / 3 < windowed + 11  # for 22 sequences
    assert 985 < full + windowed <= 1000
    few = planned(request(max_model_len=8192, kv_cache_memory=1000 * BLOCK, max_num_seqs=5), measured)[0]
    assert few == [1000 - 59, 4 + 5 * 11]


def test_windows_have_no_more_than_the_context_that_was_asked_for_leaves() -> None:
    memory, measured = (512 + 15) * BLOCK, report(0, 0, None, 100)
    asked = request(max_model_len=8192, kv_cache_memory=memory)
    assert planned(asked, measured) == ([512, 15], 8192)
    (full, windowed), max_model_len = planned(replace(asked, is_max_model_len_asked=False), measured)
    assert max_model_len == full * 16 < 8192
    assert windowed == 4 + 11 * 11
    assert full + windowed <= 527


def test_a_window_beyond_the_context_takes_as_much_as_full_attention() -> None:
    assert planned(request(num_kv_blocks=40), report(0, 0, None, 4096))[0] == [40, 40]


def test_windows_alone_never_shorten_a_context_that_they_can_carry() -> None:
    measured = report(0, 0, 100)
    assert planned(request(max_model_len=100_000, num_kv_blocks=15), measured) == ([15], 100_000)
    assert planned(request(num_kv_blocks=14), report(0, 0, 100))[1] == 14 * 16
    with pytest.raises(ConfigError, match=r"15 blocks of 16 tokens\) but 14 blocks \(224 tokens\) fit"):
        plan_cache(request(max_model_len=100_000, num_kv_blocks=14), measured)
    assert planned(request(max_model_len=100_000, max_num_seqs=3), report(10_000 * BLOCK, 0, 100))[0] == [11 * 3 + 4]


def test_a_shortened_context_fits_in_its_windows_by_itself() -> None:
    num_blocks, max_model_len = planned(request(max_model_len=1024, num_kv_blocks=64), report(0, 0, None, 100, 8))
    assert (num_blocks, max_model_len) == ([64, 15, 4 + 5], 1024)
    num_blocks, max_model_len = planned(request(num_kv_blocks=10), report(0, 0, None, 100, 8))
    assert (num_blocks, max_model_len) == ([10, 10, 4 + 5], 160)


def test_the_widest_window_is_counted_where_nothing_is_full() -> None:
    num_blocks, _ = planned(request(max_model_len=1024, num_kv_blocks=26), report(0, 0, 8, 100))
    assert num_blocks == [4 + 2 * 5, 26]


def test_host_blocks_are_divided_as_the_devices_are() -> None:
    asked = request(num_kv_blocks=32, swap_bytes=90 * BLOCK, max_num_seqs=2)
    layout = plan_cache(asked, report(10_000 * BLOCK, 0, None, 16))
    total = sum(layout.num_blocks)
    assert layout.num_host_blocks == [90 * count // total for count in layout.num_blocks]
    assert layout.block_bytes == [BLOCK, BLOCK]
    assert plan_cache(request(num_kv_blocks=32), report()).num_host_blocks == []


def test_host_memory_that_is_not_there_is_refused_by_name() -> None:
    asked = request(num_kv_blocks=32, swap_bytes=20 << 30)
    with pytest.raises(ConfigError, match=r"swap_space=20 GiB is larger than the memory.*: 9\.7 GiB. Lower swap_space"):
        plan_cache(asked, report(10_000 * BLOCK))
    with pytest.raises(ConfigError, match="holds no KV block of 1048576 bytes"):
        plan_cache(request(num_kv_blocks=32, swap_bytes=1000), report())


def test_what_a_gpu_has_left_does_not_limit_host_memory() -> None:
    measured = structs.replace(report(100 * BLOCK), total_bytes=100 * BLOCK)
    layout = plan_cache(request(num_kv_blocks=32, swap_bytes=500 * BLOCK), measured)
    assert layout.num_host_blocks == [500]
