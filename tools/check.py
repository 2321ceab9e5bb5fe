"""`make check`: every gate that takes seconds to minutes, with its name and duration; all run, even after a failure.

Exit code 1 if any failed. A gate that passes says its last line only; the tests show their progress. The types are
checked beside them, as that takes one core for a while.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_PYTHON = sys.executable
_WORKERS = os.environ.get("WORKERS", str(min(os.cpu_count() or 1, 4)))  # make gives it: as many as in make test
_TOGETHER = ["--dist", "loadfile", "--no-loadscope-reorder"]  # a file's tests share what they have loaded
_BESIDE = "pyright"
_GATES: dict[str, list[str]] = {
    "ruff check": [_PYTHON, "-m", "ruff", "check", "."],
    "ruff format": [_PYTHON, "-m", "ruff", "format", "--check", "."],
    _BESIDE: [_PYTHON, "-m", "pyright"],
    "import contracts": [_PYTHON, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"],
    "size gate": [_PYTHON, "tools/size_gate.py"],
    "quick tests": [_PYTHON, "-m", "pytest", "-m", "not slow", "-n", _WORKERS, *_TOGETHER],
}


def main() -> int:
    """Run the gates, in turn but for the types; 1 if any failed."""
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has none: --help runs nothing
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:
        types = beside.submit(_run, _BESIDE)
        passed = {name: _tell(name, *_run(name)) for name in _GATES if name != _BESIDE}
        passed[_BESIDE] = _tell(_BESIDE, *types.result())
    failed = [name for name, good in passed.items() if not good]
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'all passed'} ({time.perf_counter() - begin:.0f} s)")
    return 1 if failed else 0


def _run(name: str) -> tuple[float, int, str]:
    """How many seconds a gate took, its exit code, and what it printed where that is not shown already."""
    # pyright would otherwise ask the network whether a newer one exists.
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    start = time.perf_counter()
    done = subprocess.run(_GATES[name], env=environment, text=True, capture_output=name != "quick tests")
    return time.perf_counter() - start, done.returncode, ((done.stdout or "") + (done.stderr or "")).strip()


def _tell(name: str, seconds: float, code: int, output: str) -> bool:
    """Print what came of a gate; whether it passed."""
    if code:
        print(output)
    last_line = output.splitlines()[-1].strip() if output else ""
    print(f"{'FAILED' if code else 'ok':6}  {name:16}  {seconds:6.1f} s  {last_line}", flush=True)
    return not code


if __name__ == "__main__":
    sys.exit(main())
