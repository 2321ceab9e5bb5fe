"""What a request must satisfy to be able to run in this engine at all.

The scheduler asks before it takes a request, so that nothing waits for what can never be.
"""

from collections.abc import Container

from msgspec import structs

from quire.config.scheduler import SchedulerConfig
from quire.errors import InvalidRequestError, require
from quire.inputs import prompt_too_long
from quire.kvcache.manager import KVManager
from quire.protocol.requests import NewRequest, PoolingTask, SamplingTask

MAX_CANDIDATES = 16384  # of a beam in a step


def check_is_new(request_id: str, known: Container[str]) -> None:
    """InvalidRequestError where a request's id is among those in use."""
    if request_id in known:
        raise InvalidRequestError(f"request_id {request_id!r} is in use; choose another.", "request_id")


def check_request_fits(request: NewRequest, config: SchedulerConfig, kv: KVManager) -> SamplingTask:
    """Check a request's lengths against the context and the whole KV cache; returns what it asks for.

    Raises:
        InvalidRequestError: the prompt is empty, leaves no room for an output token, or prompt and output together
            (of all beams at once) don't fit in all KV blocks.
    """
    task = request.task
    num_prompt, limit = len(request.prompt_token_ids), config.max_model_len + isinstance(task, PoolingTask)
    if not num_prompt:
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token.", "prompt")
    require(task.max_tokens >= 1, "max_tokens", task.max_tokens, "at least 1")
    if num_prompt >= limit:
        raise prompt_too_long(num_prompt, limit)
    # The last token that is sampled is never computed, so it takes no place.
    longest = min(num_prompt + task.max_tokens, limit) - 1
    if longest > kv.max_tokens_ever():
        num_needed = -(-longest // kv.block_size)
        raise InvalidRequestError(
            f"the request can never fit: {num_prompt} prompt tokens and max_tokens={task.max_tokens} need "
            f"{num_needed} KV blocks of {kv.block_size} tokens, and there are {kv.max_tokens_ever() // kv.block_size}. "
            "Shorten the prompt, lower max_tokens, or give the KV cache more memory.",
            "max_tokens",
        )
    return _check_beams(task, num_prompt, longest, kv) if task.num_beams else task


def check_width(task: SamplingTask, config: SchedulerConfig) -> None:
    """Check that a new request's beams may run at once; one that there is goes on where the limit was lowered since.

    Raises:
        InvalidRequestError: there are more.
    """
    limit = min(config.max_num_seqs, config.max_num_batched_tokens)
    if task.num_beams > limit:
        param = _width_param(task)
        raise InvalidRequestError(
            f"{param} = {task.num_beams} beams are more than this engine runs at once, {limit} (max_num_seqs and "
            f"max_num_batched_tokens); lower {param}, or raise these.",
            param,
        )


def _width_param(task: SamplingTask) -> str:
    return "n" if task.params.best_of is None else "best_of"


def _check_beams(task: SamplingTask, num_prompt: int, longest: int, kv: KVManager) -> SamplingTask:
    """All beams must be able to run at once: they go on together. Returns the task, its length cut to the context."""
    width, param = task.num_beams, _width_param(task)
    if task.num_candidates > MAX_CANDIDATES:
        raise InvalidRequestError(
            f"{width} beams with {len(task.stop_token_ids)} tokens that end them need {task.num_candidates} candidates "
            f"each, and {MAX_CANDIDATES} is the most; lower {param}, or give fewer stop_token_ids.",
            param,
        )
    num_needed, num_blocks = kv.num_blocks_together(num_prompt, longest, width)
    if num_needed > num_blocks:
        raise InvalidRequestError(
            f"the request can never fit: {width} beams of {num_prompt} prompt tokens and max_tokens={task.max_tokens} "
            f"need up to {num_needed} KV blocks of {kv.block_size} tokens, and there are {num_blocks}. Lower {param} "
            "or max_tokens, shorten the prompt, or give the KV cache more memory.",
            "max_tokens",
        )
    return structs.replace(task, max_tokens=longest + 1 - num_prompt)
