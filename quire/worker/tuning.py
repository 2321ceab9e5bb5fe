"""Keeps how this machine multiplies large matrices fastest, beside its packed weights: a start measures it but once."""

import hashlib
import os
import time
from contextlib import suppress
from functools import partial

from quire.ops.native.library import Target, library_path, loaded_library
from quire.utils.logs import logger
from quire.worker.fingerprint import processor
from quire.worker.weights.cache import cache_folder, new_file


def tune(target: Target) -> None:
    """Let a level that knows several ways use the fastest one here; no bit of a result depends on it.

    The first way is used where QUIRE_TUNING is 0, and where nothing can be kept: each start would measure anew.
    """
    choose, folder = partial(loaded_library().quire_tune, target.kernels, target.num_threads), cache_folder()
    if choose(0) < 0 or folder is None or os.environ.get("QUIRE_TUNING") == "0":
        return
    built = library_path().stat()
    key = f"{processor()} {target} {built.st_size} {built.st_mtime_ns}"
    path = folder.with_name("tuning") / hashlib.sha256(key.encode()).hexdigest()[:32]
    with suppress(OSError, ValueError):
        if choose(max(0, int(path.read_text(encoding="ascii")))) >= 0:
            return
    start = time.perf_counter()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            way, seconds = choose(-1), time.perf_counter() - start
            logger.info("large products: way %d of %s, measured in %.2f s", way, target.level, seconds)
            os.write(file, str(way).encode())
    except OSError as error:
        logger.info("the fastest way of large products is not kept on disk: %s", error.strerror)
