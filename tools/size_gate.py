"""The size gate: keeps the package, its rooms, its files and its functions small. `make check` runs it.

Lines are counted without blanks, comments and docstrings. Budgets stand in size_budget.toml. A file or a function over
its limit needs an entry with a reason in size_exceptions.toml; an entry that nothing needs is an error too, so that
both lists only hold what is true.
"""

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BASE = "base"  # the files that lie in quire/ itself


@dataclass(frozen=True)
class Budget:
    """size_budget.toml: lines of the whole package, of the engine proper, and of each room."""

    package: int
    engine: int
    outside_engine: list[str]  # rooms that are not the engine proper
    rooms: dict[str, int]  # "worker" or, within a room, "ops/triton"

    def room(self, name: str) -> str:
        """The room of a file, a path below quire/: the longest that is listed, or its first folder.

        A listed room is a folder, or a single file without its ending.
        """
        if "/" not in name:
            return _BASE
        listed = [room for room in self.rooms if name.startswith((room + "/", room + "."))]
        return max(listed, key=len, default=name.partition("/")[0])


def code_lines(source: str) -> set[int]:
    """Numbers of the lines of Python that are neither blank nor comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in _statements(_parsed(source)):
        documents: list[ast.stmt] = []
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documents.append(node.body[0])
        if isinstance(node, ast.ClassDef):  # a text below a field documents the field
            documents += [below for field, below in pairwise(node.body) if _is_field(field) and _is_text(below)]
        for document in documents:
            lines -= set(range(document.lineno, (document.end_lineno or 0) + 1))
    return lines & {number for number, line in enumerate(source.splitlines(), start=1) if line.strip()}


def _is_field(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Assign, ast.AnnAssign))


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def functions(source: str, code: set[int]) -> Iterator[tuple[str, int]]:
    """Dotted name and number of code lines of every function, from its `def` to its end."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in filter(_has_statements, ast.iter_child_nodes(node)):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                if not isinstance(child, ast.ClassDef):
                    yield name, len(code & set(range(child.lineno, (child.end_lineno or child.lineno) + 1)))
                yield from walk(child, name + ".")
            else:
                yield from walk(child, prefix)

    return walk(_parsed(source), "")


@lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _has_statements(node: ast.AST) -> bool:
    """Whether it is a statement, or a part of one that holds some: expressions define nothing that is counted."""
    return isinstance(node, ast.stmt | ast.excepthandler | ast.match_case)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in filter(_has_statements, ast.iter_child_nodes(node)):
        yield from _statements(child)


def check(root: Path) -> tuple[list[str], str]:
    """Problems found under `root` (a checkout), and a one-line report of the package's size.

    Raises:
        ValueError: size_exceptions.toml has an entry without a reason.
    """
    exceptions: dict[str, str] = _read(root, "size_exceptions.toml")
    for place, reason in exceptions.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"size_exceptions.toml: {place!r} has no reason.")
    budget = Budget(**_read(root, "size_budget.toml"))
    over: list[tuple[str, int, int]] = []  # place, lines, limit
    sizes: Counter[str] = Counter()  # of each room
    num_files = 0
    for path in sorted([*root.glob("quire/**/*.py"), *root.glob("tools/**/*.py")]):
        name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        code = code_lines(source)
        if name.startswith("quire/"):
            sizes[budget.room(name.removeprefix("quire/"))] += len(code)
            num_files += 1
        over.append((name, len(code), MAX_FILE_LINES))
        over += [(f"{name}::{function}", lines, MAX_FUNCTION_LINES) for function, lines in functions(source, code)]
    over = [entry for entry in over if entry[1] > entry[2]]
    problems = [
        f"{place} has {lines} lines, more than {limit}: split it, or give a reason in tools/size_exceptions.toml"
        for place, lines, limit in over
        if place not in exceptions
    ]
    unused = exceptions.keys() - {place for place, _, _ in over}
    problems += [f"tools/size_exceptions.toml: {place!r} is not needed; remove it" for place in sorted(unused)]
    package, engine = sizes.total(), sum(n for room, n in sizes.items() if room not in budget.outside_engine)
    problems += _over_budget(budget, sizes, package, engine)
    if num_files == 0:
        problems.append(f"no package found under {root}")
    report = f"{package} of {budget.package} lines of code in {num_files} files; engine proper: {engine}"
    return problems, f"{report} of {budget.engine}"


def _over_budget(budget: Budget, sizes: Counter[str], package: int, engine: int) -> list[str]:
    problems = [
        f"quire/{room}: {lines} lines of code, more than its budget of {budget.rooms[room]}: make it smaller, or raise "
        "the line in tools/size_budget.toml with a reason, in a commit of its own"
        for room, lines in sorted(sizes.items())
        if room in budget.rooms and lines > budget.rooms[room]
    ]
    problems += [
        f"quire/{room} has no budget in tools/size_budget.toml" for room in sorted(sizes.keys() - budget.rooms.keys())
    ]
    for what, lines, limit in (("package", package, budget.package), ("engine proper", engine, budget.engine)):
        if lines >= limit:
            problems.append(f"the {what} has {lines} lines of code; fewer than {limit} are allowed")
    return problems


def _read(root: Path, file: str) -> dict:
    return tomllib.loads((root / "tools" / file).read_text(encoding="utf-8"))


def main() -> int:
    """Print the report and the problems; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--rooms", action="store_true", help="also print each room's lines and budget")
    arguments = parser.parse_args()
    problems, report = check(arguments.root)
    print(report)
    if arguments.rooms:
        for room, lines, limit in rooms(arguments.root):
            print(f"{lines:7} of {limit:5}  {room}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def rooms(root: Path) -> list[tuple[str, int, int]]:
    """Each room that has a budget: its name, its lines of code, its budget."""
    budget = Budget(**_read(root, "size_budget.toml"))
    sizes: Counter[str] = Counter()
    for path in root.glob("quire/**/*.py"):
        room = budget.room(path.relative_to(root / "quire").as_posix())
        sizes[room] += len(code_lines(path.read_text(encoding="utf-8")))
    return [(room, sizes[room], limit) for room, limit in budget.rooms.items()]


if __name__ == "__main__":
    sys.exit(main())
