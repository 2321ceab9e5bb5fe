"""Why a constraint can't be compiled, in the terms of who wrote it.

`compiler` calls it with llguidance's words. Those name options that no user has, and lines and columns of texts that
were written here, for a regex or a schema; here they become places in what the user sent.
"""

import json
import re

from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.gbnf import place
from quire.text.grammars.schema import place_of

OURS = "// written by the server\n"  # begins grammars whose lines are no user's
_LONGEST = 400  # characters; llguidance quotes whole regexes
_AT = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r"\n +\d+ \| (?s:.*)")  # the lines of the grammar that it shows
_REGEX = re.compile(r"regex parse error:\n    (.*)\n( *)\^+\nerror: (.*)")
# What llguidance says -> what is said of it, and the schema's keyword to blame.
_TEXTS = [
    (r"NoExtensionBias", "no text obeys it: it contradicts itself, or leads back to itself without an end", ""),
    (r"(Regex|Unable.* regex) is empty: .*", "a pattern, a format and lengths contradict each other, it seems", ""),
    (r"oneOf constraints are not supported.*", "the options of 'oneOf'{at} don't exclude each other as far as can be "
     "seen, by types, constants or required properties; use anyOf", "oneOf"),
    (r"Resource '(.*?)' is not present.*", r"$schema '\1' is not known; leave it out", ""),
    (r"Unknown format: (.*)", r"the format '\1'{at} is not supported; leave it out, or use a pattern", "format"),
    (r"Invalid type: (.*)", r"'\1'{at} is no type of JSON's", "type"),
    (r"initial lexer configuration \(grammar\) too big \(limit for this grammar: (\d+)\)",
     r"its regexes take more than \1 units of work, the most there may be; use simpler or shorter ones", ""),
    (r"grammar size \(number of symbols\) too big \(limit for this grammar: (\d+)\)",
     r"it has more than \1 symbols, the most there may be; make it smaller", ""),
    (r"lexer precomputation failed.*", "its regexes take too much work; use simpler or shorter ones", ""),
    (r"lookarounds not supported yet; \w+ in regex /(.*)/", r"the regex '\1' has a word boundary, or an anchor that is "
     "not at its very beginning or end; leave that out", ""),
    (r"\bf64\b", "a number", ""),
]  # fmt: skip


def reason_of(error: str, params: StructuredOutputsParams) -> str:
    """One line that says what is wrong, and where: with line and column of a grammar or a regex of the user's own."""
    error = error.replace("<non-verbose/>", "").removeprefix("Parser Error: ")
    found, text = _AT.match(error), params.constraint
    error = _EXCERPT.sub("", error[found.end() if found else 0 :])
    where = ""
    if params.kind == "structural_tag" and found and not error.startswith(("failed to compile", "invalid regex")):
        where = _place_in_tag(error, text, int(found[1]), int(found[2]))
    elif params.kind == "grammar" and not text.startswith(OURS):
        if "::=" in text:
            where = _place_in_gbnf(error, text)
        elif found is not None:
            where = _place_in_lark(error, text, int(found[1]), int(found[2]))
        elif (name := re.search(r"unknown grammar (@\w+)", error)) and name[1] in text:
            where = place(text, text.index(name[1]))
        elif '"%json"' in error:
            where, error = place(text, _broken_json(text)), re.sub(r" at line \d+ column \d+", "", error)
    elif params.kind == "regex" and (wrong := _REGEX.search(error)):
        where, error = place(text, _place_in_regex(text, len(wrong[2]) - 4)), wrong[3]
    said = ": ".join(filter(None, [where, _said(error, params)]))
    return said if len(said) <= _LONGEST else said[: _LONGEST - 3] + "..."


def _said(error: str, params: StructuredOutputsParams) -> str:
    if wrong := _REGEX.search(error):
        at = place_of(params, "pattern", wrong[1])
        error = f"{wrong[3]}, at character {len(wrong[2]) - 3} of the regex '{wrong[1][:200]}'{at}"
    error = " ".join(re.sub(r'(?s)invalid regex ".*" \(in regex\): ', "", error).split())
    for pattern, text, keyword in _TEXTS:
        if found := re.search(pattern, error):
            at = place_of(params, keyword, found[1] if found.lastindex else None) if keyword else ""
            error = error[: found.start()] + found.expand(text).replace("{at}", at) + error[found.end() :]
    return error


def _place_in_lark(error: str, text: str, line: int, column: int) -> str:
    """Of an unknown name its own place; llguidance says where the rule's body begins."""
    at = sum(map(len, text.splitlines(keepends=True)[: line - 1])) + column - 1
    name = re.match(r'unknown name: "(\w+)"', error)
    found = re.compile(rf"\b{name[1]}\b").search(text, at) if name else None
    return place(text, found.start()) if found else f"line {line}, column {column}"


def _place_in_tag(error: str, text: str, line: int, column: int) -> str:
    """In a grammar that a structural tag holds; where it holds several, as llguidance says it."""
    if "::=" in text:
        return ""
    grammars = [value for value in re.findall(r'"grammar": *("(?:\\.|[^"\\])*")', text) if len(value) > column]
    found = _place_in_lark(error, json.loads(grammars[0]), line, column) if len(grammars) == 1 else ""
    return f"{found or f'line {line}, column {column}'} of a grammar in it"


def _place_in_gbnf(error: str, text: str) -> str:
    """Where in GBNF something is that was found in the Lark made of it; "" where that is not plain."""
    found = None
    if wrong := _REGEX.search(error):
        found = re.search(re.escape(wrong[1]), text)
    elif wrong := re.search(r"got \((\d+), (\d+)\)", error):
        found = re.search(rf"\{{\s*{wrong[1]}\s*,\s*{wrong[2]}\s*\}}", text)
    return place(text, found.start()) if found else ""


def _place_in_regex(text: str, at: int) -> int:
    """The character of a regex that is at this place of how it is written in Lark, where slashes are escaped."""
    import llguidance

    end = min(at, len(text))
    while (extra := len(llguidance.regex_to_lark(text[:end])) - at) > 0:
        end -= max(1, extra // 2)
    return end


def _broken_json(text: str) -> int:
    """Where the first %json is that no JSON follows."""
    for found in re.finditer("%json", text):
        try:
            json.JSONDecoder().raw_decode(text[found.end() :].lstrip())
        except ValueError:
            return found.start()
    return 0
