"""The package's metadata and its pinned set-up say the same thing, and nothing of one machine."""

import os
import re
import tomllib
from pathlib import Path

import quire

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[<>=~!; ]", requirement.lower())[0]


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"].values()
    for requirement in [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]:
        assert requirement_name(requirement) in PINNED, requirement


def test_constraints_are_plain_pins() -> None:
    assert all(re.fullmatch(r"[\w.]+", version) for version in PINNED.values())
    assert not re.search(r"://|@|file:|/", (ROOT / "constraints.txt").read_text())


def test_runtime_needs_no_transformers() -> None:
    assert "transformers" not in {requirement_name(r) for r in PROJECT["dependencies"]}


def test_version_has_one_source() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert (
        f"## [{quire.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
        or "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    )


def test_what_ships_is_there() -> None:
    assert (ROOT / "quire" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
