"""Everything that needs an NVIDIA GPU, in one command of at most nine minutes: tests, exactness, and benchmarks.

    python tools/gpu_check.py --out gpu_results        # gpu_results.json, and gpu_results.md to read

Needs what Quire needs, torch with CUDA and Triton; models are made here, of random weights in the shapes of Llama 3 8B
and Qwen3 0.6B. Each section runs in a process of its own and has a time of its own, so that one that fails leaves the
others. Those that check answers run side by side, first; then those that are timed, one after another. What is found
is written at once, whatever comes after it. Sections are given by name to run only those.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_measures import Result
from gpu_sections import CHECKS, ROOT, SECTIONS, lengths_of_chats, shortest

SECONDS = 540
MARK = "RESULT "


def add(found: Result, piece: Result) -> None:
    """To what is found; rows follow those there are."""
    rows = found.get("rows", []) + piece.get("rows", [])
    found.update(piece | ({"rows": rows} if rows else {}))


def run_section(name: str, seconds: float, note: Callable[[Result], None]) -> None:
    """Run it, and note what it has found so far whenever that is more; at the end, how it failed."""
    given = [sys.executable, "-u", __file__, "--section", name, "--seconds", str(seconds)]
    found, start = Result(), time.time()
    tail: deque[str] = deque(maxlen=60)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # this checkout, installed or not
    place: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": paths}, "start_new_session": True}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(given, **place, **pipes) as child:
        # Its own children, too: they would disturb what comes next.
        timer = threading.Timer(seconds, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        for line in child.stdout or ():
            if line.startswith(MARK):
                add(found, json.loads(line.removeprefix(MARK)))
                note(found)
            else:
                tail.append(line[-500:])
        child.wait()
        timer.cancel()
    found["seconds_taken"] = round(time.time() - start, 1)
    if child.returncode:
        late = time.time() - start >= seconds - 4
        found["error"] = f"not done after {seconds:.0f} s" if late else f"exit code {child.returncode}"
        found.setdefault("tail", "".join(tail)[-6000:])
    note(found)


def run_sections(names: Sequence[str], seconds: float, note: Callable[[str, Result], None]) -> None:
    """Run them within so many seconds: CHECKS side by side, then the others by themselves. One at a time is noted."""
    end, lock = time.time() + seconds, threading.Lock()

    def run_one(name: str) -> None:
        last: Result = {"error": "no time was left"}

        def note_one(found: Result) -> None:
            nonlocal last
            last = found
            with lock:
                note(name, found)

        if (left := end - time.time()) > 10:
            run_section(name, min(left, SECTIONS[name][1]), note_one)
        else:
            note_one(last)
        print(f"{name}: {last.get('error', 'done')}", flush=True)

    checks = [name for name in names if name in CHECKS]
    with ThreadPoolExecutor(max(1, len(checks))) as pool:
        list(pool.map(run_one, checks))
    for name in names:
        if name not in CHECKS:
            run_one(name)


def carry_out(name: str, seconds: float) -> None:
    """A section in this process; where it hangs it says so, before it is killed."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, seconds - 3), exit=True)
    for piece in SECTIONS[name][0](seconds):
        print(MARK + json.dumps(piece), flush=True)
    faulthandler.cancel_dump_traceback_later()


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(results: Result) -> str:
    """The results, to read."""
    lines = ["# On a GPU", ""]
    for name, found in results.items():
        lines += [f"## {name}", "", (SECTIONS[name][0].__doc__ or "").strip(), ""]
        lines += [f"- {key}: {shown(value)}" for key, value in found.items() if key not in ("rows", "tail")]
        if rows := found.get("rows"):
            lines += ["", f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
            lines += [f"| {' | '.join(shown(value).replace('|', '/') for value in row.values())} |" for row in rows]
        lines += ["", "```", found["tail"].strip(), "```"] if "tail" in found else []
        lines.append("")
    limit, made = results.get("limits", {}), results.get("llama", {})
    if "read_gb_s" in limit and "token_ms" in made:
        share = made["weights_gb"] / made["token_ms"] * 1e3 / limit["read_gb_s"]
        lines.append(f"- Batch 1, 8B: {share:.2f} of the read bandwidth (0.8 is asked).")
    if "multiply_tflop_s" in limit and "prompt_tflop_s" in made:
        share = made["prompt_tflop_s"] / limit["multiply_tflop_s"]
        lines.append(f"- Prompts, 8B: {share:.2f} of the matrix rate (0.6 is asked).")
    if {"read_gb_s", "multiply_tflop_s"} <= limit.keys() and "offline_s" in made:
        least = shortest(lengths_of_chats(1000), limit["read_gb_s"] * 1e9, limit["multiply_tflop_s"] * 1e12)
        lines.append(f"- 1,000 chats, 8B: {least / made['offline_s']:.2f} of the limit, which is {least:.1f} s.")
    if differing := [row for found in results.values() for row in found.get("rows", ()) if not row.get("equal", True)]:
        lines.append(f"- Products whose bits depend on the number of rows: {len(differing)}.")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sections, and write what they found; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"default: all of {', '.join(SECTIONS)}")
    parser.add_argument("--out", default="gpu_results", help="path of the results, without suffix")
    parser.add_argument("--section", choices=[*SECTIONS], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of them (default: {SECONDS})")
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if args.section:
        carry_out(args.section, args.seconds)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was run", file=sys.stderr)
        return 1
    results: dict[str, Result] = {}
    Path(args.out).absolute().parent.mkdir(parents=True, exist_ok=True)  # not to be lacking once sections have run

    def note(name: str, found: Result) -> None:
        results[name] = {**found}
        known = {name: results[name] for name in SECTIONS if name in results}
        Path(args.out + ".json").write_text(json.dumps(known, indent=1))
        Path(args.out + ".md").write_text(page(known))

    run_sections(args.sections or [*SECTIONS], args.seconds, note)
    print(f"results: {args.out}.json, {args.out}.md")
    return int(any("error" in found or found.get("rc") for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
