"""The formats of tool calls and thoughts, by name, and how a model's chat template tells which one is meant.

`parsing` asks it for what the server's options name; "auto" looks into the template. A new format is a line here, and a
`Form` in a file of its own, or beside those that are much like it.
"""

import re
from functools import lru_cache

from quire.entrypoints.server.parsers import gemma, harmony, json_formats, name_formats, pythonic, tag_formats, thoughts
from quire.entrypoints.server.parsers.forms import Form
from quire.entrypoints.server.parsers.thoughts import ThoughtForm
from quire.errors import ConfigError
from quire.utils.suggest import hint

# Each format, and the names that it goes by.
_FORMS: list[tuple[Form, tuple[str, ...]]] = [
    (json_formats.HERMES, ("hermes", "qwen2_5")),
    (json_formats.LLAMA3, ("llama3_json", "llama4_json")),
    (pythonic.FORM, ("llama4_pythonic", "pythonic")),
    (name_formats.MISTRAL, ("mistral",)),
    (tag_formats.QWEN3_CODER, ("qwen3_coder", "qwen3_xml")),
    (name_formats.DEEPSEEK, ("deepseek_v3", "deepseek_v31")),
    (json_formats.GRANITE, ("granite",)),
    (json_formats.PHI4, ("phi4", "phi4_mini_json")),
    (gemma.FORM, ("gemma", "gemma4", "functiongemma")),
    (tag_formats.GLM, ("glm4", "glm45", "glm47")),
    (name_formats.KIMI_K2, ("kimi_k2",)),
    (harmony.FORM, ("openai", "gpt-oss")),
]
TOOL_FORMS = {name: form for form, names in _FORMS for name in names}
HARMONY = "openai_gptoss"
THOUGHT_FORMS: dict[str, ThoughtForm] = {**thoughts.FORMS, HARMONY: harmony.THOUGHTS, "gpt-oss": harmony.THOUGHTS}
TOOL_NAMES = ("auto", "none", "generic", *TOOL_FORMS)
THOUGHT_NAMES = ("auto", *THOUGHT_FORMS)

# What only a template of this format has, the most telling first.
_TOOL_SIGNS: dict[str, str | None] = {
    r"<\|channel\|>(?s:.*)<\|message\|>": "openai",
    r"<\|tool_calls_section_begin\|>": "kimi_k2",
    r"<｜tool▁call▁begin｜>": "deepseek_v3",
    r"\[TOOL_CALLS\]": "mistral",
    r"<\|tool_call>call:|<start_function_call>": "gemma",
    r"<tool_call>(?s:.*)<arg_key>": "glm45",
    r"<function=(?s:.*)<parameter=": "qwen3_coder",
    r"<function=": None,  # with JSON in it: to be learned
    r"<tool_calls>\[": None,  # Apriel, which speaks of <tool_call> tags that it does not write
    r"functools": "phi4_mini_json",
    r"<tool_call>(?s:.{0,600})\"name": "hermes",
    r"<\|tool_call\|>": "granite",
    r"<\|python_start\|>": "llama4_pythonic",
    r"<\|python_tag\|>|function name, \\?\"parameters": "llama3_json",
}
_THOUGHT_SIGNS: dict[str, str | None] = {
    r"<\|channel\|>(?s:.*)<\|message\|>": HARMONY,
    r"\[THINK\]": "mistral",
    r"<seed:think>": "seed_oss",
    r"<\|channel>thought": "gemma4",
    r"Here is my thought process:|<think></think>(?s:.*)<response></response>": "granite",
    r"<think>": "think",
}


@lru_cache(maxsize=64)
def tool_format(name: str, template: str) -> str | None:
    """The name of the format in which a model with this template calls tools; None: it is none that is known here."""
    return _first(_TOOL_SIGNS, template) if name == "auto" else name


@lru_cache(maxsize=64)
def thought_format(name: str | None, template: str) -> str | None:
    """The name of the format in which thoughts are told apart, None where they are not."""
    if name is None:  # harmony is no text without its parser
        return HARMONY if _first(_THOUGHT_SIGNS, template) == HARMONY else None
    return _first(_THOUGHT_SIGNS, template) if name == "auto" else name


def check_name(option: str, name: str, names: tuple[str, ...]) -> None:
    """Check the name that an option gives.

    Raises:
        ConfigError: there is none such; the message names the nearest.
    """
    if name not in names:
        there = f"There are {', '.join(names)}."
        raise ConfigError(f"{option} {name!r} is no parser. {hint(name, names, there)}")


def _first(signs: dict[str, str | None], template: str) -> str | None:
    return next((name for sign, name in signs.items() if re.search(sign, template)), None)
