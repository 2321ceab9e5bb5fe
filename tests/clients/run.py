"""Run real clients against a real server: `python tests/clients/run.py [NAME...]`, all of them without a name.

A client NAME is the script check_NAME.py, run in a virtual environment of its own (build/clients/NAME) that holds what
requirements/NAME.txt says; NAME.nodeps.txt, where there is one, is installed without what it asks for. A second version
of a client, NAME-VERSION, runs the same script. Environments are made when they are first needed, and anew when their
requirements change. What a script prints goes to build/clients/NAME.log. See README.md.
"""

import argparse
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from serving import RunningServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "clients"
KEY = "sk-clients"
NARROW = ["--api-key", KEY, "--max-num-seqs", "1", "--max-num-queued-reqs", "1"]
SECONDS = 300.0  # that a client may take


def main() -> int:
    """Returns the number of clients that failed."""
    known = sorted(path.stem for path in (HERE / "requirements").glob("*.txt") if not path.stem.endswith(".nodeps"))
    parser = argparse.ArgumentParser(description="Run real clients against a real server.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}; all by default")
    names = parser.parse_args().names or known
    if unknown := set(names) - set(known):
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    BUILD.mkdir(parents=True, exist_ok=True)
    servers: list[RunningServer] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number, flags in enumerate(([], NARROW)):
                servers.append(RunningServer(Path(directory) / f"log{number}", *flags))
            failed = sum(not check(name, *servers) for name in names)
            for server in servers:
                server.stop()
        finally:
            for server in servers:
                server.kill()
    return failed


def check(name: str, server: RunningServer, narrow: RunningServer) -> bool:
    """Run one client, and say in a line how it went."""
    log = BUILD / f"{name}.log"
    seconds, failure = 0.0, None
    with log.open("w") as output:
        try:
            python = environment(name, output)
            expected, start = server.golden(), time.monotonic()
            run_script(name, python, output, server, narrow)
            seconds = time.monotonic() - start
            for one in (server, narrow):
                one.wait_idle()
            assert server.golden() == expected, "the server answers otherwise than before"
        except subprocess.SubprocessError:
            failure = f"see {log.relative_to(ROOT)}"
        except AssertionError as error:
            failure = str(error)
    lines = log.read_text(errors="replace").splitlines() or [""]
    version = requirements(name)[-1].read_text().split()[0]
    print(f"{version:24} {seconds:5.1f} s  {'ok' if failure is None else 'FAIL'}: {failure or lines[-1]}", flush=True)
    if failure is not None:
        print("\n".join(f"    {line}" for line in lines[-25:]), flush=True)
    return failure is None


def run_script(name: str, python: Path, output: IO[str], server: RunningServer, narrow: RunningServer) -> None:
    variables = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "QUIRE_URL": server.url,
        "QUIRE_NARROW_URL": narrow.url,
        "QUIRE_KEY": KEY,
        "QUIRE_TOKENIZER": str(ROOT / "quire" / "demo"),
        "QUIRE_PYTHON": sys.executable,
        "HF_HOME": str(BUILD / "huggingface"),
    }
    script = HERE / f"check_{name.partition('-')[0]}.py"
    run_alone([python, script], output, SECONDS, env=variables)


def run_alone(command: list[Any], output: IO[str], seconds: float | None = None, **options: Any) -> None:
    """Run a command in a process group of its own; whatever it started is gone afterwards.

    Raises:
        subprocess.SubprocessError: it failed, or took longer than this.
    """
    child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **options)
    try:
        if status := child.wait(seconds):
            raise subprocess.CalledProcessError(status, command)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def requirements(name: str) -> list[Path]:
    """The files that say what a client's environment holds; what is in the last one names its version."""
    paths = [HERE / "requirements" / f"{name}{kind}.txt" for kind in ("", ".nodeps")]
    return [path for path in paths if path.exists()]


def environment(name: str, output: IO[str]) -> Path:
    """The interpreter of a client's environment, which is made if there is none of these requirements."""
    directory, files = BUILD / name, requirements(name)
    python, stamp = directory / "bin" / "python", directory / "requirements.sha256"
    digest = hashlib.sha256(b"\n".join(path.read_bytes() for path in files)).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"set-up: {name} in {directory.relative_to(ROOT)}", flush=True)
    commands = [[sys.executable, "-m", "venv", "--clear", directory]]
    for path in files:
        flags = ["--no-deps"] if path.stem.endswith(".nodeps") else []
        commands.append([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *flags, "-r", path])
    for command in commands:
        run_alone(command, output)
    stamp.write_text(digest)
    return python


if __name__ == "__main__":
    sys.exit(main())
