"""The import contracts hold, and they look: every kind of forbidden import, planted in a copy, is reported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# importing module -> what it imports, each against one rule; modules named "target" are planted, too, and empty.
PLANTED = {
    "quire.ops.upward": "quire.engine.target",
    "quire.models.upward": "quire.worker.target",
    "quire.executor.sibling": "quire.scheduler.target",
    "quire.sampling.sibling": "quire.models.target",
    "quire.worker.sibling": "quire.kvcache.target",
    "quire.utils.base_to_row": "quire.layers.target",
    "quire.helper_room": "quire.errors",  # a new module that has no row
    "quire.kvcache.below": "quire.ops.target",
    "quire.structured.below": "quire.sampling.target",
    "quire.scheduler.heavy": "torch",
    "quire.config.heavy": "torch",
    "quire.text.heavy": "torch",
    "quire.executor.base": "torch",
    "quire.text.upward": "quire.ops.target",
    "quire.kvcache.heavy": "triton",
    "quire.engine.web": "fastapi",
    "quire.entrypoints.cli.web": "uvicorn",
    "quire.executor.elsewhere": "ray",
    "quire.ops.elsewhere": "triton",
    "quire.metrics.elsewhere": "prometheus_client",
    "quire.models.hub": "transformers",
}
ALLOWED = {
    "quire.entrypoints.server.app": "fastapi",
    "quire.ops.triton.kernel": "triton",
    "quire.executor.ray.pool": "ray",
    "quire.entrypoints.server.prometheus": "prometheus_client",
    "quire.engine.downward": "quire.ops.target",
    "quire.scheduler.plan": "quire.protocol",
}


def copy_package(destination: Path) -> None:
    """A copy of the package's modules and of the contracts."""
    shutil.copytree(ROOT / "quire", destination / "quire", ignore=shutil.ignore_patterns("__pycache__", "demo"))
    shutil.copy(ROOT / ".importlinter", destination)


def plant(root: Path, module: str, text: str) -> None:
    """Write a module, and the packages above it where there are none."""
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in path.relative_to(root).parents[:-1]:
        (root / package / "__init__.py").touch()
    path.write_text(text)


def lint(root: Path) -> tuple[int, str]:
    """Exit code and output of lint-imports on a copy."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    # -c puts the working directory first on the path: the copy is found before an installed package.
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def report_of_violations(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("planted")
    copy_package(root)
    for module, imported in PLANTED.items():
        if imported.endswith(".target"):
            plant(root, imported, "")
        plant(root, module, f"import {imported}\n")
    code, output = lint(root)
    assert code == 1, output
    return output


@pytest.mark.parametrize(("module", "imported"), PLANTED.items(), ids=lambda name: name)
def test_planted_violation_is_reported(report_of_violations: str, module: str, imported: str) -> None:
    if module == "quire.helper_room":
        assert "helper_room" in report_of_violations
    else:
        assert f"{module} -> {imported} (l.1)" in report_of_violations.replace("\n", " ")


def test_package_keeps_the_contracts_and_homes_are_allowed(tmp_path: Path) -> None:
    copy_package(tmp_path)
    plant(tmp_path, "quire.ops.target", "")
    for module, imported in ALLOWED.items():
        if not ROOT.joinpath(*module.split(".")).with_suffix(".py").exists():
            plant(tmp_path, module, f"import {imported}\n")
    code, output = lint(tmp_path)
    assert code == 0, output
    assert " 0 broken" in output


def test_every_planning_room_is_watched_for_torch() -> None:
    """import-linter wants the source modules of such a contract to exist: a new one has to be added to it."""
    contract = (ROOT / ".importlinter").read_text().split("[importlinter:contract:no-torch]")[1]
    for name in ("scheduler", "kvcache", "structured", "protocol", "config"):
        if (ROOT / "quire" / name).is_dir() or (ROOT / "quire" / f"{name}.py").is_file():
            assert f"quire.{name}\n" in contract
