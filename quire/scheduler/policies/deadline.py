"""Earliest deadline first, for targets of the time to first token (TTFT) and per output token (TPOT).

What can't be met at the measured pace is refused when it comes, and not after it has waited. Registered in
`quire.scheduler.policies.registry`.
"""

import math
from collections import Counter
from collections.abc import Callable

from quire.config.scheduler import PolicyOptions
from quire.errors import OverloadedError
from quire.protocol.requests import NewRequest
from quire.scheduler.policies.base import Key, Load, Policy, Prompt
from quire.scheduler.policies.pace import Pace

_PATIENCE = 60.0  # seconds: the place, not the promise, of a request without a target
_LEAST_PREFILL = 32  # tokens of a step that no TPOT target takes from prompts, so that everybody gets on


class EarliestDeadline(Policy):
    """Requests run by when their first token is due: arrival plus TTFT target, their own or the engine's.

    A request without a target is due a minute after its arrival, is never refused, and is the only kind that may be
    pushed out, by one that has a target and is due earlier. As deadlines count from arrival nobody starves: who comes
    later than a request's deadline can't come before it.

    TPOT targets bound the tokens of a step: prompts share with those that decode only what the strictest target of
    all that live leaves of a step's time, at the pace measured. Until a few steps were measured, nothing is refused.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._pace = Pace()
        self._tpot_targets: Counter[float] = Counter()  # of live requests

    # The order.

    def key(self, request: NewRequest, order: int) -> Key:
        """When the first token is due, then the order of add."""
        return (self._due(request), order)

    def preempts(self, waiting: NewRequest, running: NewRequest) -> bool:
        """A request with a target that is due earlier pushes out one without."""
        has_target = self._ttft_target(waiting) is not None
        return has_target and self._ttft_target(running) is None and self._due(waiting) < self._due(running)

    def budget(self, limit: int, num_running: int) -> int:
        """What the strictest TPOT target leaves."""
        if not self._tpot_targets or not self._pace.is_known:
            return limit
        return int(min(limit, max(self._pace.tokens(min(self._tpot_targets)), num_running + _LEAST_PREFILL)))

    # What happens.

    def check(self, request: NewRequest, now: float, load: Callable[[], Load]) -> None:
        """Refuse what would miss its own targets, or make others miss theirs."""
        ttft, tpot = self._ttft_target(request), self._tpot_target(request)
        if not self._pace.is_known or (ttft is None and tpot is None):
            return
        found = load()
        num_others = min(len(found.tokens_left), found.num_seats - 1)
        if tpot is not None and (step := self._pace.seconds(num_others + 1)) > tpot:
            raise _refusal(
                f"its tokens would come {step:.3g} s apart with {num_others} other sequences running, "
                f"and tpot_target is {tpot:g} s",
                self._seconds_until_seat(found, 1 + found.num_seats - num_others, 0),
            )
        if ttft is not None:
            self._check_first_tokens(request, now, found)

    def on_added(self, request: NewRequest, lane_waits: bool, lowest_rank: float | None) -> None:
        """Its TPOT target holds from now on."""
        if (target := self._tpot_target(request)) is not None:
            self._tpot_targets[target] += 1

    def on_ended(self, request: NewRequest) -> None:
        """Its TPOT target holds no more."""
        if (target := self._tpot_target(request)) is not None:
            self._tpot_targets -= Counter([target])  # one that nobody has any more goes

    def on_step(self, num_tokens: int, seconds: float) -> None:
        """Measure."""
        self._pace.observe(num_tokens, seconds)

    def explain(self, request: NewRequest, first: NewRequest) -> str:
        """By when first tokens are due."""
        due, what = self._due(request), "it has no ttft_target, and is due"
        if self._ttft_target(request) is not None:
            what = "its first token is due"
        after_first = due - self._due(first)
        return f"{what} {due - request.arrival_time:.3g} s after its arrival, and {after_first:.3g} s after the first"

    # Targets and forecasts.

    def _ttft_target(self, request: NewRequest) -> float | None:
        return self.options.ttft_target if request.ttft_target is None else request.ttft_target

    def _tpot_target(self, request: NewRequest) -> float | None:
        return self.options.tpot_target if request.tpot_target is None else request.tpot_target

    def _due(self, request: NewRequest) -> float:
        target = self._ttft_target(request)
        return request.arrival_time + (_PATIENCE if target is None else target)

    def _check_first_tokens(self, request: NewRequest, now: float, load: Load) -> None:
        """Look at its own first token, and at those of requests that it would come before."""
        own = Prompt(request, len(request.prompt_token_ids), runs=False)
        place = sum(self._due(prompt.request) <= self._due(request) for prompt in load.prompts)
        num_tokens = sum(prompt.num_tokens for prompt in load.prompts[:place])
        num_seats = sum(not prompt.runs for prompt in load.prompts[:place])
        for prompt in [own, *load.prompts[place:]]:
            num_tokens += prompt.num_tokens
            num_seats += not prompt.runs
            late = self._late(prompt, now, load, num_tokens, num_seats)
            if late <= 0.0 or self._ttft_target(prompt.request) is None:
                continue
            if prompt is own:
                raise _refusal(
                    f"its first token would come {self._due(request) + late - request.arrival_time:.3g} s after its "
                    f"arrival, behind {num_tokens - own.num_tokens} tokens of other prompts and "
                    f"{len(load.tokens_left)} running sequences, and ttft_target is {self._ttft_target(request):g} s",
                    late,
                )
            if self._late(prompt, now, load, num_tokens - own.num_tokens, num_seats - 1) <= 0.0:
                reason = f"its prompt of {own.num_tokens} tokens would make one that was taken before {late:.3g} s late"
                raise _refusal(reason, late)

    def _late(self, prompt: Prompt, now: float, load: Load, num_tokens: int, num_seats: int) -> float:
        """Seconds by which a first token misses its target, if so many tokens of prompts and seats go up to it."""
        seconds = self._seconds(num_tokens, load, num_seats)
        if not prompt.runs and (until := self._seconds_until_seat(load, num_seats, num_tokens - prompt.num_tokens)):
            seconds = max(seconds, until + self._seconds(prompt.num_tokens, load, num_seats))
        return now + seconds - self._due(prompt.request)

    def _seconds(self, num_tokens: int, load: Load, num_seats: int) -> float:
        """Until so many tokens of prompts are computed beside what runs and will."""
        num_decoding = min(len(load.tokens_left) + num_seats - 1, load.num_seats - 1)
        budget = self.budget(load.budget, num_decoding)
        num_steps, rest = divmod(num_tokens, max(budget - num_decoding, 1))
        return num_steps * self._pace.seconds(budget) + (self._pace.seconds(rest + num_decoding) if rest else 0.0)

    def _seconds_until_seat(self, load: Load, place: int, num_tokens: int) -> float:
        """Until the place-th next seat is free, beside so many tokens of prompts, if nobody ends before it must."""
        num_running = len(load.tokens_left)
        num_short = place - max(load.num_seats - num_running, 0)
        if num_short <= 0 or not num_running:
            return 0.0
        rounds, last = divmod(num_short - 1, num_running)
        num_steps = rounds * load.tokens_left[-1] + load.tokens_left[last]
        per_step, fixed = self._pace.seconds(num_running), self._pace.seconds(0)
        return num_steps * per_step + self._pace.seconds(num_tokens) - fixed


def _refusal(reason: str, seconds: float) -> OverloadedError:
    return OverloadedError(
        f"the request is refused now rather than answered late: {reason}. Try again later, or give it more time.",
        max(1, math.ceil(min(seconds, 3600.0))),
    )
