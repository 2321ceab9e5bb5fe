"""Conversations on their way to a prompt: the one way of `LLM.chat`, the command line, the server and `/tokenize`.

`Conversation.job` says what is to be rendered, and a `Renderer` does it. Which of a model's templates is meant is
decided here; messages are read, and everything else is done, where the template runs (`template`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quire.errors import InvalidRequestError, require
from quire.text.renderer import Job


class TemplateOwner(Protocol):
    """What a conversation needs of a tokenizer."""

    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages, and how they are to be written; the fields are those of `ChatTemplate.render`.

    Attributes:
        chat_template: Jinja text, or the name of one of the model's several templates; by default the model's own, or
            of several "tool_use" where there are tools, else "default".
    """

    messages: Any
    chat_template: str | None = None
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    content_format: str = "auto"

    def job(self, tokenizer: TemplateOwner) -> bytes:
        """What a `Renderer` takes: the template's text, the special tokens and the conversation, as msgpack.

        Raises:
            InvalidRequestError: there is no template; or messages, tools, documents or variables are no JSON data.
        """
        template = select_template(tokenizer, self.chat_template, self.tools)
        options = msgspec.structs.asdict(self)
        messages, _ = options.pop("messages"), options.pop("chat_template")
        try:
            try:
                return msgspec.msgpack.encode(Job(template, tokenizer.special_tokens_map, messages, options))
            except TypeError:  # types of client libraries, or no JSON at all: a slower look finds out
                options = {name: to_plain(value, name) for name, value in options.items()}
                if isinstance(messages, list | tuple):
                    messages = [to_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]
                else:
                    messages = to_plain(messages, "messages")
            return msgspec.msgpack.encode(Job(template, tokenizer.special_tokens_map, messages, options))
        except UnicodeEncodeError:
            reason = "hold a lone surrogate (U+D800 to U+DFFF), which no text can; drop it"
        except OverflowError:
            reason = "hold an integer of more than 64 bits; write it as text"
        except RecursionError:
            reason = "are nested too deeply"
        raise InvalidRequestError(f"the messages, or what goes with them, {reason}.", "messages")


def select_template(
    tokenizer: TemplateOwner, chat_template: str | None = None, tools: Sequence[Any] | None = None
) -> str:
    """The text of the template that a conversation is written by; see `Conversation.chat_template`.

    Raises:
        InvalidRequestError: there is none.
    """
    require(isinstance(chat_template, str | None), "chat_template", chat_template, "Jinja text, or a template's name")
    own = tokenizer.chat_template
    if own and isinstance(own, dict) and (chat_template is None or chat_template in own):
        name = chat_template or ("tool_use" if tools is not None and "tool_use" in own else "default")
        if name not in own:
            reason = f"the model has no default chat template; pass chat_template as one of {sorted(own)}."
            raise InvalidRequestError(reason, "chat_template")
        return own[name]
    text = own if chat_template is None else chat_template
    if not isinstance(text, str) or (chat_template is None and not text):
        remedy = "give one (chat_template, or a server's --chat-template), or a plain prompt"
        raise InvalidRequestError(f"the model has no chat template; {remedy}.", "chat_template")
    return text


_BASES: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def _plain(value: Any, where: str) -> Any:
    """A fresh copy of JSON data; subclasses become their base types, objects of client libraries dicts."""
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _BASES.items():
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        return {_plain(k, where): _plain(v, where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, where) for v in value]
    if callable(getattr(value, "model_dump", None)):  # pydantic, as the openai client returns
        return _plain(value.model_dump(), where)
    raise InvalidRequestError(
        f"{where} holds a {type(value).__name__}; only JSON data (dict, list, str, numbers, None) can be passed.",
        re.split(r"\W", where)[0],
    )


def to_plain(value: Any, where: str) -> Any:
    """A copy of JSON data that is nothing but that; InvalidRequestError for anything else."""
    try:
        return _plain(value, where)
    except RecursionError:
        raise InvalidRequestError(f"{where} is nested too deeply.", re.split(r"\W", where)[0]) from None
