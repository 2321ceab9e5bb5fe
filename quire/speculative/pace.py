"""How many drafts: as many as pay, by what was accepted so far and what steps and drafts cost; often none.

The model runner asks it before drafts are made, and tells it what became of them and how long it all took. Trying what
may not pay is paid for by an account that has a small part of the time, so that bad drafts cost no more than that. Its
choice changes how fast tokens come and never which. It knows no model and reads no clock.
"""

from collections.abc import Sequence

from quire.config.draft_tree import DraftTree
from quire.speculative.base import DraftedSequence, Proposer

_DECAY = 0.95  # of what is known of a sequence, each time that its drafts are verified
_SLOW_DECAY = 0.98  # of what is known of all
_PRIOR_WEIGHT = 4.0  # trials that the rate of all counts for, of a sequence
_FIRST_RATE = 0.6
_GAIN = 1.1  # what drafts must promise: figures are not exact
_READER_GAIN = 1.3  # of those that read all steps: what this costs comes and goes with them
_PATIENCE = 8  # steps without drafts before one is tried again; doubled each time that it fails
_READER_PATIENCE = 64
_MOST_PATIENCE = 128
_LOSS = 0.01  # of the time of plain decoding may be spent in vain
_MOST_SAVED = 1.5  # steps that the account holds at most
_MOST_OWED = 4.0  # steps in vain after which nothing is drafted for a while
_BESIDE = 4e-5  # seconds that drafts cost the host beside making them, at first
_SHARED = 3  # rows with drafts cost that as many do, besides each itself
_NEAR = 8  # tokens that a proposer has missed count as read along with the next ones; more are an investment
_HORIZON = 8  # steps, and as many as a sequence has had, for which an investment may be expected to bear fruit
_LEVELS = 32  # of acceptance: rows of one level are treated alike
_HOPE = 28  # the level that drafts may turn out to have
_REMEMBERED_STEPS = 64  # for which a choice is kept
_DRIFT = 1.02  # by which measured times move towards a new one: they follow its median
_SHAPE_STEPS = 8  # of which one changes what is known of its own size alone
_NUM_KNOWN = 6  # steps before drafts that a proposer which reads all of them must have read
_MOST_REST = 64  # steps after which a choice of no drafts is made anew


class StepCosts:
    """Seconds of a step by its number of tokens, between the sizes that were measured on straight lines.

    Args:
        seconds: by number of tokens, of two sizes at least.
        host: what a step costs besides, whatever is in it; an attribute, too.
    """

    def __init__(self, seconds: dict[int, float], host: float = 0.0) -> None:
        self.host = host
        self._measured = dict(seconds)
        self._factor = 1.0
        self._num_followed = 0
        self._known: dict[int, float] = {}

    def __call__(self, num_tokens: int) -> float:
        if (found := self._known.get(num_tokens)) is None:
            sizes = sorted(self._measured)
            last = next((i for i, size in enumerate(sizes) if size >= num_tokens and i), len(sizes) - 1)
            low, high = sizes[last - 1], sizes[last]
            seconds = self._measured
            slope = (seconds[high] - seconds[low]) / (high - low)
            found = max(seconds[high] + slope * (num_tokens - high), seconds[sizes[0]])
            self._known[num_tokens] = found
        return self.host + self._factor * found

    def follow(self, slower: bool) -> None:
        """All steps take more, or less, than is known: that changes by much at first, then it follows the median."""
        self._num_followed += 1
        drift = _DRIFT + 0.5 / self._num_followed
        self._factor *= drift if slower else 1 / drift

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step took so long: all sizes follow at once, as machine and context change, and this one now and then."""
        known = self(num_tokens) - self.host
        self.follow(seconds > known)
        if self._num_followed % _SHAPE_STEPS == 0:
            drift = _DRIFT if seconds > known else 1 / _DRIFT
            self._measured[num_tokens] = self._known[num_tokens]
            for size in self._measured:  # larger ones with it: what comes on top of this one is not known better now
                self._measured[size] *= drift if size >= num_tokens else 1.0
            self._known.clear()


class Acceptance:
    """How often drafts are accepted, of those whose turn comes; the recent ones count most."""

    __slots__ = ("_accepted", "_trials", "drafted_at", "patience")

    def __init__(self, patience: int, now: int) -> None:
        self._accepted = self._trials = 0.0
        self.drafted_at, self.patience = now, patience

    def observe(self, num_drafts: int, num_accepted: int, decay: float) -> None:
        self._accepted = self._accepted * decay + num_accepted
        self._trials = self._trials * decay + num_accepted + (num_accepted < num_drafts)

    def rate(self, prior: float) -> float:
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._trials + _PRIOR_WEIGHT)


class Pace:
    """Chooses the number of drafts of each sequence for the next step.

    Args:
        costs: of steps of the model.
        drafting: of steps of what drafts: of so many rows, each round; what it must read first counts as rows, too.
        has_rounds: drafts of a row are made one after another, each at that price; else all at once.
        tree: the shape of the drafts, where they are no chain: then so many levels of it are chosen.
        reads_all: what drafts reads all steps, which costs while it may draft.

    Attributes:
        num_resting: steps to come after which nobody will have drafts, if they are like those before.
    """

    def __init__(
        self,
        costs: StepCosts,
        drafting: StepCosts,
        has_rounds: bool = False,
        tree: DraftTree | None = None,
        reads_all: bool = False,
    ) -> None:
        self.costs = costs
        self._tree = tree
        self.drafting = drafting
        self._has_rounds = has_rounds
        self._patience = _PATIENCE  # of who comes new
        self._now = 0  # steps
        self._tries = True  # after that rest
        self.num_resting = 0
        self._gain, self._least_patience = (_READER_GAIN, _READER_PATIENCE) if reads_all else (_GAIN, _PATIENCE)
        self._all = {greedy: Acceptance(_PATIENCE, 0) for greedy in (True, False)}  # drafts of these agree more often
        self._account = costs(1)  # seconds
        self._num_scheduled = 1
        self._token_seconds = costs(1)  # of plain decoding
        self._choices: dict[tuple[int, ...], tuple[dict[int, int], bool]] = {}  # of late, by batch and levels
        self._num_invested = 0  # tokens to be read before the next drafts, which later ones are to pay for
        self._drafts_beside = _BESIDE  # seconds of the host, for a row alone

    def observe(self, row: DraftedSequence, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified."""
        if (found := row.acceptance) is None:
            found = row.acceptance = Acceptance(self._patience, self._now)
        found.observe(num_drafts, num_accepted, _DECAY)
        self._all[row.greedy].observe(num_drafts, num_accepted, _SLOW_DECAY)
        self._account += num_accepted * self._token_seconds

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, each of them sampled, took so long."""
        self.costs.learn(num_tokens, seconds)

    def learn_host(self, seconds: float, num_rows: int) -> None:
        """Beside computing and drafting, a step whose rows got drafts, so many of them, took so long."""
        if num_rows:
            more = seconds - self.costs.host > self._beside_drafts(num_rows)
            self._drafts_beside *= _DRIFT if more else 1 / _DRIFT
        else:
            self.costs.host *= _DRIFT if seconds > self.costs.host else 1 / _DRIFT

    def drafted(self, counts: Sequence[int], num_read: int, seconds: float) -> None:
        """Rows that were chosen got so many drafts, for which so many tokens were read first, in so much time."""
        depth = max(counts) or 1
        if self._tree is not None:
            depth = self._tree.depths[depth - 1]
        seconds += self._beside_drafts(len(counts))
        self.drafting.follow(seconds > self._making(len(counts), depth, num_read))
        num, plain = self._num_scheduled, self._token_seconds * self._num_scheduled
        making = self._making(len(counts), depth, num_read - self._num_invested)
        self._account -= min(making, seconds) + self.costs(num + sum(counts)) - plain
        self._account = max(self._account, -2 * _MOST_OWED * plain)

    def rests(self, num_scheduled: int) -> bool:
        """Whether nobody is to have drafts after this step of so many sequences, and `choose` need not be asked."""
        if not self.num_resting or num_scheduled != self._num_scheduled:
            self.num_resting = 0
            return False
        self.num_resting -= 1
        self._now += 1
        self._account += _LOSS * self._token_seconds * num_scheduled
        return True

    def must_know(self, num_scheduled: int) -> bool:
        """Whether a step of so many sequences is one that drafts may soon have to go on from."""
        return num_scheduled != self._num_scheduled or (self._tries and self.num_resting < _NUM_KNOWN)

    def is_told(self, is_resting: bool, is_read: bool, has_more: bool) -> bool:
        """Whether it is to learn what a step takes; one that `has_more` than a token of each sequence is no plain one.

        Reading makes plain steps longer than they need be; at rest one is enough to know of, before reading begins.
        """
        return self.num_resting == _NUM_KNOWN + 2 if is_resting else not is_read or has_more

    def wake(self) -> None:
        """Something is new: the next choice may be another one."""
        self.num_resting = 0

    def choose(
        self, rows: Sequence[DraftedSequence], num_scheduled: int, most: int, proposer: Proposer | None = None
    ) -> bool:
        """Set `max_drafts` of each row: those drafts of all that make the most tokens a second, at most `most` of one.

        `num_scheduled`: sequences of the step, which will have a token each in the next one.

        Returns:
            Whether there are to be any.
        """
        if self._tree is not None:
            most = self._tree.max_depth
        plain = self.costs(num_scheduled)
        self._num_scheduled, self._token_seconds = num_scheduled, plain / num_scheduled
        self._account = min(self._account + _LOSS * plain, _MOST_SAVED * plain)
        greedy, drawn = self._all[True].rate(_FIRST_RATE), self._all[False].rate(_FIRST_RATE)
        levels: list[int] = []
        for row in rows:
            rate = greedy if row.greedy else drawn
            if row.acceptance is None:
                row.acceptance = Acceptance(self._patience, self._now)
            levels.append(int(row.acceptance.rate(rate) * _LEVELS + 0.5))
        if self._now % _REMEMBERED_STEPS == 0:
            self._choices.clear()
        key = (num_scheduled, most, *sorted(levels))
        if (found := self._choices.get(key)) is None:
            hopes = [max(level, _HOPE) for level in levels]
            several = [self._best(each, num_scheduled, most) for each in (levels, hopes)]
            found = self._choices[key] = several[0], bool(several[1])
        best, pays = found if self._account > -_MOST_OWED * plain else ({}, found[1])
        self._num_invested, wait, self._now = 0, _MOST_REST, self._now + 1
        for row, level in zip(rows, levels, strict=True):
            count = best.get(level, 0)
            if not count:
                waits = self._waits(row, level, num_scheduled, proposer) if pays else _MOST_REST
                wait, count = min(wait, waits), int(not waits)
            elif proposer is not None and (missed := proposer.num_behind(row)) > _NEAR:
                count = count if self._pays_reading(row, level / _LEVELS, count, missed) else 0
                self._num_invested += missed if count else 0
            if best.get(level, 0):
                row.acceptance.patience = self._patience = self._least_patience
            row.max_drafts = self._num_drafts(count)
            if count:
                row.acceptance.drafted_at, wait = self._now, 0
        self.num_resting, self._tries = max(0, wait - 1), wait < _MOST_REST
        return not wait

    def _best(self, levels: Sequence[int], num_scheduled: int, most: int) -> dict[int, int]:
        """How many drafts, of a tree levels, the rows of each level of acceptance get."""
        chances: list[tuple[float, int]] = []  # that a draft is accepted, and the level of whose it is
        for level in set(levels):
            rate = chance = min(level / _LEVELS, 0.995)
            for _ in range(most):
                chances.append((chance, level))
                chance *= rate
        chances.sort(reverse=True)
        speed = num_scheduled / self.costs(num_scheduled) * self._gain
        counts: dict[int, int] = {}
        best: dict[int, int] = {}
        tokens = float(num_scheduled)
        num = num_rows = depth = 0
        for chance, level in chances:
            num_here, count = levels.count(level), counts.get(level, 0) + 1
            counts[level] = count
            num_rows += num_here if count == 1 else 0
            depth = max(depth, count)
            tokens += chance * num_here
            num += num_here * (self._num_drafts(count) - self._num_drafts(count - 1))
            seconds = self.costs(num_scheduled + num) + self._making(num_rows, depth, num_rows)
            if tokens > speed * seconds:
                speed, best = tokens / seconds, counts.copy()
        return best

    def _num_drafts(self, depth: int) -> int:
        """Drafts of a row that reach so far."""
        return depth if self._tree is None else self._tree.num_within(depth)

    def _making(self, num_rows: int, depth: int, num_read: int) -> float:
        """What it costs to draft for so many rows, at most `depth` tokens for each."""
        rounds = (depth - 1) * self.drafting(num_rows) if self._has_rounds else 0.0
        return self.drafting(max(num_rows, num_read)) + rounds + self._beside_drafts(num_rows)

    def _beside_drafts(self, num_rows: int) -> float:
        """What it costs the host that so many rows have drafts."""
        return self._drafts_beside * (_SHARED + num_rows) / (_SHARED + 1)

    def _pays_reading(self, row: DraftedSequence, rate: float, count: int, missed: int) -> bool:
        """Whether reading what was missed is likely to pay, if there are as many steps to come as there have been."""
        gain = sum(rate**i for i in range(1, count + 1)) * self._token_seconds - self._making(1, count, 1)
        gain -= self.costs(self._num_scheduled + self._num_drafts(count)) - self.costs(self._num_scheduled)
        return self.drafting(missed) < max(self._account, 0.0) + gain * max(_HORIZON, row.tokens.position)

    def _waits(self, row: DraftedSequence, level: int, num_scheduled: int, proposer: Proposer | None) -> int:
        """Steps until one that goes without is to have a draft, or nothing would ever be learnt of it; 0: now."""
        found: Acceptance = row.acceptance
        if (wait := found.drafted_at + found.patience - self._now) > 0:
            return wait
        missed = 1 if proposer is None else proposer.num_behind(row)
        verifying = self.costs(num_scheduled + self._num_drafts(1)) - self.costs(num_scheduled)
        plain = self._token_seconds * num_scheduled
        price = verifying + self._making(1, 1, missed)
        if price > (_MOST_OWED if 2 * level >= _LEVELS else _MOST_SAVED) * plain:
            return _MOST_REST
        if (lacking := min(price, _MOST_SAVED * plain) - self._account) > 0:
            return 1 + int(lacking / (_LOSS * plain))
        found.patience = min(2 * found.patience, _MOST_PATIENCE)
        self._patience = max(self._patience, found.patience)
        return 0
