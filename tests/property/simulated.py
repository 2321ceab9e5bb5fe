"""An executor without a model: it carries out plans on fingerprints of tokens, and tells right from wrong.

Property tests and simulations of the engine run on it. For each position it writes, as a real worker writes keys and
values, a fingerprint of all tokens up to there into the slot that the row's block table names. To sample, it reads
them back: a wrong table, a missed copy, a stale prefix hit, a block given to two sequences is an AssertionError. Tokens
depend on fingerprint, seed, sequence index and position alone, so a request's outputs are those of the request alone.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.config.draft_tree import DraftTree
from quire.executor.base import Executor
from quire.protocol.cache import CacheGroup, CacheLayout, CacheReport
from quire.protocol.requests import NewRequest, SamplingTask
from quire.protocol.step import (
    DiskNews,
    Failure,
    FailureKind,
    Fork,
    Moves,
    NewSequence,
    PromptLogprobs,
    SampleGuide,
    Sampling,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from quire.protocol.worker import CallReply, CheckIntegrity, WorkerCall, WorkerReply, WorkerReport

NUM_CANDIDATES = 4  # of a RANK
_MASK = (1 << 61) - 1


def extend(fingerprint: int, token_id: int) -> int:
    """The fingerprint of one token more."""
    return (fingerprint * 6364136223846793005 + token_id * 1442695040888963407 + 11) & _MASK


def root_fingerprint(cache_salt: str | None) -> int:
    """The fingerprint of no tokens at all; requests of different salts share nothing."""
    return 1 if cache_salt is None else zlib.crc32(cache_salt.encode()) + 2


@dataclass(frozen=True)
class FakeModel:
    """Which tokens are drawn, and how good the drafts are that it proposes.

    Attributes:
        vocab_size: tokens are 0 .. vocab_size - 1.
        max_drafts: most drafts proposed after a token; 0: none.
        accuracy: probability of a draft to be right, 0 to 1.
        tree: the shape of drafts; None: they are a chain.
        fails: whether the draw of a (request id, sequence index, output position) fails.
    """

    vocab_size: int = 40
    max_drafts: int = 0
    accuracy: float = 0.0
    fails: Callable[[str, int, int], bool] = field(default=lambda request_id, index, position: False)
    tree: DraftTree | None = None

    def draw(self, fingerprint: int, seed: int, sequence_index: int, position: int, allowed: int = -1) -> int:
        """The token at an output position; `allowed` has bit t set where token t may be drawn."""
        token_id = (extend(extend(fingerprint, seed), sequence_index * 1000 + position) >> 23) % self.vocab_size
        while not allowed >> token_id & 1:
            token_id = (token_id + 1) % self.vocab_size
        return token_id

    def rank(self, fingerprint: int, num: int, allowed: int = -1) -> TokenLogprobs:
        """The best candidates after some tokens, all different, and at least `NUM_CANDIDATES` of those `allowed`."""
        num = min(max(num, NUM_CANDIDATES), self.vocab_size)
        first, step = (fingerprint >> 31) % self.vocab_size, 1 + (fingerprint >> 19) % 8
        token_ids = [(first + i * 7) % self.vocab_size for i in range(num if allowed < 0 else self.vocab_size)]
        token_ids = [token_id for token_id in token_ids if allowed >> token_id & 1][:num]
        places = range(1, len(token_ids) + 1)
        return TokenLogprobs(token_ids, [-place * step / 8 for place in places], list(places))

    def propose(self, fingerprint: int, seed: int, sequence_index: int, position: int) -> list[int]:
        """Drafts of the tokens from an output position on, as many as the moment's chance wills."""
        drafts: list[int] = []
        if self.tree is not None:  # of each node's children, the one that chance wills may be right
            before = {0: fingerprint}
            for node, parent in enumerate(self.tree.parents):
                depth, above = self.tree.depths[node], before[1 + parent]
                right = self.draw(above, seed, sequence_index, position + depth - 1)
                siblings = self.tree.children[1 + parent]
                is_right = siblings[(above >> 21) % len(siblings)] == node
                is_right = is_right and (extend(above, 5) >> 29) % 1000 < self.accuracy * 1000
                drafts.append(right if is_right else (right + 1 + node) % self.vocab_size)
                before[1 + node] = extend(above, drafts[-1])
            return drafts[: (fingerprint >> 17) % (len(drafts) + 1)]
        for offset in range((fingerprint >> 17) % (self.max_drafts + 1)):
            token_id = self.draw(fingerprint, seed, sequence_index, position + offset)
            if (extend(fingerprint, 5) >> 29) % 1000 >= self.accuracy * 1000:
                token_id = (token_id + 1) % self.vocab_size
            drafts.append(token_id)
            fingerprint = extend(fingerprint, token_id)
        return drafts


class _Row:
    """A live sequence as a worker holds it."""

    def __init__(self, request: NewRequest, sequence_index: int) -> None:
        assert isinstance(request.task, SamplingTask)
        self.request = request
        self.task = request.task
        self.sequence_index = sequence_index
        self.token_ids: list[int] = []
        self.fingerprints: list[int] = []
        self.block_ids: list[list[int]] = []
        self.num_computed = 0
        self.drafts: list[int] = []

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def append(self, *token_ids: int) -> None:
        for token_id in token_ids:
            before = self.fingerprints[-1] if self.fingerprints else root_fingerprint(self.request.cache_salt)
            self.token_ids.append(token_id)
            self.fingerprints.append(extend(before, token_id))


class SimulatedExecutor(Executor):
    """One worker that exists in numbers only. A plan is computed when it is collected.

    Attributes:
        num_copies, num_forks, num_drafts, num_accepted: blocks copied, rows forked, drafts verified and accepted.
        num_forced: tokens that a grammar left no choice of, drawn beside the one before them.
        num_out, num_in: blocks moved to the host and back.
        disk: what was saved, by group and name; a missing entry can't be read.
    """

    def __init__(
        self, model: FakeModel, max_in_flight: int = 1, disk: dict[tuple[int, bytes], list[int]] | None = None
    ) -> None:
        self.max_in_flight = max_in_flight
        self.model = model
        self.rows: dict[int, _Row] = {}
        self.requests: dict[str, NewRequest] = {}
        self.num_copies = self.num_forks = self.num_drafts = self.num_accepted = self.num_forced = 0
        self.num_out = self.num_in = 0
        self.disk = {} if disk is None else disk
        self._reads: list[tuple[int, int, bytes]] = []
        self._plans: deque[StepPlan] = deque()
        self._block_size = 0
        self._groups: list[CacheGroup] = []
        self._kv: list[list[list[int]]] = []  # [group][block][slot]
        self._host: list[list[list[int]]] = []  # the same, of the host's blocks

    def start(self, progress: bool) -> WorkerReport:
        self.report = WorkerReport(
            kernels="none",
            kernels_reason="asked",
            num_threads=1,
            is_small_model=True,
            quantization=None,
            kv_cache_dtype="auto",
            num_parameters=0,
            num_files=0,
            weight_bytes=0,
            num_bytes=0,
            seconds=0.0,
        )
        return self.report

    def cache_report(self) -> CacheReport:
        return CacheReport(
            available_bytes=1 << 20, activation_bytes=0, groups=[CacheGroup(layers=[0])], block_bytes=[1 << 10]
        )

    def initialize_cache(self, layout: CacheLayout) -> None:
        self._block_size, self._groups = layout.block_size, layout.groups
        self._kv = [[[0] * layout.block_size for _ in range(count)] for count in layout.num_blocks]
        self._host = [[[0] * layout.block_size for _ in range(count)] for count in layout.num_host_blocks]

    def submit(self, plan: StepPlan) -> None:
        assert len(self._plans) < self.max_in_flight, "more plans in flight than may be"
        self._plans.append(plan)

    def collect(self, guide: SampleGuide | None = None) -> StepResult:
        plan = self._plans.popleft()
        masks = self._masks(guide, plan) if guide is not None else {}
        self._update_rows(plan)
        for group, block, name in plan.moves.save:
            self.disk[group, name] = self._kv[group][block].copy()
        fresh = self._move_and_edit(plan)
        for group, block in fresh:
            self._kv[group][block] = [0] * self._block_size  # what a freed block held is gone, as in debug mode
        for item in plan.scheduled:
            self._write(self.rows[item.sequence_id], item)
        # All have written before any reads, so that one's writing over another's blocks shows in this step.
        results = [self._sample(item, place, masks) for place, item in enumerate(plan.scheduled)]
        for request_id in plan.ended_request_ids:
            del self.requests[request_id]
        return StepResult(step_id=plan.step_id, results=results, disk=self._read_disk(plan))

    def reset(self) -> None:
        self._plans.clear()
        self._reads.clear()
        self.rows.clear()
        self.requests.clear()

    def call(self, call: WorkerCall) -> list[WorkerReply]:
        assert isinstance(call, CheckIntegrity)
        wanted, held = call.live_sequence_ids, sorted(self.rows)
        return [CallReply(None if wanted in (None, held) else f"rows {held} are held, not {wanted}")]

    def stop(self) -> None:
        self.reset()

    # The rows.

    def _update_rows(self, plan: StepPlan) -> None:
        for request in plan.new_requests:
            self.requests[request.request_id] = request
        for fork in plan.forks:
            self._fork(fork)
        for sequence_id in plan.removed_sequence_ids:
            del self.rows[sequence_id]
        for new in plan.new_sequences:
            self._announce(new)

    def _announce(self, new: NewSequence) -> None:
        assert new.sequence_id not in self.rows, "a sequence is announced twice"
        row = self.rows[new.sequence_id] = _Row(self.requests[new.request_id], new.sequence_index)
        row.append(*row.request.prompt_token_ids, *new.output_token_ids)
        row.block_ids = [list(block_ids) for block_ids in new.block_ids]
        row.num_computed = new.num_computed_tokens

    def _fork(self, fork: Fork) -> None:
        assert fork.sequence_id not in self.rows, "a fork has a row already"
        parent = self.rows[fork.parent_id]
        assert fork.num_tokens <= parent.num_computed, "a fork of what is not computed"
        row = self.rows[fork.sequence_id] = _Row(parent.request, fork.sequence_index)
        row.append(*parent.token_ids[: fork.num_tokens], fork.token_id)
        num_blocks = -(-fork.num_tokens // self._block_size)
        row.block_ids = [block_ids[:num_blocks] for block_ids in parent.block_ids]
        row.num_computed = fork.num_tokens
        self.num_forks += 1

    def _move_and_edit(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Moves, then what the plan says of each row; returns the blocks whose content is nobody's yet."""
        size, fresh = self._block_size, []
        for new in plan.new_sequences:
            first = -(-new.num_computed_tokens // size)
            fresh += [(g, block) for g, block_ids in enumerate(new.block_ids) for block in block_ids[first:]]
        for item in plan.scheduled:
            fresh += [(g, block) for g, block_ids in enumerate(item.new_block_ids) for block in block_ids]
        sources = {(group, source) for group, source, _ in plan.moves.copies}
        destinations = [(group, destination) for group, _, destination in plan.moves.copies]
        destinations += [(group, destination) for group, _, destination in plan.moves.in_]
        assert len({*fresh, *destinations}) == len(fresh) + len(destinations), "a block is handed out twice in a step"
        assert not sources & {*fresh, *destinations}, "a source of a copy is overwritten"
        self._move(plan.moves)
        for item in plan.scheduled:
            row = self.rows[item.sequence_id]
            for group, index, block in item.edits:
                row.block_ids[group][index] = block
            for block_ids, new_ids in zip(row.block_ids, item.new_block_ids, strict=bool(item.new_block_ids)):
                block_ids += new_ids
            if item.chosen_token_id >= 0:
                row.append(item.chosen_token_id)
        return fresh

    def _read_disk(self, plan: StepPlan) -> DiskNews | None:
        """The disk is a step behind, unless there is nothing else to do."""
        reads, self._reads = self._reads, plan.moves.fetch
        if not plan.scheduled:
            reads, self._reads = [*reads, *self._reads], []
        fetched: list[tuple[int, int, bool]] = []
        for group, host, name in reads:
            content = self.disk.get((group, name))
            if content is not None:
                self._host[group][host] = content.copy()
            fetched.append((group, host, content is not None))
        return DiskNews(fetched) if fetched else None

    def _move(self, moves: Moves) -> None:
        reserved = {(group, host) for group, host, _ in [*self._reads, *moves.fetch]}
        assert reserved.isdisjoint((group, host) for group, _, host in moves.out), "a host block awaits another content"
        assert len({(group, host) for group, _, host in moves.out}) == len(moves.out), "a host block is written twice"
        for group, source, destination in moves.out:
            self._host[group][destination] = self._kv[group][source].copy()
        for group, source, destination in moves.copies:
            self._kv[group][destination] = self._kv[group][source].copy()
        for group, source, destination in moves.in_:
            self._kv[group][destination] = self._host[group][source].copy()
        self.num_out += len(moves.out)
        self.num_copies += len(moves.copies)
        self.num_in += len(moves.in_)

    # The computation.

    def _write(self, row: _Row, item: ScheduledSequence) -> None:
        start, stop = row.num_computed, row.num_computed + item.num_new_tokens
        drafts = item.draft_token_ids or row.drafts[: item.num_drafts]
        assert len(drafts) == item.num_drafts, "more drafts are planned than there are"
        row.drafts = drafts
        fingerprints, last = row.fingerprints.copy(), len(row.fingerprints) - 1
        for place, token_id in enumerate(drafts):
            parent = place - 1 if self.model.tree is None else self.model.tree.parents[place]
            fingerprints.append(extend(fingerprints[last + 1 + parent], token_id))
        assert stop <= len(fingerprints), "tokens are computed that are not known"
        for group in range(len(self._groups)):
            for position in range(start, stop):
                block = row.block_ids[group][position // self._block_size]
                self._kv[group][block][position % self._block_size] = fingerprints[position]

    def _sample(self, item: ScheduledSequence, place: int, masks: dict[tuple[int, int], int]) -> SequenceResult:
        row = self.rows[item.sequence_id]
        start = row.num_computed
        stop = start + item.num_new_tokens - item.num_drafts
        self._read(row, start, stop)
        row.num_computed = stop
        prompt_logprobs = _prompt_logprobs(row, start, stop)
        if stop < len(row.token_ids):
            assert item.sampling is Sampling.NONE, "a sample before the last known token is computed"
            return SequenceResult(prompt_logprobs=prompt_logprobs)
        assert item.sampling is not Sampling.NONE, "the last known token is computed, and nothing sampled"
        index = row.sequence_index - row.task.first_sequence_index
        if self.model.fails(row.request.request_id, index, row.num_outputs):
            row.append(0)  # for the next plan, which may be under way with this sequence in it
            return SequenceResult(failure=Failure(FailureKind.INTERNAL, "injected"))
        if item.sampling is Sampling.RANK:
            candidates = self.model.rank(row.fingerprints[-1], item.num_samples, masks.get((place, 0), -1))
            return SequenceResult(candidates=candidates, prompt_logprobs=prompt_logprobs)
        drafts, row.drafts = row.drafts, []
        token_ids = [self._draw(row, i, masks.get((place, 0), -1)) for i in range(item.num_samples)]
        row.append(token_ids[0])
        wave, tree = 0, self.model.tree
        while nodes := [n for n in ([wave] if tree is None else tree.children[wave]) if n < len(drafts)]:
            self.num_drafts += not item.draft_token_ids
            node = next((n for n in nodes if drafts[n] == token_ids[-1]), None)
            if node is None:
                # Without a mask its request was aborted since the plan was made, and nobody hears of it.
                is_forced = item.draft_token_ids and (place, wave) in masks
                assert not is_forced, "a token that the grammar forces is refused"
                break
            self._move_token(row, stop + node, row.num_computed)
            wave = 1 + node
            self.num_accepted += not item.draft_token_ids
            self.num_forced += bool(item.draft_token_ids)
            row.num_computed += 1
            token_ids.append(self._draw(row, 0, masks.get((place, wave), -1)))
            row.append(token_ids[-1])
        if item.num_samples == 1:
            row.drafts = self.model.propose(row.fingerprints[-1], row.task.seed, row.sequence_index, row.num_outputs)
        logprobs = None
        if row.task.params.logprobs is not None:
            logprobs = [TokenLogprobs([token_id], [-1.0], [1]) for token_id in token_ids]
        return SequenceResult(token_ids, logprobs, row.drafts.copy(), prompt_logprobs=prompt_logprobs)

    def _move_token(self, row: _Row, source: int, destination: int) -> None:
        """What is stored at one position of a row is stored at another, too."""
        size = self._block_size
        for group, block_ids in enumerate(row.block_ids):
            found = self._kv[group][block_ids[source // size]][source % size]
            self._kv[group][block_ids[destination // size]][destination % size] = found

    def _draw(self, row: _Row, sample: int, allowed: int) -> int:
        return self.model.draw(
            row.fingerprints[-1], row.task.seed, row.sequence_index + sample, row.num_outputs, allowed
        )

    def _read(self, row: _Row, start: int, stop: int) -> None:
        """Every slot that the computed positions see must hold what the row's own tokens make."""
        size = self._block_size
        for group, kv in zip(self._groups, self._kv, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            block_ids = row.block_ids[self._groups.index(group)]
            seen = [kv[block_ids[position // size]][position % size] for position in range(first, stop)]
            assert seen == row.fingerprints[first:stop], (
                f"sequence {row.sequence_index} of {row.request.request_id} reads keys and values that are not its own"
            )

    def _masks(self, guide: SampleGuide, plan: StepPlan) -> dict[tuple[int, int], int]:
        assert guide.step_id == plan.step_id, "the guide of another step"
        num_bytes = -(-self.model.vocab_size // 32) * 4
        parts = [guide.masks[i : i + num_bytes] for i in range(0, len(guide.masks), num_bytes)]
        return {where: int.from_bytes(part, "little") for where, part in zip(guide.rows, parts, strict=True)}


def _prompt_logprobs(row: _Row, start: int, stop: int) -> PromptLogprobs | None:
    last = min(stop, len(row.request.prompt_token_ids) - 1)
    if row.task.params.prompt_logprobs is None or last <= start:
        return None
    entries = [TokenLogprobs([token_id], [0.0], [1]) for token_id in row.token_ids[start + 1 : last + 1]]
    return PromptLogprobs(start=start + 1, entries=entries)
