"""How many drafts: as many as pay, by what was accepted so far and what a step of so many tokens costs; often none.

The model runner asks it before drafts are made, and tells it what became of them. Its choice follows from these numbers
alone, and changes how fast tokens come and never which. It knows no model and reads no clock.
"""

from collections.abc import Sequence

from quire.speculative.base import DraftedSequence

_DECAY = 0.9  # of what is known of a sequence, each time that its drafts are verified
_SLOW_DECAY = 0.98  # of what is known of all
_PRIOR_WEIGHT = 2.0  # trials that the rate of all counts for, of a sequence
_FIRST_RATE = 0.6
_GAIN = 1.04  # what drafts must promise: figures are not exact
_PATIENCE = 16  # steps without drafts before a few are tried again; doubled each time that they fail
_MOST_PATIENCE = 512


class StepCosts:
    """Seconds of a step by its number of tokens, between the sizes that were measured on straight lines.

    Args:
        seconds: by number of tokens, of two sizes at least.
        host: what a step costs besides, whatever is in it.
    """

    def __init__(self, seconds: dict[int, float], host: float = 0.0) -> None:
        self._sizes = sorted(seconds)
        self._seconds = [host + seconds[size] for size in self._sizes]
        self._known: dict[int, float] = {}

    def __call__(self, num_tokens: int) -> float:
        found = self._known.get(num_tokens)
        if found is None:
            sizes, seconds = self._sizes, self._seconds
            last = next((i for i, size in enumerate(sizes) if size >= num_tokens and i), len(sizes) - 1)
            slope = (seconds[last] - seconds[last - 1]) / (sizes[last] - sizes[last - 1])
            found = seconds[last] + slope * (num_tokens - sizes[last])
            self._known[num_tokens] = found = max(found, seconds[0])
        return found


class Acceptance:
    """How often drafts are accepted, of those whose turn comes; the recent ones count most."""

    __slots__ = ("_accepted", "_trials", "patience", "steps_without")

    def __init__(self, patience: int = _PATIENCE) -> None:
        self._accepted = self._trials = 0.0
        self.steps_without, self.patience = 0, patience

    def observe(self, num_drafts: int, num_accepted: int, decay: float) -> None:
        self._accepted = self._accepted * decay + num_accepted
        self._trials = self._trials * decay + num_accepted + (num_accepted < num_drafts)

    def rate(self, prior: float) -> float:
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._trials + _PRIOR_WEIGHT)


class Pace:
    """Chooses the number of drafts of each sequence for the next step.

    Args:
        costs: of steps of the model.
        draft_seconds: of one draft of one sequence; all drafts of a round cost it once.
    """

    def __init__(self, costs: StepCosts, draft_seconds: float = 0.0) -> None:
        self._costs = costs
        self._draft_seconds = draft_seconds
        self._all = Acceptance()
        # A draft model has all to read again that it has missed.
        self._patience = 4 * _PATIENCE if draft_seconds else _PATIENCE
        self._break_even: dict[tuple[int, int], float] = {}

    def observe(self, row: DraftedSequence, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified."""
        found = row.acceptance
        if found is None:
            found = row.acceptance = Acceptance(self._patience)
        found.observe(num_drafts, num_accepted, _DECAY)
        self._all.observe(num_drafts, num_accepted, _SLOW_DECAY)
        if num_accepted:
            found.patience = self._patience

    def choose(self, rows: Sequence[DraftedSequence], num_scheduled: int, most: int) -> None:
        """Set `max_drafts` of each row: those drafts of all that make the most tokens a second, at most `most` of one.

        `num_scheduled`: sequences of the step, which will have a token each in the next one.
        """
        prior = self._all.rate(_FIRST_RATE)
        rates = [prior if row.acceptance is None else row.acceptance.rate(prior) for row in rows]
        for row in rows:
            row.max_drafts = 0
        if max(rates) < self._least_rate(num_scheduled, most * len(rows)):
            self._try_again(rows)
            return
        chances: list[tuple[float, int]] = []  # that a draft is accepted, and whose it is
        for place, rate in enumerate(rates):
            chance = rate
            for _ in range(most):
                chances.append((chance, place))
                chance *= rate
        chances.sort(reverse=True)
        costs = self._costs
        best, num_best = num_scheduled / costs(num_scheduled) * _GAIN, 0
        tokens = float(num_scheduled)
        rounds = 0
        counts = [0] * len(rows)
        for num, (chance, place) in enumerate(chances, 1):
            tokens += chance
            counts[place] += 1
            rounds = max(rounds, counts[place])
            speed = tokens / (costs(num_scheduled + num) + rounds * self._draft_seconds)
            if speed > best:
                best, num_best = speed, num
        for _, place in chances[:num_best]:
            rows[place].max_drafts += 1
        if num_best < len(rows):
            self._try_again([row for row in rows if not row.max_drafts])

    def _least_rate(self, num_scheduled: int, most: int) -> float:
        """Below this no number of drafts, of at most so many in all, pays, even if all were first ones."""
        key = num_scheduled, most
        found = self._break_even.get(key)
        if found is None:
            costs = self._costs
            speed = num_scheduled / costs(num_scheduled) * _GAIN
            found = self._break_even[key] = min(
                (speed * (costs(num_scheduled + num) + self._draft_seconds) - num_scheduled) / num
                for num in range(1, most + 1)
            )
        return found

    def _try_again(self, rows: Sequence[DraftedSequence]) -> None:
        """Let one that has long gone without have a draft, or nothing would ever be learnt of it."""
        for row in rows:
            found = row.acceptance
            if found is None:
                found = row.acceptance = Acceptance(self._patience)
            found.steps_without += 1
            if found.steps_without >= found.patience:
                found.steps_without, found.patience = 0, min(2 * found.patience, _MOST_PATIENCE)
                row.max_drafts = 1
