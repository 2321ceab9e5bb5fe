"""`make check`: every gate that takes seconds to minutes, with its name and duration; all run, even after a failure.

Exit code 1 if any failed. A gate that passes says its last line only; the tests show their progress.
"""

import os
import subprocess
import sys
import time

_PYTHON = sys.executable
_WORKERS = os.environ.get("WORKERS", str(min(os.cpu_count() or 1, 4)))
_TOGETHER = ["--dist", "loadfile", "--no-loadscope-reorder"]  # a file's tests share what they have loaded
_GATES: dict[str, list[str]] = {
    "ruff check": [_PYTHON, "-m", "ruff", "check", "."],
    "ruff format": [_PYTHON, "-m", "ruff", "format", "--check", "."],
    "pyright": [_PYTHON, "-m", "pyright"],
    "import contracts": [_PYTHON, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"],
    "size gate": [_PYTHON, "tools/size_gate.py"],
    "quick tests": [_PYTHON, "-m", "pytest", "-m", "not slow", "-n", _WORKERS, *_TOGETHER],
}


def main() -> int:
    """Run the gates in turn; 1 if any failed."""
    # pyright would otherwise ask the network whether a newer one exists.
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    failed: list[str] = []
    begin = time.perf_counter()
    for name, command in _GATES.items():
        live = name == "quick tests"
        start = time.perf_counter()
        done = subprocess.run(command, env=environment, text=True, capture_output=not live)
        seconds = time.perf_counter() - start
        output = "" if live else (done.stdout + done.stderr).strip()
        if done.returncode:
            failed.append(name)
            print(output)
        last_line = output.splitlines()[-1].strip() if output else ""
        print(f"{'FAILED' if done.returncode else 'ok':6}  {name:16}  {seconds:6.1f} s  {last_line}", flush=True)
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'all passed'} ({time.perf_counter() - begin:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
