"""What the documents name exists: `quire.dotted.names`, `paths/in/the/project`, relative links, and flags."""

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import build_parser

ROOT = Path(__file__).parents[3]
WALK = ROOT / "docs" / "life_of_a_request.md"
OWN_PAGES = [ROOT / name for name in ("tools/README.md", "tests/clients/README.md", "quire/demo/README.md")]
# Of pip, Ray and torchrun, and what stands for any name.
FOREIGN_FLAGS = {"--extra-index-url", "--head", "--address", "--generate", "--nproc-per-node", "--standalone"}
FOREIGN_FLAGS |= {"--disable-x", "--no-enable-x"}
PATH_ROOTS = ("quire/", "tests/", "tools/", "docs/", "examples/", "benchmarks/", "csrc/", ".ci/")


def code_spans(text: str) -> list[str]:
    """The text between single backticks, fenced blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text))


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute or a declared field of something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            declared = attribute in getattr(target, "__annotations__", {})
            if not hasattr(target, attribute) and not declared:
                return False
            target = getattr(target, attribute, None)
        return True
    return False


def unknown_symbols(text: str) -> list[str]:
    """Dotted names of quire, and paths, in a document's code spans that lead nowhere."""
    unknown: list[str] = []
    for span in code_spans(text):
        if match := re.fullmatch(r"(quire(?:\.\w+)+)(?:\(.*\))?", span):
            unknown += [] if resolves(match[1]) else [span]
        elif span.startswith(PATH_ROOTS) and re.fullmatch(r"[\w./-]+", span):
            unknown += [] if (ROOT / span).exists() else [span]
    return unknown


def broken_links(document: Path) -> list[str]:
    """Relative links of a document whose file does not exist."""
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    return [link for link in links if "://" not in link and not (document.parent / link).exists()]


def test_life_of_a_request_names_what_exists() -> None:
    if not (ROOT / "README.md").exists() and not WALK.exists():
        pytest.skip("the documents are not written yet")
    text = WALK.read_text(encoding="utf-8")
    assert any(span.startswith("quire") for span in code_spans(text)), "it names nothing that can be checked"
    assert unknown_symbols(text) == []


def test_documents_name_what_exists() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), *OWN_PAGES]
    assert documents
    problems = {
        document.name: unknown_symbols(document.read_text(encoding="utf-8")) + broken_links(document)
        for document in documents
    }
    assert {name: found for name, found in problems.items() if found} == {}


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Those of a command, and of all commands below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_of(command)


def named_flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def test_documents_name_flags_that_there_are() -> None:
    """Of `quire`, of vLLM, or of a script here; a changelog and measurements tell of the past, too."""
    scripts = (path for folder in ("tools", "benchmarks", "tests/clients") for path in (ROOT / folder).glob("*.py"))
    known = FOREIGN_FLAGS.union(flags_of(build_parser()), *(named_flags(path.read_text()) for path in scripts))
    known |= named_flags((ROOT / "tools/vllm_flags.txt").read_text())
    for document in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *OWN_PAGES):
        found = {flag.replace("_", "-") for flag in named_flags(document.read_text(encoding="utf-8"))}
        assert found - known == set(), document.name


def test_a_wrong_name_is_noticed(tmp_path: Path) -> None:
    text = "`quire.errors.QuireError` `quire.errors.NoSuchError` `quire.nowhere` `quire.protocol.step.StepPlan`\n"
    text += "`quire/errors.py` `quire/nowhere.py` `x.y` `quire generate` `quire.errors.ConfigError()`"
    assert unknown_symbols(text) == ["quire.errors.NoSuchError", "quire.nowhere", "quire/nowhere.py"]
    (tmp_path / "page.md").write_text("[a](page.md#x) [b](gone.md) [c](https://example.com/d.md)")
    assert broken_links(tmp_path / "page.md") == ["gone.md"]
