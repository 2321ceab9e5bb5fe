"""What a request to /v1/messages brings, read as a chat request's fields. `read_message` calls it.

Pure; a refusal names the block.
"""

import json
from typing import Any

from quire.entrypoints.server.messages_request import ConversationRequest, MessageParam
from quire.entrypoints.server.requests_common import conversation_of, field_text, wrong
from quire.errors import InvalidRequestError

Block = dict[str, Any]
_MEDIA = ("image", "document", "container_upload")
# Claude Code begins with it, and with another hash each time, so that no cached prefix would fit what follows.
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(body: ConversationRequest) -> dict[str, Any]:
    """The fields of a chat request that asks for the same.

    Raises:
        InvalidRequestError: a block, a tool or a setting of a kind that is not there.
    """
    choice, config, goes_on = body.tool_choice or {}, body.output_config or {}, body.messages[-1].role == "assistant"
    if body.stop and body.stop_sequences:
        raise InvalidRequestError("stop and stop_sequences say the same; give one of them.", "stop")
    return {
        "messages": _messages(body),
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "user": body.user or _user_of(body),
        "tools": None if body.tools is None else [_tool(tool, place) for place, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(choice) if choice else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "response_format": _format(config["format"]) if config.get("format") else None,
        "reasoning_effort": config.get("effort"),
        "continue_final_message": goes_on or None,
        **_thinking(body),
    }


def _user_of(body: ConversationRequest) -> str | None:
    if (user := (body.metadata or {}).get("user_id")) is not None and not isinstance(user, str):
        raise wrong("metadata.user_id", "a text", user)
    return user


def _thinking(body: ConversationRequest) -> dict[str, Any]:
    """Whether the template is to have the model think."""
    variables = body.chat_template_kwargs
    if body.thinking is None:
        return {"chat_template_kwargs": variables}
    kind, budget = body.thinking.get("type"), body.thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise wrong("thinking.type", "enabled, adaptive or disabled", kind)
    if kind == "enabled":
        if type(budget) is not int or budget < 1:
            raise wrong("thinking.budget_tokens", "an integer of at least 1", budget)
        if body.max_tokens is not None and budget >= body.max_tokens:
            message = f"thinking.budget_tokens ({budget}) must be less than max_tokens ({body.max_tokens})."
            raise InvalidRequestError(message, "thinking.budget_tokens")
    return {
        "chat_template_kwargs": {"enable_thinking": kind != "disabled"} | (variables or {}),
        "thinking_token_budget": budget if kind == "enabled" else None,
    }


def _messages(body: ConversationRequest) -> list[dict[str, Any]]:
    system = _texts(body.system or "", "system")
    if isinstance(system, list):
        system = [block for block in system if not block["text"].startswith(_BILLING)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(body.messages):
        where = f"messages[{place}].content"
        messages += (_assistant_message if message.role == "assistant" else _other_messages)(message, where)
    return conversation_of(messages, "messages", "tool_use", "tool_result")


def _other_messages(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """A user's message, after the results of tools that come with it."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[Block] = []
    for place, block in enumerate(message.content):
        own = f"{where}[{place}]"
        if block.get("type") == "tool_result":
            call_id = field_text(block, "tool_use_id", own)
            content = _texts(block.get("content") or "", f"{own}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            texts.append(_text_block(block, own))
    return results + ([{"role": message.role, "content": texts}] if texts or not results else [])


def _assistant_message(message: MessageParam, where: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    turn: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    thoughts: list[str] = []
    for place, block in enumerate(message.content):
        own, kind = f"{where}[{place}]", block.get("type")
        if kind == "thinking":
            thoughts.append(field_text(block, "thinking", own))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise InvalidRequestError(f"{own}.input must be an object.", f"{own}.input")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": field_text(block, "name", own), "arguments": arguments}
            call = {"id": field_text(block, "id", own), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(_text_block(block, own)["text"])
    if texts or "tool_calls" not in turn:
        turn["content"] = "".join(texts)
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return [turn]


def _texts(content: Any, where: str) -> str | list[Block]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequestError(f"{where} must be a text or a list of text blocks.", where)
    return [_text_block(block, f"{where}[{place}]") for place, block in enumerate(content)]


def _text_block(block: Block, where: str) -> Block:
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": field_text(source, "data", f"{where}.source")}
    if kind in _MEDIA:
        remedy = "send what it shows as a text block in its place, or leave it out"
        raise InvalidRequestError(f"{where}: this model takes no {kind}s, only text; {remedy}.", where)
    if kind != "text":
        raise InvalidRequestError(f"{where}: blocks of the type {kind!r:.80} are not there, or not here.", where)
    return {"type": "text", "text": field_text(block, "text", where)}


def _tool(tool: Block, place: int) -> dict[str, Any]:
    where = f"tools[{place}]"
    if (kind := tool.get("type", "custom")) not in ("custom", None):
        raise InvalidRequestError(f"{where}: tools of the type {kind!r:.80} are not there, only your own.", where)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequestError(f"{where}.input_schema must be an object.", f"{where}.input_schema")
    function = {"name": field_text(tool, "name", where), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Block) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": field_text(choice, "name", "tool_choice")}}
    if kind not in tuple(_CHOICES):  # it may be anything
        raise wrong("tool_choice.type", "auto, any, tool or none", kind)
    return _CHOICES[kind]


def _format(given: Any) -> dict[str, Any]:
    if not (isinstance(given, dict) and given.get("type") == "json_schema" and isinstance(given.get("schema"), dict)):
        message = "output_config.format must have the type json_schema, and a schema."
        raise InvalidRequestError(message, "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"], "strict": True}}
