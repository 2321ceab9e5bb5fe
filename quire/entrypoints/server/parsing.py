"""How a request's answer will be read, and what holds the model to it: parsers by option and model, and a grammar.

Dialects call `plan_parsing` once the prompt is written. A request without tools, to a model whose thoughts are not to
be told apart, gets back what it brought.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from quire.entrypoints.server.chat_request import ChatCompletionRequest
from quire.entrypoints.server.parsers import harmony
from quire.entrypoints.server.parsers.base import Offer, Parser
from quire.entrypoints.server.parsers.forms import Form
from quire.entrypoints.server.parsers.generic import JSON_CALLS, json_arguments, learned_form
from quire.entrypoints.server.parsers.grammars import Answer, Thought, answer_grammar
from quire.entrypoints.server.parsers.reader import Reader, ScriptParser
from quire.entrypoints.server.parsers.registry import THOUGHT_FORMS, TOOL_FORMS, thought_format, tool_format
from quire.entrypoints.server.parsers.thoughts import ThoughtForm
from quire.entrypoints.server.prompts import conversation_text, template_of
from quire.entrypoints.server.state import ServerState
from quire.errors import InvalidRequestError, QuireError
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire.text.conversation import Conversation
from quire.text.grammars.compose import after
from quire.text.renderer import Renderer
from quire.text.tokenizer import Tokenizer

_BUDGET = "thinking_token_budget"
_MOST_LEARNED = 64  # formats of chat templates that are kept: clients may send some


class NoFormatError(InvalidRequestError):
    """The model may choose to call tools, and could not be understood."""


@dataclass(frozen=True)
class Parsing:
    """What to ask the engine for, and what makes a parser for each choice."""

    params: SamplingParams
    make_parser: Callable[[], Parser] = Parser
    names: dict[str, str] = field(default_factory=dict)  # what the engine's parameters are called in the body


def plan_parsing(
    state: ServerState, prompt: str, params: SamplingParams, offer: Offer | None, body: ChatCompletionRequest
) -> Parsing:
    """How the answer to a prompt is read.

    Args:
        offer: the request's tools; None: it has none.
        body: the request, for the bound of its thought, and the chat template that it brought.

    Raises:
        NoFormatError: the model has no way to call tools that is known.
        InvalidRequestError: it has no thoughts to bound, or there can be no grammar for what is asked.
    """
    template = template_of(state, body.chat_template, offer and offer.functions)
    budget = None if body.thinking_token_budget == -1 else body.thinking_token_budget
    thought_name = thought_format(state.args.reasoning_parser, template)
    thoughts = None if thought_name is None else THOUGHT_FORMS[thought_name]
    if budget is not None and thoughts is None:
        remedy = "leave it out, or start the server with --reasoning-parser"
        raise InvalidRequestError(f"{_BUDGET} needs a model whose thoughts are told apart; {remedy}.", _BUDGET)
    if offer is not None and (offer.choice == "none" or not offer.functions):
        offer = None
    form = None if offer is None else _form(state, template, offer)
    if thoughts is None and form is None:
        return Parsing(params)
    tokenizer = state.llm.tokenizer
    assert tokenizer is not None, "there is a template"
    tokens, hidden = _tokens(tokenizer, (thoughts.marks if thoughts else ()) + (form.marks if form else ()))
    if budget is not None and thoughts and not any(thoughts.closes[0].startswith(mark) for mark in tokens):
        end = f"{thoughts.closes[0]!r}, the end of a thought, begins with a token of its own"
        raise InvalidRequestError(f"{_BUDGET} needs a model for which {end}; leave it out.", _BUDGET)
    thought = _thought(thoughts, prompt, budget, state.llm.config.model.eos_token_ids)
    asked = Answer(params.structured_outputs, offer, form and form.frame_for(template), thought)
    changes, names = dict[str, Any](), dict[str, str]()
    if (constraint := _constraint(asked, tokens)) is not None:
        changes["structured_outputs"] = constraint
        if params.structured_outputs is None:
            names["structured_outputs"] = "tools" if offer else _BUDGET
    if hidden:
        changes["skip_special_tokens"] = False
    script = Reader.text if form is None else form.script
    if thoughts is harmony.THOUGHTS or form is harmony.FORM:
        script = harmony.script
    elif thoughts is not None:
        script = thoughts.script(prompt, script)
    make = partial(ScriptParser, script, offer or Offer(), _new_id)
    return Parsing(msgspec.structs.replace(params, **changes) if changes else params, make, names)


async def warm_up(state: ServerState) -> None:
    """Have the process that writes conversations started, the template compiled and its format of calls known.

    The first chat does not wait for that then.
    """
    with suppress(QuireError):  # what prevents it, each chat is told
        await conversation_text(state, [{"role": "user", "content": "Hi"}], chat_template=None)
        await asyncio.to_thread(_known_form, state, template_of(state, None, [{}]))


def _form(state: ServerState, template: str, offer: Offer) -> Form:
    """The format of the request's calls.

    Raises:
        NoFormatError: none is known, and the model may choose.
    """
    if offer.choice == "auto" and not state.args.enable_auto_tool_choice:
        reason = "does not let the model choose whether it calls a tool (--no-enable-auto-tool-choice)"
        remedy = "Set tool_choice to 'none' or 'required', or name a function."
        raise NoFormatError(f"tools: this server {reason}. {remedy}", "tool_choice")
    if (form := _known_form(state, template)) is not None:
        return form
    if offer.choice == "auto":
        remedy = "Leave them out; or set tool_choice to 'required' or name a function, and a grammar holds the call; "
        remedy += "or start the server with --tool-call-parser."
        reason = "this model does not support tools: its chat template shows no format of calls that is known here"
        raise NoFormatError(f"tools: {reason}. {remedy}", "tools")
    return JSON_CALLS if offer.named is None else json_arguments(offer.named)


def _known_form(state: ServerState, template: str) -> Form | None:
    if (option := state.args.tool_call_parser) == "none":
        return None
    if option != "generic" and (name := tool_format(option, template)) is not None:
        return TOOL_FORMS[name]
    forms = state.learned_forms
    if template not in forms:
        while len(forms) >= _MOST_LEARNED:
            forms.pop(next(iter(forms)), None)  # which another thread may have done
        forms[template] = _learned(state.llm.tokenizer, template)
    return forms[template]


def _learned(tokenizer: Tokenizer | None, template: str) -> Form | None:
    assert tokenizer is not None, "there is a template"

    def render(messages: list[dict[str, Any]], tools: list[Any], opens: bool) -> str:
        asked = Conversation(messages=messages, chat_template=template, tools=tools, add_generation_prompt=opens)
        return renderer.render(asked.job(tokenizer))

    with suppress(QuireError), closing(Renderer()) as renderer:  # its own, for another thread may learn another one
        return learned_form(render)
    return None


def _tokens(tokenizer: Tokenizer, marks: tuple[str, ...]) -> tuple[dict[str, int], bool]:
    """Those marks that are tokens of their own, with their ids, and whether text leaves any of them out."""
    found = {mark: id for mark in marks if (id := tokenizer.convert_tokens_to_ids(mark)) is not None}
    found = {mark: id for mark, id in found.items() if tokenizer.token_text(id) == mark}
    return found, any(not tokenizer.token_text(id, skip_special_tokens=True) for id in found.values())


def _constraint(asked: Answer, tokens: dict[str, int]) -> StructuredOutputsParams | None:
    """What the whole answer has to obey; None: what it had to obey before."""
    content, offer, thought = asked.content, asked.offer, asked.thought
    budget = None if thought is None else thought.budget
    holds_calls = offer is not None and (
        offer.choice == "required" or offer.closed or not offer.parallel or any(f.strict for f in offer.functions)
    )
    if not holds_calls and budget is None and (content is None or (offer is None and thought is None)):
        return None
    if (grammar := answer_grammar(asked, tokens)) is not None:
        try:
            return StructuredOutputsParams(grammar=grammar)
        except InvalidRequestError as error:  # too large
            message = str(error).replace("structured_outputs.grammar has", "the grammar of these tools has")
            raise InvalidRequestError(f"tools: {message}", "tools") from None
    assert content is not None, "any text can be part of a grammar"
    if offer is not None or budget is not None or thought is None:
        other = "tools" if offer is not None else _BUDGET
        remedy = "leave one of them out, or give the constraint as a JSON schema"
        message = f"{other} and a constraint of the kind {content.kind!r} can't go together; {remedy}."
        raise InvalidRequestError(message, other)
    return after(content, thought.closing, thought.opening, thought.answer, thought.optional)


def _thought(
    form: ThoughtForm | None, prompt: str, budget: int | None, eos_token_ids: tuple[int, ...]
) -> Thought | None:
    if form is None or (begun := form.begun(prompt)) is False:
        return None
    opening = "" if begun or form.assumed else form.opens[0]
    return Thought(opening, form.closes[0], form.answer, budget, eos_token_ids, optional=bool(opening))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
