"""Conversations to prompts by a model's chat template, as transformers renders them.

`render_child` calls it, in a process of its own; everybody else goes through `conversation`. Messages are checked and
copied to plain JSON first, so that a template sees nothing else. It knows nothing of token ids.
"""

import copy
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jinja2

from quire.errors import InvalidRequestError, require
from quire.text.conversation import to_plain
from quire.text.sandbox import Sandbox

MAX_TEMPLATE_CHARS = 1 << 20
_SANDBOX = Sandbox()
_CONTINUE, _VARIABLES = "continue_final_message", "chat_template_kwargs"
_FORMATS = ("auto", "string", "openai")  # of content, as templates have it
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # -> its field
_MEDIA_PARTS = ("image", "audio", "video", "file")
# What `render` and its callers set, or transformers' apply_chat_template takes for itself.
RESERVED_NAMES = frozenset(
    ("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt")
    + ("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict")
    + ("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "chat_template_kwargs")
)


class ChatTemplate:
    """The text of a template, with the special tokens that it may write."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self._text, self._special_tokens = text, special_tokens

    def check(self) -> None:
        """Raise InvalidRequestError where it is no valid Jinja."""
        _compile(self._text)

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        content_format: str = "auto",
    ) -> str:
        """The prompt of one conversation, made in this very process.

        A message of the role "developer" becomes a system's where the template does not know that role.

        Args:
            messages: dicts with role and content. Content is a string, a list of text parts, or None beside
                tool_calls. Parts are joined by newlines unless the template goes through them itself; tool-call
                arguments written as JSON text are parsed.
            tools: JSON schemas of functions; documents: dicts. Both go to the template as they are.
            add_generation_prompt: open the assistant's turn after the last message.
            continue_final_message: end right after the last message's content, for the model to go on with it.
            chat_template_kwargs: further variables for the template.
            content_format: "string" joins parts, "openai" makes a part of a string, whatever the template does.

        Raises:
            InvalidRequestError: bad messages, no valid template, or the template's own complaint.
            MemoryError, RecursionError: the template needs more than there is.
        """
        if continue_final_message and add_generation_prompt:
            raise _refusal(_CONTINUE, "and add_generation_prompt exclude each other; set one of them.")
        text = self._text
        template = _compile(text)
        conversation = _read_messages(messages, template, content_format)
        if "developer" not in text:
            for message in conversation:
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        variables = dict(self._special_tokens) | _read_variables(chat_template_kwargs)
        variables |= {
            "tools": _read_objects(tools, "tools"),
            "documents": _read_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
            "messages": conversation,
        }
        if not continue_final_message:
            return _run_any_way(template, variables)
        mark = f"FINALMESSAGE{secrets.token_hex(8)} "  # letters only, so that no filter changes it
        final = _mark_final_message(conversation, mark, text)
        return _cut_at_mark(_run_any_way(template, variables), mark, final)


@lru_cache(maxsize=8)
def _compile(text: str) -> jinja2.Template:
    if len(text) > MAX_TEMPLATE_CHARS:
        message = f"the chat template has {len(text)} characters; the limit is {MAX_TEMPLATE_CHARS}."
        raise InvalidRequestError(message, "chat_template")
    try:
        return _SANDBOX.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        reason = f"{error.message} (line {error.lineno})"
    except (RecursionError, ValueError, SyntaxError, MemoryError) as error:
        reason = f"{type(error).__name__} while compiling"
    raise InvalidRequestError(f"the chat template is no valid Jinja: {reason}.", "chat_template")


def _run_any_way(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """A message without content, as of calls alone, has no such entry, or None, or an empty text: what renders first.

    Most templates take all three. Some ask for None before they write calls, and some concatenate the content.
    """
    bare = [message for message in variables["messages"] if "content" not in message]
    for content in (None, "") if bare else ():
        with suppress(InvalidRequestError):
            return _run_either_way(template, variables)
        for message in bare:
            message["content"] = content
    return _run_either_way(template, variables)


def _run_either_way(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Arguments of tool calls are objects to most templates, and text to those that fail with objects."""
    try:
        return _run(template, variables)
    except InvalidRequestError as error:
        variables = copy.deepcopy(variables)
        functions = [
            call["function"]
            for message in variables["messages"]
            for call in message.get("tool_calls", ())
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
        ]
        if "TypeError" not in str(error) or not functions:
            raise
        for function in functions:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return _run(template, variables)


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except MemoryError:
        reason, param = "the chat template was stopped: it takes more memory than a prompt is worth", "chat_template"
    except jinja2.TemplateError as error:
        reason, param = f"the chat template refused the conversation: {error.message}", "messages"
    except Exception as error:  # whatever a template's expressions can raise
        reason, param = f"the chat template failed: {type(error).__name__}: {error}", "messages"
    raise InvalidRequestError(re.sub(r" at 0x[0-9a-fA-F]+", "", reason)[:1000], param)


# --- messages


def _refusal(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {reason}", param)


def _bad_messages(reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, "messages")


def _read_variables(values: Mapping[str, Any] | None) -> dict[str, Any]:
    require(isinstance(values, Mapping | None), _VARIABLES, values, "a dict of variables for the chat template")
    for name in values or {}:
        if not isinstance(name, str) or name in RESERVED_NAMES:
            raise _refusal(_VARIABLES, f"can't set {name!r}; pass it as an argument of its own, if there is one.")
    return to_plain(values or {}, _VARIABLES)


def _read_objects(values: Sequence[Any] | None, name: str) -> list[Any] | None:
    plain = to_plain(values, name)
    if plain is not None and not (isinstance(plain, list) and all(isinstance(v, dict) for v in plain)):
        raise _refusal(name, "must be a list of dicts (JSON schemas, for tools).")
    return plain


def _read_messages(messages: Any, template: jinja2.Template, content_format: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise _bad_messages("messages must be a list of at least one dict with role and content.")
    require(content_format in _FORMATS, "chat_template_content_format", content_format, f"one of {_FORMATS}")
    form = content_format if content_format != "auto" else "parts" if iterates_content(template) else "string"
    return [_read_message(message, f"messages[{i}]", form) for i, message in enumerate(messages)]


def _read_message(given: Any, where: str, form: str) -> dict[str, Any]:
    """One message as the template sees it: no None entries, parsed tool calls, reasoning under its names."""
    plain = to_plain(given, where)
    if not isinstance(plain, dict):
        raise _bad_messages(f"{where} is a {type(given).__name__}, not a dict with role and content.")
    message = {name: value for name, value in plain.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _bad_messages(f"{where} needs a role, such as 'user'; got {role!r}.")
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_read_tool_call(call) for call in message["tool_calls"]]
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if "content" in message:
        message["content"] = _read_content(message["content"], f"{where}.content", form)
    elif role != "assistant":  # whose answer may have been cut before its content began
        raise _bad_messages(f"{where} has no content; only an assistant's message may be without.")
    if reasoning is not None:
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    return message


def _read_tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = text = function.get("arguments")
    if isinstance(text, str) and text.strip():
        with suppress(ValueError, RecursionError):
            arguments = json.loads(text)
        if not isinstance(arguments, dict):  # as of a call that was cut short, which its client sends ever after
            arguments = {"invalid_json": text}
    return call | {"function": function | {"arguments": arguments or {}}}


def _read_content(content: Any, where: str, form: str) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "openai" else content
    if not isinstance(content, list):
        raise _bad_messages(f"{where} must be a string or a list of text parts, got {type(content).__name__}.")
    takes_parts = form != "string"
    parts = [_read_part(part, f"{where}[{i}]", takes_parts) for i, part in enumerate(content)]
    return parts if takes_parts else "\n".join(part["text"] for part in parts)


def _read_part(part: Any, where: str, takes_parts: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        if not isinstance(text := part.get(_TEXT_PARTS[kind]), str):
            raise _bad_messages(f"{where} of type {kind!r} needs a string {_TEXT_PARTS[kind]!r}.")
        return part | {"type": "text", "text": text}
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA_PARTS):
        raise _bad_messages(f"{where} is of type {kind!r}, but this model takes text only.")
    if takes_parts and isinstance(kind, str):
        return part  # a kind of this template's own, such as "thinking"
    raise _bad_messages(f"{where} must be a dict of type 'text', got {kind or type(part).__name__!r}.")


def _mark_final_message(conversation: list[dict[str, Any]], mark: str, template: str) -> str:
    """Append `mark` to the last message's text, and return that text as it was."""
    message = conversation[-1]
    if (content := message.get("content")) is None or "content" not in template:
        raise _refusal(_CONTINUE, "needs a last message with content, and a template that writes it.")
    if isinstance(content, str):
        message["content"] = content + mark
        return content
    for part in reversed(content):
        if "text" in part:
            text = part["text"]
            part["text"] = text + mark
            return text
    raise _refusal(_CONTINUE, "found no text in the last message.")


def _cut_at_mark(prompt: str, mark: str, final: str) -> str:
    bare = mark.strip()
    if bare not in prompt or final.strip() not in prompt:
        reason = "this chat template does not write the last message's content as it is"
        raise _refusal(_CONTINUE, f"can't be done: {reason}. Leave continue_final_message False.")
    place = prompt.rindex(bare)
    # A template that trims its messages took the mark's own space away, and so takes the content's.
    return prompt[:place] if prompt.startswith(mark, place) else prompt[:place].rstrip()


# --- does a template go through content parts?


@lru_cache(maxsize=8)
def iterates_content(template: jinja2.Template) -> bool:
    """Whether a template goes through lists of content parts itself: it is tried on some."""
    iterated: list[bool] = []

    class Parts(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            iterated.append(True)
            return super().__iter__()

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            return Parts(found) if isinstance(place, slice) else found

    rendered, parts = "", [{"type": "text", "text": "x"}]
    messages = [{"role": role, "content": Parts(parts)} for role in ("user", "assistant", "user")]
    with suppress(Exception):  # one that fails with a list goes through none
        rendered = template.render(messages=messages, add_generation_prompt=True)
    return bool(iterated) and '"text"' not in rendered  # the list as JSON
