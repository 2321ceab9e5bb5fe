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


def timings_of(turn: Turn) -> Timings | UnsetType:
    """Of a turn that has ended; UNSET where the engine keeps no times."""
    arrivals: list[float] = []
    starts: list[float] = []
    firsts: list[float] = []
    ends: list[float] = []
    for output in turn.outputs:
        if (times := output.metrics) is None or times.finished_time is None:
            return UNSET
        arrivals.append(times.arrival_time)
        starts.append(times.first_scheduled_time or times.arrival_time)
        firsts.append(times.first_token_time or times.finished_time)
        ends.append(times.finished_time)
    if not ends:
        return UNSET
    num_cached = sum(output.num_cached_tokens or 0 for output in turn.outputs)
    num_prompt, num_output, _ = turn.counts()
    prompt, output = min(firsts) - min(starts), max(ends) - min(firsts)
    return Timings(
        queue_ms=1e3 * (min(starts) - min(arrivals)),
        cache_n=num_cached,
        prompt_n=num_prompt - num_cached,
        prompt_ms=1e3 * prompt,
        prompt_per_second=(num_prompt - num_cached) / max(prompt, _LEAST),
        predicted_n=num_output,
        predicted_ms=1e3 * output,
        predicted_per_second=num_output / max(output, _LEAST),
    )
