"""GBNF, llama.cpp's grammars, as llguidance's Lark; what is wrong in one is told with line and column.

`source` and structural tags call it. llguidance has the translation, which says lines of some faults, keeps the last of
two rules of one name, and knows no places in the grammar that it was made of.
"""

import re

from quire.errors import InvalidRequestError

_WORDS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|#[^\n]*|(?P<name>[\w-]+)(?P<is_rule>[ \t]*::=)?')


def lark_of(text: str) -> str:
    """A grammar as Lark: GBNF, which has `::=`, is translated.

    Raises:
        InvalidRequestError: it is no GBNF; says what and where.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if "::=" not in text:
        return text
    rules = dict[str, int]()
    for word in _WORDS.finditer(text):
        if word["is_rule"] and rules.setdefault(word["name"], word.start()) != word.start():
            raise _fault(text, word.start(), f"there is a rule {word['name']!r} already")
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise _fault(text, error.pos.pos, str(error).removesuffix(f" at {error.pos}")) from None
    except RecursionError:
        raise InvalidRequestError("the GBNF grammar is nested too deep; make it flatter.") from None
    except IndexError:  # of what follows a backslash
        raise _fault(text, len(text), "incomplete escape sequence") from None
    except Exception as error:
        name = re.search("'(.*)' not found", str(error))
        places = [word.start() for word in _WORDS.finditer(text) if name and word["name"] == name[1]]
        raise _fault(text, places[0] if places else 0, str(error)) from None


def place(text: str, at: int) -> str:
    """Line and column of a character."""
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"


def _fault(text: str, at: int, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place(text, at)} of the GBNF grammar: {reason[0].lower()}{reason[1:]}.")
