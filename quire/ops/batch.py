"""Where the tokens of a step lie: what attention is given, by whatever backend, and programs are run with."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Tails(NamedTuple):
    """Positions that are not where block tables say.

    Attributes:
        starts: int32 [S]; position p >= starts[s] of sequence s lies in slot slots[s, p - starts[s]].
        counts: int32 [S]; so many sequences from this one on, of one row each, by position, are of one tree: they have
            one table and one start, and what lies before it may be computed together. 0 where they are counted
            already, 1 for a sequence by itself.
        slots: int32 [S, W].
    """

    starts: Tensor
    counts: Tensor
    slots: Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Where the T tokens of a step's S sequences lie, as rows and as cache slots.

    Sequence s has the rows [query_start_loc[s], query_start_loc[s + 1]); they are its last positions, up to and
    including seq_lens[s] - 1. Position p lies in block block_tables[s, p // block_size] at offset p % block_size.

    Attributes:
        query_start_loc: int32 [S + 1], as all of these (int64 is taken, too).
        seq_lens: [S], tokens computed before this step plus those computed in it.
        block_tables: [S, max_blocks], padded with 0.
        slot_mapping: [T], block * block_size + offset of every row.
        block_size: tokens per block.
        tails: where drafts are a tree. Each of its nodes is a sequence of one row then, which sees the keys of its
            ancestors where a chain would have those before it, so that its bits are those of a chain.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    tails: Tails | None = None
