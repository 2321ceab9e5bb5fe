"""Rows of a table, by token id or by position."""

from torch import Tensor

from quire.ops.native.builder import StepIndex, Value
from quire.ops.native.matrix import PackedMatrix
from quire.ops.table import op


@op
def embedding(ids: Tensor, table: Tensor | PackedMatrix) -> Tensor:
    """Rows of `table`: [T] integers, [V, H] -> [T, H].

    Raises:
        IndexError: an id that the table has no row for. (A native program answers with zeros.)
    """
    assert isinstance(table, Tensor), "packed weights are looked up by recorded programs only"
    return table.index_select(0, ids)


@embedding.native
def _build(ids: StepIndex, table: PackedMatrix) -> Value:
    builder = ids.builder
    told = {"table": builder.matrix(table), "offset": ids.offset, "by_position": ids.by_position}
    return builder.append("embedding", [], table.cols, needs_step=True, **told)
