"""Requests with a grammar: they wait until it is compiled, and each step is told which tokens it may draw.

The scheduler's hook for `quire.structured`. It knows which sequences stand where; what a grammar allows is the
matcher's to say. Costs nothing where no live request has a grammar.
"""

from time import perf_counter

from quire.protocol.step import Failure, FailureKind, SampleGuide, SequenceOutput, StepPlan
from quire.scheduler.outcomes import MANY_GUIDED, Outcomes
from quire.scheduler.planner import Planner
from quire.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.structured.manager import GrammarManager
from quire.structured.matcher import Grammar, MaskBuffer, Matcher
from quire.text.grammars.meter import FREE_SECONDS

_PARAM = "structured_outputs"
_FINISHED = SequenceStatus.FINISHED


class Guidance:
    """Who awaits which grammar, and the masks of a step."""

    def __init__(self, grammars: GrammarManager | None, planner: Planner, outcomes: Outcomes) -> None:
        self._grammars, self._planner, self._outcomes = grammars, planner, outcomes
        self._awaiting: dict[bytes, list[SequenceGroup]] = {}
        self._masks: MaskBuffer | None = None

    @property
    def is_compiling(self) -> bool:
        """Whether anybody may await a grammar."""
        return bool(self._awaiting)

    @property
    def has_many(self) -> bool:
        """Whether so many live requests have a grammar that their masks are for a thread of their own."""
        return self._outcomes.num_guided >= MANY_GUIDED

    def prepare(self) -> None:
        """Do now what would hold up everybody when the first grammar comes."""
        if self._grammars is not None:
            self._grammars.compiler.prepare()

    def close(self) -> None:
        """End the processes that grammars are tried in."""
        for trial in self._grammars.compiler.trials if self._grammars is not None else ():
            trial.end()

    def open(self, group: SequenceGroup) -> None:
        """Give a new request its grammar, or set its sequences aside until that is compiled."""
        params = group.task.params.structured_outputs
        if not group.task.has_grammar or params is None:
            return
        assert self._grammars is not None, "a request with a grammar, in an engine without any"
        key = self._grammars.key(params)
        group.grammar = (found := self._grammars.get(key)) and found.opened()
        if group.grammar is None:
            self._grammars.compile(key, params)
            self._awaiting.setdefault(key, []).append(group)
            for sequence in group.sequences.values():
                if sequence.status is SequenceStatus.WAITING:
                    self._planner.set_aside(sequence, "grammar")

    def wake(self, timeout: float) -> list[SequenceOutput]:
        """Let those go on whose grammar is compiled, and end those whose can't be. Waits at most so many seconds."""
        assert self._grammars is not None, "nobody can await a grammar"
        outputs: list[SequenceOutput] = []
        for key, found in self._grammars.take(timeout):
            for group in self._awaiting.pop(key, ()):
                if self._outcomes.groups.get(group.request_id) is not group:
                    continue  # aborted meanwhile
                if isinstance(found, Grammar):
                    group.grammar = found.opened()
                    for sequence in [sequence for sequence in group.sequences.values() if sequence.awaits == "grammar"]:
                        self._planner.make_ready(sequence)
                else:
                    failure = Failure(FailureKind.BAD_REQUEST, f"{_PARAM} can't be used: {found}", _PARAM)
                    outputs += self._outcomes.end_request(group, "error", failure)
        return outputs

    def guide(self, plan: StepPlan, sequences: list[Sequence]) -> SampleGuide | None:
        """Which tokens the oldest plan in flight may draw; None where that is up to nobody."""
        if not self._outcomes.num_guided:
            return None
        assert self._grammars is not None, "a request with a grammar, in an engine without any"
        if (masks := self._masks) is None:
            masks = self._masks = MaskBuffer(self._grammars.num_words)
        start, rows = perf_counter(), list[tuple[int, int]]()
        for place, (item, sequence) in enumerate(zip(plan.scheduled, sequences, strict=True)):
            is_drawn = item.sampling and sequence.status is not _FINISHED
            if not is_drawn or (matcher := sequence.matcher or self._begin(sequence)) is None:
                continue
            row, num_drafts = len(rows), item.num_drafts
            if row + num_drafts >= masks.num_rows:
                masks.grow(row + num_drafts + 1)
            matcher.fill(masks, sequence.draft_token_ids[:num_drafts] if num_drafts else (), row)
            rows += [(place, position) for position in range(1 + num_drafts)]
        if self.has_many and self._outcomes.config.drafts_forced:
            for place in [rows[row][0] for row in masks.single_rows(len(rows))]:
                if not plan.scheduled[place].num_drafts and (matcher := sequences[place].matcher) is not None:
                    matcher.ahead = matcher.forced()
        if perf_counter() - start > FREE_SECONDS:  # all together, as a clock takes nearly as long as a mask
            for meter in [sequence.matcher.meter for sequence in sequences if sequence.matcher is not None]:
                meter.is_watching = True
        return SampleGuide(step_id=plan.step_id, masks=masks.first(len(rows)), rows=rows) if rows else None

    def _begin(self, sequence: Sequence) -> Matcher | None:
        """Where a sequence stands that is drawn under its grammar for the first time; None where it has none."""
        if (grammar := sequence.group.grammar) is not None:
            sequence.matcher = grammar.matcher(sequence.output_token_ids, sequence.group.task.params.ignore_eos)
        return sequence.matcher
