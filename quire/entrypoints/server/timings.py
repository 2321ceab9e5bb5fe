"""Where the time of a request went, told in its answer where that was asked for: `timings`, in llama.cpp's names.

The dialects of completions and chat call it when all is done.
"""

from msgspec import UNSET, Struct, UnsetType

from quire.entrypoints.server.turn import Turn

_LEAST = 1e-6  # seconds, to divide by


class Timings(Struct):
    """Times are in milliseconds. Prompts that were sent together are one: first arrival to last end."""

    queue_ms: float  # until something of it was computed
    cache_n: int  # tokens of the prompt that were in the prefix cache
    prompt_n: int  # and those that were computed
    prompt_ms: float  # from then on until the first token was drawn
    prompt_per_second: float
    predicted_n: int  # tokens drawn
    predicted_ms: float  # from then on
    predicted_per_second: float


def timings_of(turn: Turn, asked: bool | None = True) -> Timings | UnsetType:
    """Of a turn once it has ended; UNSET before, where nobody `asked`, and where the engine keeps no times."""
    if not asked or turn.num_unfinished:
        return UNSET
    kept = [output.metrics for output in turn.outputs]
    ended = [(times, times.finished_time) for times in kept if times is not None and times.finished_time is not None]
    if not ended or len(ended) < len(kept):
        return UNSET
    arrival, end = min(times.arrival_time for times, _ in ended), max(end for _, end in ended)
    start = min(times.first_scheduled_time or times.arrival_time for times, _ in ended)
    first = min(times.first_token_time or end for times, end in ended)
    num_cached = sum(output.num_cached_tokens or 0 for output in turn.outputs)
    num_prompt, num_output, _ = turn.counts()
    prompt, output = first - start, end - first
    return Timings(
        queue_ms=1e3 * (start - arrival),
        cache_n=num_cached,
        prompt_n=num_prompt - num_cached,
        prompt_ms=1e3 * prompt,
        prompt_per_second=(num_prompt - num_cached) / max(prompt, _LEAST),
        predicted_n=num_output,
        predicted_ms=1e3 * output,
        predicted_per_second=num_output / max(output, _LEAST),
    )
