"""What the scripts of the clients share: where the servers are, how an engine is watched, how checks are run.

Imported in each client's own environment, so from the standard library only. `run.py` sets the variables.
"""

import os
import re
import subprocess
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

URL = os.environ["QUIRE_URL"]  # a server without limits
NARROW_URL = os.environ["QUIRE_NARROW_URL"]  # one with a key; one request runs, one waits, and others are refused
KEY = os.environ["QUIRE_KEY"]
TOKENIZER = os.environ["QUIRE_TOKENIZER"]  # directory of the model's tokenizer
PYTHON = os.environ["QUIRE_PYTHON"]  # has Quire

# Of a server of one's own, for prompts that the demo's context does not hold. What is beyond that is noise, and short.
LONG = ["--max-model-len", "16384", "--hf-overrides", '{"max_position_embeddings": 16384}']
SHORT = ["--override-generation-config", '{"max_new_tokens": 40}']


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of a server of one's own with these flags. It ends with the context."""
    command = [PYTHON, "-m", "quire", "serve", "demo", "--port", "0", "--host", "127.0.0.1", *flags]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
            try:
                while (ready := re.search(r"ready on (http://[\d.:]+)", log.read_text(errors="replace"))) is None:
                    assert server.poll() is None, log.read_text(errors="replace")
                    time.sleep(0.1)
                yield ready[1]
            finally:
                server.terminate()


def metric(name: str, url: str = URL) -> float:
    """The sum of a metric's samples."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def wait_idle(seconds: float = 10.0, url: str = URL) -> None:
    """Wait until nothing runs and all KV blocks are free."""
    end = time.monotonic() + seconds
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while busy := [name for name in names if metric(name, url)]:
        assert time.monotonic() < end, f"after {seconds:g} s, not zero: {busy}"
        time.sleep(0.01)


def raised(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """The exception of the call, which has to be of that kind."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run(*checks: Callable[[], object]) -> None:
    """Run all checks; exit non-zero if one failed. The last line printed is for people."""
    failed = []
    for check in checks:
        try:
            check()
            print(f"passed: {check.__name__}", flush=True)
        except Exception:
            failed.append(check.__name__)
            traceback.print_exc()
    print(f"failed: {', '.join(failed)}" if failed else f"{len(checks)} checks")
    raise SystemExit(1 if failed else 0)
