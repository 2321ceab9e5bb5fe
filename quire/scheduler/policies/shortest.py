"""Shortest remaining first, with ageing: mean latency is lowest when what is soon done goes first.

Registered in `quire.scheduler.policies.registry`.
"""

from quire.config.scheduler import PolicyOptions
from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Key, Policy


class ShortestFirst(Policy):
    """Requests run by the tokens that they may still take, each second waited counting as `ageing_rate` tokens less.

    As all that wait age alike, what a request has to do plus `ageing_rate` times its arrival never changes and orders
    them at any time. It bounds starvation: only what arrives within (its tokens / ageing_rate) seconds after a request
    can come before it. Whoever waits has nothing computed, so that its prompt, with what it has drawn already, and the
    tokens that it may still draw always come to the same.

    What runs does a step's token at a time: the number of steps since the start, added when one is admitted, keeps the
    running ones in the order of what each has left. The longest goes when blocks run out; nobody pushes out anybody.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._num_steps = 0

    def key(self, request: NewRequest, order: int) -> Key:
        """Tokens to do, aged; then the order of add."""
        return (_num_tokens(request) + self.options.ageing_rate * request.arrival_time, order)

    def seat(self, request: NewRequest, key: Key) -> Key:
        """What is left to do, compared with those that have run for a while."""
        return (key[0] + self._num_steps, *key[1:])

    def on_step(self, num_tokens: int, seconds: float) -> None:
        """Whatever runs has a token less to do."""
        self._num_steps += 1

    def explain(self, request: NewRequest, first: NewRequest) -> str:
        """By what is left to do."""
        return (
            f"it may take {_num_tokens(request)} tokens, the first {_num_tokens(first)}, "
            f"and a second of waiting counts for {self.options.ageing_rate:g}"
        )


def _num_tokens(request: NewRequest) -> int:
    """Tokens to compute and to draw before a request has surely ended."""
    return len(request.prompt_token_ids) + request.task.max_tokens
