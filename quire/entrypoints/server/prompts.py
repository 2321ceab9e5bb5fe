"""Conversations of requests as prompts: which template may write them, and whose it is.

Chat and /tokenize call it, so that both see the same prompt. The rendering is `AsyncLLM.render_chat`'s.
"""

from collections.abc import Iterable
from typing import Any

from quire.entrypoints.server.state import ServerState
from quire.errors import InvalidRequestError
from quire.text.conversation import select_template


def template_of(state: ServerState, chat_template: str | None, tools: Any) -> str:
    """The text of the template that writes a request's conversation: the one it brings, the operator's, the model's.

    Raises:
        InvalidRequestError: the request may not bring one, there is none, or no tokenizer.
    """
    if chat_template is not None and not state.args.trust_request_chat_template:
        remedy = "leave it out. Its operator can allow them with --trust-request-chat-template."
        raise InvalidRequestError(f"this server takes no chat_template from requests; {remedy}", "chat_template")
    if state.llm.tokenizer is None:
        raise InvalidRequestError("chat needs a tokenizer, but this server runs without one.", "messages")
    wanted = state.args.chat_template if chat_template is None else chat_template
    return select_template(state.llm.tokenizer, wanted, tools)


async def conversation_text(
    state: ServerState, messages: Iterable[Any], *, chat_template: str | None, **options: Any
) -> str:
    """The prompt of a request's conversation.

    Args:
        messages: dicts, or models of a body.
        chat_template: the one that the request brings.
        options: further fields of `Conversation`.

    Raises:
        InvalidRequestError: as `template_of`, and as `AsyncLLM.render_chat`.
    """
    template_of(state, chat_template, options.get("tools"))  # may it bring one?
    variables = (state.args.default_chat_template_kwargs or {}) | (options.get("chat_template_kwargs") or {})
    return await state.llm.render_chat(
        [dict(message) for message in messages],
        chat_template=state.args.chat_template if chat_template is None else chat_template,
        trusted=chat_template is None,
        content_format=state.args.chat_template_content_format,
        **options | {"chat_template_kwargs": variables},
    )
