"""Operations as they were before a device's kernels were installed."""

from quire.ops.table import OPERATIONS


def uninstall() -> None:
    """Back to the references."""
    for operation in OPERATIONS.values():
        operation.kernel = None
