"""Tokens drawn one after another in one native call: a round computes the newest token of every row and draws another.

Draft models run so, without Python between their tokens (csrc/rounds.cpp). Knows programs, rows as numbers, and the
sampler's records as bytes; no models.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.native.library import loaded_library
from quire.ops.native.program import Caches, Program
from quire.ops.native.structs import TYPE_OF, c_struct

Ints = npt.NDArray[np.int32]
NUM_FIELDS = 5  # of a row: its place in the tables, start, end, number of drafts, position of the first in the output


class Rounds:
    """Body and head of a compiled model, run by turns.

    Args:
        body, head: token ids, or ids and the hidden states before them, to hidden states [T, width], and these to
            float32 logits [R, vocab_size].
        width, dtype: of hidden states.
        caches: of all its runs.
    """

    def __init__(
        self, body: Program, head: Program, width: int, dtype: torch.dtype, vocab_size: int, caches: Caches
    ) -> None:
        self._held = body, head, caches
        self._library = loaded_library()
        self._hidden, self._logits = torch.empty(0, width, dtype=dtype), torch.empty(0, vocab_size)
        self._tables: tuple[Ints, Ints] | None = None
        self._args = c_struct("RoundsArgs")(
            body=body.handle,
            head=head.handle,
            kernels=body.target.kernels,
            caches=caches.address,
            cache_type=caches.type,
            hidden_type=TYPE_OF[dtype],
            hidden_stride=width,
            vocab_size=vocab_size,
        )

    def draw(
        self,
        rows: Sequence[int],
        records: bytes,
        num_tokens: int,
        tables: tuple[Ints, Ints],
        block_size: int,
        before: Sequence[torch.Tensor] = (),
    ) -> list[int]:
        """Read and draw for R rows.

        Args:
            rows: NUM_FIELDS numbers of each, those with more drafts first.
            records: the sampler's of each.
            num_tokens: that are read in all, before the first is drawn.
            before: the hidden states before those tokens, one part after another, where the body reads such.
            tables: token ids, int32 [table rows, columns]; block tables, int32 [num_groups, table rows, blocks].

        Returns:
            As many numbers for each row as the first has drafts, though only its own mean something; -1 where none
            could be drawn, and nothing after it counts.
        """
        args, num_rows, num_rounds = self._args, len(rows) // NUM_FIELDS, rows[3]
        if self._tables is None or tables[0] is not self._tables[0]:
            self._use(tables, block_size)
        if num_tokens > len(self._hidden):
            self._hidden = torch.empty(num_tokens, self._hidden.shape[1], dtype=self._hidden.dtype)
            args.hidden = self._hidden.data_ptr()
        if before:
            torch.cat(list(before), out=self._hidden[:num_tokens])
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self._logits.shape[1])
            args.logits = self._logits.data_ptr()
        numbers = (c_int64 * len(rows))(*rows)
        drafts = (c_int64 * (num_rows * num_rounds))()
        args.num_rows, args.num_rounds, args.records = num_rows, num_rounds, records
        args.rows, args.drafts = ctypes.addressof(numbers), ctypes.addressof(drafts)
        self._library.quire_rounds(ctypes.addressof(args))
        return drafts[:]

    def _use(self, tables: tuple[Ints, Ints], block_size: int) -> None:
        self._tables, args = tables, self._args
        token_ids, blocks = tables
        args.token_ids, args.token_stride = token_ids.ctypes.data, token_ids.shape[1]
        args.block_tables, args.block_size = blocks.ctypes.data, block_size
        args.num_groups, args.table_stride, args.group_stride = len(blocks), blocks.shape[2], blocks[0].size
