"""The dialect of /v1/messages: Anthropic's blocks in, its message object and its events out.

`EventService` calls it. The conversation is read as a chat's (`through_chat`).
"""

import json
import uuid
from typing import Any

from quire.entrypoints.server.dialects.chat import ChatWriter
from quire.entrypoints.server.dialects.messages_input import chat_fields
from quire.entrypoints.server.dialects.through_chat import read_through_chat, within_context
from quire.entrypoints.server.errors import ErrorInfo, anthropic_error
from quire.entrypoints.server.event_service import Event, EventWriter
from quire.entrypoints.server.messages_request import ConversationRequest
from quire.entrypoints.server.parsers.base import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from quire.entrypoints.server.parsers.reader import is_object
from quire.entrypoints.server.service import Asked
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.turn import ContentEvent, Turn
from quire.entrypoints.server.unknown_fields import ignore
from quire.errors import InvalidRequestError

_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


async def read_message(state: ServerState, body: ConversationRequest, request_id: str) -> Asked["MessageWriter"]:
    """See `Read`."""
    model, fields = state.admit(body), chat_fields(body)
    if fields["continue_final_message"]:
        fields["add_generation_prompt"] = False

    async def read(limit: int | None) -> Asked[ChatWriter]:
        given = fields | {"max_completion_tokens": limit}
        try:
            return await read_through_chat(state, body, request_id, given, _NAMES)
        except InvalidRequestError as error:
            if error.param != "thinking.budget_tokens":
                raise
        # No bound that can be held, as where the model has no thoughts: Anthropic's is a target, too.
        ignore(body, "thinking.budget_tokens")
        given["thinking_token_budget"] = None
        return await read_through_chat(state, body, request_id, given, _NAMES)

    # More than the context has left is no error, but an end of its own kind.
    request, chat = await within_context(read, body.max_tokens, "max_tokens")
    is_capped = body.max_tokens is not None and request.params.max_tokens != body.max_tokens
    return request, MessageWriter(model, chat.turn, len(request.prompts[0].token_ids), is_capped)


class MessageWriter(EventWriter):
    """Writes one message. See `EventWriter`."""

    def __init__(self, model: str, turn: Turn, num_prompt_tokens: int, is_capped: bool) -> None:
        """`is_capped`: the context's end comes before that of the tokens asked for."""
        self.turn = turn
        self._num_prompt_tokens, self._is_capped = num_prompt_tokens, is_capped
        self._stem = uuid.uuid4().hex
        self._head = {"id": f"msg_{self._stem}", "type": "message", "role": "assistant", "model": model}
        self._content: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the block under way, which is the last
        self._pieces: list[str] = []

    def answer(self) -> dict[str, Any]:
        content = [dict(block) for block in self._content]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage()}

    def open(self) -> list[Event]:
        return [{"type": "message_start", "message": self.answer()}, {"type": "ping"}]

    def part(self, part: ContentEvent) -> list[Event]:
        match part:
            case TextDelta(text):
                return self._begin({"type": "text", "text": ""}) + [self._piece(text)]
            case ReasoningDelta(text):
                return self._begin({"type": "thinking", "thinking": "", "signature": ""}) + [self._piece(text)]
            case ToolCallStart():
                block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                return self._close_block() + self._begin(block)
            case ToolCallDelta():
                return [self._piece(part.arguments)]
            case ToolCallEnd():
                return self._close_block()

    async def close(self) -> list[Event]:
        events = [] if self._content else self._begin({"type": "text", "text": ""})
        events += self._close_block()
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [*events, end, {"type": "message_stop"}]

    def fail(self, error: ErrorInfo) -> list[Event]:
        return [anthropic_error(error)]

    def _usage(self) -> dict[str, Any]:
        num_input, num_output, num_cached = self.turn.counts()
        num_cached = num_cached or 0
        return {
            "input_tokens": (num_input or self._num_prompt_tokens) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
        }

    def _stop(self) -> dict[str, str | None]:
        """Why it ended, and the sequence that did it."""
        reason, sequence = None, None
        if self.finish is not None and self.finish.reason == "length":
            reason = "model_context_window_exceeded" if self._is_capped else "max_tokens"
        elif self.finish is not None:
            sequence = self.finish.stop_reason if isinstance(self.finish.stop_reason, str) else None
            reason, last = "end_turn" if sequence is None else "stop_sequence", self._content[-1]["type"]
            is_cut = sequence is not None and last == "tool_use" and not is_object("".join(self._pieces))
            if not is_cut and any(block["type"] == "tool_use" for block in self._content):
                reason, sequence = "tool_use", None
        return {"stop_reason": reason, "stop_sequence": sequence}

    # Blocks.

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        """The block of this kind that is under way, or a new one."""
        if self._open is not None and self._open["type"] == block["type"]:
            return []
        events = self._close_block()
        self._open, self._pieces = block, []
        self._content.append(block)
        return [*events, {"type": "content_block_start", "index": self._place, "content_block": dict(block)}]

    def _piece(self, text: str) -> Event:
        assert self._open is not None, "a piece belongs to a block"
        self._pieces.append(text)
        kind, field = _DELTAS.get(self._open["type"], ("input_json_delta", "partial_json"))
        return self._delta(type=kind, **{field: text})

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": self._place, "delta": delta}

    def _close_block(self) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        text, events = "".join(self._pieces), []
        if block["type"] == "tool_use":
            block["input"] = json.loads(text) if is_object(text) else {}  # none of a call that was cut
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":  # of no meaning here, but clients hand back what has one
            block["signature"] = self._stem
            events.append(self._delta(type="signature_delta", signature=self._stem))
        return [*events, {"type": "content_block_stop", "index": self._place}]

    @property
    def _place(self) -> int:
        return len(self._content) - 1
