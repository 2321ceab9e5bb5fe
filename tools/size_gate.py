"""The size gate: keeps the package small, and its files and functions short. `make check` runs it.

A file or a function over its limit needs an entry with a reason in size_exceptions.toml; an entry that nothing
needs is an error too, so that the list only holds what is true.
"""

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

MAX_PACKAGE_LINES = 15_000  # of code: neither blank nor comment
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of Python that are neither blank nor comment; docstrings count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len({number for number, line in enumerate(source.splitlines(), start=1) if line.strip()} & lines)


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Dotted name and number of lines of every function, from its `def` to its end."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                if not isinstance(child, ast.ClassDef):
                    yield name, (child.end_lineno or child.lineno) - child.lineno + 1
                yield from walk(child, name + ".")
            else:
                yield from walk(child, prefix)

    return walk(ast.parse(source), "")


def check(root: Path) -> tuple[list[str], str]:
    """Problems found under `root` (a checkout), and a one-line report of the package's size.

    Raises:
        ValueError: size_exceptions.toml has an entry without a reason.
    """
    exceptions: dict[str, str] = tomllib.loads((root / "tools/size_exceptions.toml").read_text(encoding="utf-8"))
    for place, reason in exceptions.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"size_exceptions.toml: {place!r} has no reason.")
    over: list[tuple[str, int, int]] = []  # place, lines, limit
    num_package_lines = num_files = 0
    for path in sorted([*root.glob("quire/**/*.py"), *root.glob("tools/**/*.py")]):
        name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if name.startswith("quire/"):
            num_package_lines += code_lines(source)
            num_files += 1
        over.append((name, len(source.splitlines()), MAX_FILE_LINES))
        over += [(f"{name}::{function}", lines, MAX_FUNCTION_LINES) for function, lines in functions(source)]
    over = [entry for entry in over if entry[1] > entry[2]]
    problems = [
        f"{place} has {lines} lines, more than {limit}: split it, or give a reason in tools/size_exceptions.toml"
        for place, lines, limit in over
        if place not in exceptions
    ]
    unused = exceptions.keys() - {place for place, _, _ in over}
    problems += [f"tools/size_exceptions.toml: {place!r} is not needed; remove it" for place in sorted(unused)]
    if num_package_lines >= MAX_PACKAGE_LINES:
        problems.append(
            f"the package has {num_package_lines} lines of code; fewer than {MAX_PACKAGE_LINES} are allowed"
        )
    if num_files == 0:
        problems.append(f"no package found under {root}")
    return problems, f"{num_package_lines} of {MAX_PACKAGE_LINES} lines of code in {num_files} files"


def main() -> int:
    """Print the report and the problems; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    problems, report = check(parser.parse_args().root)
    print(report)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
