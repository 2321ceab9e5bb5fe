"""Writes docs/vllm_flags.md: what Quire answers to each flag of `vllm serve`.

The names are read from vllm_flags.txt beside this file, the answers from `quire serve`'s own parser and from
quire/entrypoints/not_yet.txt. `--check` only says whether the document is up to date; a test does the same.
"""

import argparse
import sys
from pathlib import Path

from quire.entrypoints.cli.main import build_parser
from quire.entrypoints.not_yet import answers

ROOT = Path(__file__).resolve().parent.parent
NAMES, DOCUMENT = ROOT / "tools" / "vllm_flags.txt", ROOT / "docs" / "vllm_flags.md"
_REWRITTEN = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_HEAD = """# Flags of vLLM's `serve`

What `quire serve` does with each flag of `vllm serve` {version}: {num} flags, of which {taken} are taken and do what
they say, {kept} are taken and change nothing (what they ask for is so anyway, or has no effect here, which a warning
says), and {refused} are refused by name. The same holds for the options of `LLM(...)` and `EngineArgs`. All of vLLM's
spellings are taken: `--max_model_len`, `-O3`, `--disable-x` for `--no-enable-x`, `--speculative-config.method ngram`
for a key of a flag of JSON, and `--config FILE.yaml`. `quire serve --help` lists further flags, which vLLM has not.

`tools/vllm_flags.py` writes this page.

| flag | answer |
|---|---|
"""


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `quire serve`."""
    (commands,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return commands.choices["serve"]


def vllm_flags() -> tuple[str, list[list[str]]]:
    """vLLM's version, and its flags: the name of each, and its short forms."""
    first, *lines = NAMES.read_text(encoding="utf-8").splitlines()
    return first.split("version ")[1].split(":")[0], sorted(line.split() for line in lines)


def answer(name: str, parser: argparse.ArgumentParser) -> tuple[str, str] | None:
    """The kind of answer to a flag (taken, kept or refused), and its text; None where there is none."""
    if (action := parser._option_string_actions.get(name)) is not None:
        return "taken", (action.help or "").replace("%%", "%")
    if name in _REWRITTEN:
        return "taken", f"The same as --speculative-config '{{\"{_REWRITTEN[name]}\": ...}}'."
    key = name[2:].replace("-", "_") if name.startswith("--") else name
    taken, told = answers().get(key, ("", ""))
    if not told:
        return None
    if taken in ("so", "-", "*", "+"):
        return "kept", f"Taken: it {told}"
    values = " or ".join(f"`{value}`" for value in taken.split("|") if value not in ("", "no"))
    return "refused", f"Refused{f', but for {values}' * bool(values)}: it {told}"


def document() -> str:
    """The whole page.

    Raises:
        LookupError: a flag has no answer.
    """
    parser, rows, kinds = serve_parser(), [], []
    version, flags = vllm_flags()
    for names in flags:
        found = answer(names[0], parser)
        if found is None or any((answer(short, parser) or ("",))[0] != found[0] for short in names[1:]):
            raise LookupError(f"{' '.join(names)} has no answer; give one in quire/entrypoints/not_yet.txt")
        kinds.append(found[0])
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {found[1].replace('|', chr(92) + '|')} |")
    counts = {kind: kinds.count(kind) for kind in ("taken", "kept", "refused")}
    return _HEAD.format(version=version, num=len(flags), **counts) + "\n".join(rows) + "\n"


def main() -> int:
    """Write the page, or look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not up to date")
    only_look, text = parser.parse_args().check, document()
    if only_look:
        return int(DOCUMENT.read_text(encoding="utf-8") != text)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
