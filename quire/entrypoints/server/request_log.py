"""A line of the log for each request that goes to the engine, where the operator asked for that: its prompts are in it.

The services call it. What comes from a client is quoted, so that it can't write lines of its own.
"""

import logging
from collections.abc import Callable
from functools import partial

from quire.entrypoints.server.options import ServerArgs
from quire.entrypoints.server.service import TurnRequest
from quire.utils.logs import quoted

logger = logging.getLogger("quire")

_MOST_PROMPTS = 100  # of one request


def request_log(args: ServerArgs) -> Callable[[TurnRequest], None] | None:
    """What notes requests; None where the server is not to."""
    return partial(_note, longest=args.max_log_len) if args.enable_log_requests else None


def _note(request: TurnRequest, longest: int | None) -> None:
    for prompt in request.prompts[:_MOST_PROMPTS]:
        if prompt.text is None:
            shown = f"token ids {prompt.token_ids[:longest]}"
        else:
            shown = quoted(prompt.text, len(prompt.text) if longest is None else longest)
        logger.info(
            "request %s: %d prompt tokens: %s; %s",
            quoted(request.request_id),
            len(prompt.token_ids),
            shown,
            quoted(repr(request.params), 4000)[1:-1],
        )
    if (num_more := len(request.prompts) - _MOST_PROMPTS) > 0:
        logger.info("request %s: %d more prompts", quoted(request.request_id), num_more)
