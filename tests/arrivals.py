"""Requests as an engine's observer hears of them when they come."""

from quire.engine.observer import Observer
from quire.protocol.requests import AdapterRef, NewRequest, SamplingTask
from quire.sampling_params import SamplingParams


def arrive(
    observer: Observer,
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int,
    n: int,
    now: float,
    adapter: str = "",
    kind: type[SamplingTask] = SamplingTask,
) -> None:
    """Tell of a request, with an adapter of this name, if any."""
    task = kind(params=SamplingParams(), max_tokens=max_tokens, stop_token_ids=frozenset(), seed=0)
    ref = AdapterRef(1, b"", adapter) if adapter else None
    ids = [1] * num_prompt_tokens
    observer.on_arrival(
        NewRequest(request_id=request_id, prompt_token_ids=ids, task=task, arrival_time=now, adapter=ref), n
    )
