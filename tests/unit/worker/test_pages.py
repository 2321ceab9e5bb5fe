"""Pages that are kept when they are freed."""

import platform

from quire.worker.pages import keep_freed_memory


def test_freed_memory_is_kept_where_the_c_library_can() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
