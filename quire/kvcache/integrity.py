"""The KV manager's invariants, checked against what its live tables imply. For tests and debug mode: O(everything)."""

from collections.abc import Callable, Sequence

from quire.kvcache.groups import KVGroup
from quire.kvcache.pins import Pins
from quire.kvcache.table import BlockTable


def check_books(
    groups: Sequence[KVGroup], tables: Sequence[BlockTable], pins: Pins, name: Callable[[bytes, list[int]], bytes]
) -> None:
    """Raise AssertionError unless counts, hashes and tables agree; `name` hashes a block over its parent's name."""
    for number, group in enumerate(groups):
        group.pool.check_integrity()
        counts = [0] * group.pool.num_blocks
        for block, count in pins.owners(number).items():
            counts[block] = count
            assert group.pool.is_registered(block), f"block {block} is pinned, and nobody can find it"
        assert group.num_pinned == len(pins.owners(number)), "pinned blocks are miscounted"
        for table in tables:
            for index, block in enumerate(table.block_ids[number]):
                where = f"block {block} of sequence {table.sequence_id}"
                if index < table.first_block[number]:
                    assert block == 0, f"{where} is kept behind the window"
                    continue
                counts[block] += 1
                assert index < max(table.num_committed, table.num_found) or not group.pool.is_registered(block), (
                    f"{where} is findable before it was computed"
                )
        assert counts == group.pool.ref_counts, "reference counts are not the numbers of owners"
    size = groups[0].block_size
    for table in tables:
        where = f"sequence {table.sequence_id}"
        assert all(table.block_ids), f"{where} is kept without blocks"
        assert table.num_slots == min(map(len, table.block_ids)) * size, f"{where} miscounts its positions"
        parent = table.root
        for index, block_hash in enumerate(table.hashes):
            parent = name(parent, table.tokens(index * size, (index + 1) * size))
            assert block_hash == parent, f"wrong hash of block {index} of {where}"
