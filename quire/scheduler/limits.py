"""What a request must satisfy to be able to run in this engine at all.

The scheduler asks before it takes a request, so that nothing waits for what can never be.
"""

from quire.config.scheduler import SchedulerConfig
from quire.errors import InvalidRequestError
from quire.inputs import prompt_too_long
from quire.kvcache.manager import KVManager
from quire.protocol.requests import NewRequest, SamplingTask


def check_request_fits(request: NewRequest, config: SchedulerConfig, kv: KVManager) -> SamplingTask:
    """Check a request's lengths against the context and the whole KV cache; returns what it asks for.

    Raises:
        InvalidRequestError: the prompt is empty, leaves no room for an output token, or prompt and output together
            don't fit in all KV blocks; or it asks for something else than tokens.
    """
    task = request.task
    if not isinstance(task, SamplingTask):
        raise InvalidRequestError("only sampling requests are served yet; pooling is not.", "task")
    num_prompt, limit = len(request.prompt_token_ids), config.max_model_len
    if not num_prompt:
        raise InvalidRequestError("the prompt is empty; it must have at least 1 token.", "prompt")
    if task.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {task.max_tokens}.", "max_tokens")
    if num_prompt >= limit:
        raise prompt_too_long(num_prompt, limit)
    # The last token that is sampled is never computed, so it takes no place.
    longest = min(num_prompt + task.max_tokens, limit) - 1
    if not kv.fits_ever(longest):
        num_needed = -(-longest // kv.block_size)
        raise InvalidRequestError(
            f"the request can never fit: {num_prompt} prompt tokens and max_tokens={task.max_tokens} need "
            f"{num_needed} KV blocks of {kv.block_size} tokens, and there are {kv.max_tokens_ever() // kv.block_size}. "
            "Shorten the prompt, lower max_tokens, or give the KV cache more memory.",
            "max_tokens",
        )
    return task
