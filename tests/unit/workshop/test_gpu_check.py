"""What the check on a GPU has found is kept, whatever comes after it."""

import importlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
gpu_check: Any = importlib.import_module("gpu_check")
gpu_sections: Any = importlib.import_module("gpu_sections")
gpu_measures: Any = importlib.import_module("gpu_measures")

FOUND = 'print("RESULT " + \'{"a": 1, "rows": [{"n": 1}]}\'); print("RESULT " + \'{"rows": [{"n": 2}]}\')\n'
PIECES = {"a": 1, "rows": [{"n": 1}, {"n": 2}]}


def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, seconds: float) -> list[dict[str, Any]]:
    """What is noted, time after time, of a section whose process runs this."""
    path = tmp_path / "section.py"
    path.write_text("import os, sys, time\n" + section)
    monkeypatch.setattr(gpu_check, "__file__", str(path))
    noted: list[dict[str, Any]] = []
    gpu_check.run_section("limits", seconds, lambda found: noted.append({**found}))
    return noted


def test_all_pieces_are_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, last = outcome(tmp_path, monkeypatch, FOUND + 'print("anything else")', 60)
    assert first == {"a": 1, "rows": [{"n": 1}]}
    assert second == PIECES
    assert last == PIECES | {"seconds_taken": last["seconds_taken"]}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ('sys.stderr.write("a cause"); sys.exit(3)', "exit code 3"),
        ('print("a cause", flush=True); os.kill(os.getpid(), 11)', "exit code -11"),
    ],
)
def test_what_fails_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, error: str
) -> None:
    check_failure(outcome(tmp_path, monkeypatch, FOUND + end, 60)[-1], error)


def check_failure(last: dict[str, Any], error: str) -> None:
    assert last.pop("seconds_taken") >= 0
    assert last == PIECES | {"error": error, "tail": last["tail"]}
    assert "a cause" in last["tail"]


def test_what_hangs_leaves_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, given = tmp_path / "said", list[float]()

    class OnceSaid(threading.Timer):
        """Waits until the section has said all, however long a busy machine takes to start it."""

        def run(self) -> None:
            given.append(self.interval)
            while not said.exists() and not self.finished.is_set():
                time.sleep(0.01)
            self.interval = 0
            super().run()

    monkeypatch.setattr(threading, "Timer", OnceSaid)
    hang = f'print("a cause", flush=True); open({str(said)!r}, "w"); time.sleep(3600)'
    check_failure(outcome(tmp_path, monkeypatch, FOUND + hang, 3)[-1], "not done after 3 s")
    assert given == [3]


def test_a_kernel_that_comes_early_adds_only_what_it_takes_after_the_others() -> None:
    def step(at: float, *kernels: tuple[str, float, float]) -> list[dict[str, Any]]:
        return [{"name": name, "ts": at + begin, "dur": dur, "args": {"grid": [1]}} for name, begin, dur in kernels]

    events: list[dict[str, Any]] = []
    for i in range(6):
        events += step(i * 100.0, ("embed", 0, 2), ("product", 1, 11), ("norm", 2, 13), ("product", 3, 32))
    events += step(600.0, ("embed", 0, 2), ("product", 1, 50))
    events += step(700.0, ("embed", 0, 2))
    assert gpu_measures.own_times(events, "embed") == [
        {"kernel": "embed", "grid": "[1]", "calls": 1, "own_us": 2.0},
        {"kernel": "product", "grid": "[1]", "calls": 2, "own_us": 30.0},
        {"kernel": "norm", "grid": "[1]", "calls": 1, "own_us": 3.0},
    ]


def test_the_folder_of_results_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "run_sections", lambda names, seconds, note: note(names[0], {"a": 1}))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "limits", "--out", str(tmp_path / "of_today" / "found")])
    assert gpu_check.main() == 0
    assert sorted(path.name for path in (tmp_path / "of_today").iterdir()) == ["found.json", "found.md"]


def test_the_page_shows_whatever_there_is() -> None:
    results: dict[str, Any] = {
        "limits": {"read_gb_s": 3000.0, "multiply_tflop_s": 700.0},
        "first": {"error": "exit code 1", "tail": "Traceback"},
        "products": {"rows": [{"n": 1, "equal": True}, {"n": 2, "equal": False}]},
        "llama": {"weights_gb": 15.0, "token_ms": 6.25, "rows": [{"kernel": "_linear", "ms": 1.0}]},
    }
    page = gpu_check.page(results)
    for line in ("- error: exit code 1", "Traceback", "| 2 | False |", "| _linear | 1 |"):
        assert line in page.splitlines()
    assert "Batch 1, 8B: 0.80 of the read bandwidth" in page
    assert "Products whose bits depend on the number of rows: 1." in page
    assert "Prompts, 8B" not in page


def test_the_least_that_chats_take() -> None:
    weights, keys = 15e9, 32 * 2 * 8 * 128 * 2
    read, multiplied = 3e12, 800e12
    expected = (100 * weights / multiplied) + (weights + 101 * keys) / read + (weights + 102 * keys) / read
    assert gpu_sections.shortest([(100, 3)], read, multiplied) == pytest.approx(expected)
    many = [(100, 3)] * 1000
    assert gpu_sections.shortest(many, read, multiplied) > 1000 * 102 * weights / multiplied
    page = gpu_check.page(
        {"limits": {"read_gb_s": 3000.0, "multiply_tflop_s": 800.0}, "llama": {"weights_gb": 15.0, "offline_s": 20.0}}
    )
    assert "1,000 chats, 8B: 0.6" in page


def test_all_sections_have_their_time() -> None:
    checks = [gpu_check.SECTIONS[name][1] for name in gpu_check.CHECKS]
    rest = [seconds for name, (_, seconds) in gpu_check.SECTIONS.items() if name not in gpu_check.CHECKS]
    assert max(checks) + sum(rest) <= gpu_check.SECONDS


def test_checks_run_side_by_side_and_what_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["limits", "first", "small", "tests"]
    both, noted, running = threading.Barrier(2), list[str](), list[str]()

    def run_section(name: str, seconds: float, note: Any) -> None:
        assert 0 < seconds <= gpu_check.SECTIONS[name][1]
        if name in gpu_check.CHECKS:
            both.wait(60)
        running.append(name)
        assert len(running) == 1 or name in gpu_check.CHECKS
        note({"a": 1})
        if name in gpu_check.CHECKS:
            both.wait(60)
        note({"a": 1} | ({"error": "why"} if name == "tests" else {}))
        running.remove(name)

    def note(name: str, found: dict[str, Any]) -> None:
        assert not is_noting.locked()
        with is_noting:
            noted.append(name)
            time.sleep(0.01)

    is_noting = threading.Lock()
    monkeypatch.setattr(gpu_check, "run_section", run_section)
    gpu_check.run_sections(names, 1000, note)
    assert sorted(noted[:4]) == ["first", "first", "tests", "tests"]
    assert noted[4:] == ["limits", "limits", "small", "small"]


def test_without_time_nothing_is_run() -> None:
    found: dict[str, Any] = {}
    gpu_check.run_sections(["first", "limits"], 5, lambda name, one: found.update({name: one}))
    assert found == dict.fromkeys(("first", "limits"), {"error": "no time was left"})


def test_what_pytest_says_is_sorted() -> None:
    told = """....F.
================ FAILURES ================
tests/gpu/test_a.py:3: in test_one
E   assert False
============ short test summary info ============
FAILED tests/gpu/test_a.py::test_one[in pieces-2] - AssertionError: a - b | c
ERROR tests/gpu/test_b.py
======== 1 failed, 5 passed, 2 skipped, 1 error in 62.10s (0:01:02) ========
"""
    found = gpu_sections.told_by_pytest(told)
    assert found["counts"] == "1 failed, 5 passed, 2 skipped, 1 error in 62.10s"
    assert found["rows"] == [
        {"failed": "tests/gpu/test_a.py::test_one[in pieces-2]", "reason": "AssertionError: a - b | c"},
        {"failed": "tests/gpu/test_b.py", "reason": ""},
    ]
    assert "in test_one\nE   assert False" in found["tail"]
    assert "[in pieces-2] | AssertionError: a - b / c |" in gpu_check.page({"tests": found})
    assert gpu_sections.told_by_pytest("1 passed in 0.01s\n")["counts"] == "1 passed in 0.01s"
    assert gpu_sections.told_by_pytest("it died")["counts"] == "not told"


def test_the_first_difference_is_told() -> None:
    one, two = [(5, -1.0), (6, -2.0)], [(5, -1.0), (6, -2.5)]
    assert gpu_sections.difference([one, two], [one, two]) == "equal"
    told = gpu_sections.difference([one, one], [one, two])
    assert told == "1 of 2 differ, first number 1 at token 1: (6, -2.0), and not (6, -2.5)"
