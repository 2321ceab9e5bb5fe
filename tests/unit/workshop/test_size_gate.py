"""The size gate passes on this checkout and fails on each kind of violation, planted."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("size_gate", ROOT / "tools" / "size_gate.py")
assert _spec is not None
assert _spec.loader is not None
size_gate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(size_gate)


def checkout(root: Path, source: str, exceptions: str = "") -> Path:
    """A checkout with one module."""
    (root / "quire").mkdir()
    (root / "tools").mkdir()
    (root / "quire" / "module.py").write_text(source)
    (root / "tools" / "size_exceptions.toml").write_text(exceptions)
    return root


def function_of(num_lines: int) -> str:
    return "class Thing:\n    def work(self):\n" + "        x = 1\n" * (num_lines - 1)


def test_this_checkout_passes() -> None:
    problems, report = size_gate.check(ROOT)
    assert problems == []
    assert int(report.split()[0]) > 1000, report


def test_counts_code_lines_only() -> None:
    source = '"""Doc\n\nmore."""\n\n# note\nx = [\n    1,\n\n    2,  # two\n    # three\n]\n'
    assert size_gate.code_lines(source) == 2 + 4


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x = 1\n" * 401, "quire/module.py has 401 lines"),
        (function_of(61), "quire/module.py::Thing.work has 61 lines"),
    ],
)
def test_too_long_without_a_reason(tmp_path: Path, source: str, problem: str) -> None:
    (found,), _ = size_gate.check(checkout(tmp_path, source))
    assert problem in found


def test_at_the_limits(tmp_path: Path) -> None:
    assert size_gate.check(checkout(tmp_path, function_of(60) + "x = 1\n" * 339))[0] == []


def test_an_exception_with_a_reason(tmp_path: Path) -> None:
    root = checkout(tmp_path, function_of(61), '"quire/module.py::Thing.work" = "A table, written out."\n')
    assert size_gate.check(root)[0] == []


def test_an_unused_exception_is_a_problem(tmp_path: Path) -> None:
    (found,), _ = size_gate.check(checkout(tmp_path, "x = 1\n", '"quire/module.py" = "It was long once."\n'))
    assert "not needed" in found


def test_an_exception_wants_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no reason"):
        size_gate.check(checkout(tmp_path, "x = 1\n" * 401, '"quire/module.py" = " "\n'))


def test_the_package_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_gate, "MAX_PACKAGE_LINES", 10)
    assert size_gate.check(checkout(tmp_path, "x = 1\n" * 9))[0] == []
    (tmp_path / "quire" / "another.py").write_text("y = 1\n")
    (found,), report = size_gate.check(tmp_path)
    assert "10 lines of code" in found
    assert report.startswith("10 of 10")


def test_a_wrong_root_does_not_pass(tmp_path: Path) -> None:
    root = checkout(tmp_path, "")
    (root / "quire" / "module.py").unlink()
    (found,), _ = size_gate.check(root)
    assert "no package found" in found
