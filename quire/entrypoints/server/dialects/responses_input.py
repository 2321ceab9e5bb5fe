"""What a request to /v1/responses brings, read: its items in the form in which they are kept and listed, and the chat
messages that they make. `read_response` calls it. Pure; a refusal names the item.
"""

import json
from collections.abc import Sequence
from typing import Any

from quire.entrypoints.server.requests_common import conversation_of, field_text, wrong
from quire.entrypoints.server.responses_request import ResponsesRequest, flat_name
from quire.entrypoints.server.unknown_fields import ignore
from quire.errors import InvalidRequestError

Item = dict[str, Any]
_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # part -> its field
_MEDIA = {"input_image": "images", "input_file": "files", "input_audio": "audio"}


def read_items(given: str | Sequence[Item], stem: str) -> list[Item]:
    """The items of an input, checked, each with an id and in the form in which OpenAI lists them.

    Args:
        stem: what new ids end in, before the item's place.

    Raises:
        InvalidRequestError: an item of a kind that is not there, or one that is malformed.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read_item(item, f"input[{place}]", f"{stem}i{place}") for place, item in enumerate(given)]


def _read_item(item: Item, where: str, stem: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    own_id = item.get("id") if isinstance(item.get("id"), str) else None
    of_call = {"type": kind, "id": own_id or f"fc_{stem}", "status": "completed"}
    match kind:
        case "message":
            return _read_message(item, where, own_id or f"msg_{stem}")
        case "function_call":
            names = ("call_id", "name", "arguments", *(["namespace"] if item.get("namespace") is not None else ()))
            return of_call | {name: field_text(item, name, where) for name in names}
        case "custom_tool_call":  # of a tool that takes a text: there are none here, but in a conversation's past
            arguments = json.dumps({"input": field_text(item, "input", where)}, ensure_ascii=False)
            return _read_item(item | {"type": "function_call", "arguments": arguments}, where, stem)
        case "function_call_output" | "custom_tool_call_output":
            call_id, output = field_text(item, "call_id", where), item.get("output")
            if not isinstance(output, str):
                output = _read_parts(output, f"{where}.output", "input_text")
            return of_call | {"type": "function_call_output", "call_id": call_id, "output": output}
        case "reasoning":
            read = {"type": kind, "id": own_id or f"rs_{stem}", "summary": _texts_of(item, "summary", where)}
            return read | {"content": _texts_of(item, "content", where)}
        case "item_reference":
            return {"type": kind, "id": field_text(item, "id", where)}
    raise InvalidRequestError(
        f"{where}: items of the type {kind!r} are not there; send messages, function_call, function_call_output, "
        "reasoning or item_reference.",
        where,
    )


def _read_message(item: Item, where: str, own_id: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    parts = _read_parts(content, f"{where}.content", "output_text" if role == "assistant" else "input_text")
    return {"type": "message", "id": own_id, "status": "completed", "role": role, "content": parts}


def _read_parts(content: Any, where: str, kind: str) -> list[Item]:
    """Parts of text, all of one kind."""
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequestError(f"{where} must be a text or a list of parts.", where)
    parts: list[Item] = []
    for place, part in enumerate(content):
        given = str(part.get("type"))  # it may be anything
        if given in _MEDIA:
            remedy = "send what it shows as text in its place, or leave it out"
            why = f"this model takes no {_MEDIA[given]}, only text; {remedy}."
            raise InvalidRequestError(f"{where}[{place}]: {why}", where)
        if given not in _TEXTS:
            raise InvalidRequestError(f"{where}[{place}]: parts of the type {given!r:.80} are not there.", where)
        text = field_text(part, _TEXTS[given], f"{where}[{place}]")
        extra = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        parts.append({"type": kind, "text": text, **extra})
    return parts


def _texts_of(item: Item, name: str, where: str) -> list[Item]:
    parts = item.get(name) or []
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        raise InvalidRequestError(f"{where}.{name} must be a list of parts with a text.", f"{where}.{name}")
    kind = "summary_text" if name == "summary" else "reasoning_text"
    return [{"type": kind, "text": part["text"]} for part in parts]


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation that items make; what an assistant thought, said and called goes into one message.

    Raises:
        InvalidRequestError: the output of a call that is not there.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    turn: dict[str, Any] | None = None  # the assistant's, open for more
    for item in [item for item in items if item["type"] != "reasoning" or item["content"] or item["summary"]]:
        kind = item["type"]
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            # A thought, or more text, begins another message.
            if turn is None or (kind != "function_call" and ("tool_calls" in turn or "content" in turn)):
                messages.append(turn := {"role": "assistant"})
            _add_to_turn(turn, item)
            continue
        turn = None
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
    for message in (message for message in messages if "reasoning_content" in message):
        message["reasoning_content"] = "\n".join(filter(None, message["reasoning_content"]))
    return conversation_of(messages, "input", "function_call", "function_call_output")


def without_oldest(items: Sequence[Item], num_out: int) -> list[Item]:
    """The items without so many of the oldest, but for what the system says, and without outputs of calls left out."""
    kept = [item for item in items[:num_out] if item.get("role") in ("system", "developer")] + list(items[num_out:])
    calls = {item["call_id"] for item in kept if item["type"] == "function_call"}
    return [item for item in kept if item["type"] != "function_call_output" or item["call_id"] in calls or not num_out]


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "reasoning":
        thought = "\n".join(part["text"] for part in item["content"] or item["summary"])
        turn.setdefault("reasoning_content", []).append(thought)
    elif item["type"] == "message":
        turn["content"] = _content(item["content"])
    else:
        function = {"name": flat_name(item), "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _content(content: str | list[Item]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    texts = [{"type": "text", "text": part["text"]} for part in content]
    return texts[0]["text"] if len(texts) == 1 else texts or ""


def chat_fields(body: ResponsesRequest) -> dict[str, Any]:
    """What a chat request says of tools, format and reasoning where this one does.

    Raises:
        InvalidRequestError: a tool or a format of a kind that is not there.
    """
    text, reasoning = body.text, body.reasoning
    return {
        "max_completion_tokens": body.max_output_tokens,
        "tools": None if body.tools is None else [_tool(tool, where) for where, tool in _usable_tools(body)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": None if text is None or text.format is None else _format(text.format),
        "verbosity": None if text is None else text.verbosity,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
        "include_reasoning": body.include_reasoning,
        "stream": True if body.wants_logprobs else None,  # piece by piece: they are the text's tokens only
        "logprobs": True if body.wants_logprobs else None,
        "top_logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
    }


def _usable_tools(body: ResponsesRequest) -> list[tuple[str, Item]]:
    """The functions, those of namespaces too, with their places: beside them, agents name all tools that they know.

    Where there is no function, all tools.
    """
    given: list[tuple[str, Item]] = []
    for place, tool in enumerate(body.tools or ()):
        where, inner, named = f"tools[{place}]", [tool], dict[str, Any]()
        if tool.get("type") == "namespace":
            inner, named = tool.get("tools"), {"namespace": field_text(tool, "name", where)}
            if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                raise wrong(f"{where}.tools", "a list of tools", inner, where)
        given += [(where, one | named) for one in inner]
    usable = [(where, tool) for where, tool in given if tool.get("type") == "function"] or given
    for where in sorted({where for where, _ in given} - {where for where, _ in usable}):
        ignore(body, where)
    return usable


def _tool(tool: Item, where: str) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise InvalidRequestError(f"{where}: tools of the type {kind!r:.80} are not there, only functions.", where)
    field_text(tool, "name", where)
    given, fields = tool | {"name": flat_name(tool)}, ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {f: given[f] for f in fields if given.get(f) is not None}}


def _tool_choice(choice: str | Item | None) -> Any:
    """As a chat has it, where what is allowed stands one level down; read there, and refused."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {"mode": "auto"} | choice}
    return choice


def _format(given: Item) -> Item:
    kind = given.get("type")
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        raise wrong("text.format.type", "text, json_object or json_schema", kind, "text.format")
    if not isinstance(schema := given.get("schema"), dict | bool | str):  # a chat has it one level down
        raise wrong("text.format.schema", "a JSON schema, right there", schema, "text.format")
    names = ("name", "description", "schema", "strict")
    return {"type": kind, kind: {name: given[name] for name in names if given.get(name) is not None}}
