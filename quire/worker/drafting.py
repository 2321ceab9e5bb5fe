"""What all that drafts with a model of its own has in common: how a worker holds it, and how it draws for rows.

A method's file makes a `Drafter`, which the worker builds, loads and asks for a proposer. That draws by the functions
here: as the sampler will, with the random bits of the position that is drafted, so that a draft is the sampler's own
choice wherever proposer and model think alike. Knows rows and orders; neither models nor plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from quire.config.speculative import SpeculativeConfig
from quire.models.builder import BuildContext, Builder
from quire.models.causal_lm import CausalLM, RunnableModel
from quire.ops.native.library import Target
from quire.ops.native.rounds import Rounds
from quire.protocol.cache import CacheGroup, LayerCache
from quire.protocol.step import TokenLogprobs
from quire.sampling.accept import Probs
from quire.sampling.lanes import Draw
from quire.sampling.native import fixed_record
from quire.sampling.sampler import rank
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.speculative.base import DraftedSequence, Proposer
from quire.worker.devices.base import Device
from quire.worker.rows import RowTable
from quire.worker.weights.store import WeightStore

_LEAST = 0.01  # temperature that is not greedy
_KEPT = ("top_k", "top_p", "min_p", "logit_bias", "allowed_token_ids")  # parameters that only choose among tokens


@dataclass(slots=True)
class Order:
    """What is wanted of a sequence: tokens [start, stop) are to be read, then so many drafts drawn.

    Attributes:
        state: how it is drawn for.
        drafts: gets what is drafted; fewer than `num_drafts` where that can't be done.
        probs: gets what each draft was drawn from, where that is kept.
    """

    row: DraftedSequence
    state: SamplingState
    start: int
    stop: int
    num_drafts: int
    drafts: list[int] = field(default_factory=list)
    probs: list[Probs] = field(default_factory=list)


# Of the orders still drafted for: these, their starts and counts, which of the last call's they are (None: the first
# call), and how many drafts each has by now -> a token each, None where none can be drawn.
DrawStep = Callable[[list[Order], list[int], list[int], list[int] | None, int], list[int | None]]


class Drafter(ABC):
    """A model, or heads, that draft beside the model.

    Attributes:
        layers: what its own attention layers keep of a token; they follow the model's in the same KV groups.
        assign_groups: tells those layers their groups; called with all groups, and the number of the model's layers.
        taps: the model's layers whose outputs it reads.
        reads: whether it has to read what it has missed of a sequence before it drafts for it.
        device: where it computes.
        timed: what steps of it take is measured by this, once there is a proposer, in steps of so many tokens.
        module: its layers.
        store: of its weights.
    """

    layers: Sequence[LayerCache] = ()
    assign_groups: Callable[[list[CacheGroup], int], None]
    taps: Sequence[int] = ()
    reads = True
    device: Device
    timed: RunnableModel
    timed_sizes: Sequence[int] = (1, 4, 16, 64)
    module: nn.Module
    store: WeightStore

    def builder(self, config: SpeculativeConfig, model: CausalLM) -> Builder:
        """What builds heads beside the model, of its type; their weights go to a store of their own."""
        self.store = WeightStore(None)
        formats = self.device.weight_formats(config.quantization, self.store, None)
        return Builder(BuildContext(self.device.backend, formats, model.dtype))

    @abstractmethod
    def load(self, progress: bool) -> None:
        """Fill it with its weights (ModelLoadError where they are missing, broken, or of another model)."""

    @abstractmethod
    def proposer(self, model: RunnableModel, table: RowTable, caches: list[Tensor]) -> Proposer:
        """What drafts for the rows of a table; `caches` are those of its own layers."""


def drafts_of(
    rows: Sequence[DraftedSequence], orders: Sequence[Order], carry_out: Callable[[list[Order]], None]
) -> list[list[int]]:
    """Carry out orders, those with more drafts first, and say what each row got; [] without an order."""
    if orders:
        carry_out(sorted(orders, key=lambda order: -order.num_drafts))
    found = {order.row.sequence_id: order.drafts for order in orders}
    return [found.get(row.sequence_id, []) for row in rows]


def draft_natively(rounds: Rounds, table: RowTable, orders: Sequence[Order], hidden: Sequence[Tensor] = ()) -> None:
    """Read and draw in one call, `hidden` being what is read with the tokens."""
    rows: list[int] = []
    for order in orders:
        index = table.rows[order.row.sequence_id].index
        rows += index, order.start, order.stop, order.num_drafts, order.state.tokens.position
    records = b"".join([fixed_record(order.state) for order in orders])
    num_tokens, most = sum([order.stop - order.start for order in orders]), orders[0].num_drafts
    tables = table.token_ids, table.block_tables
    found = rounds.draw(rows, records, num_tokens, tables, table.block_size, hidden)
    for at, order in enumerate(orders):
        drawn = found[at * most : at * most + order.num_drafts]
        order.drafts = drawn[: drawn.index(-1)] if -1 in drawn else drawn


def draft_in_steps(orders: Sequence[Order], draw: DrawStep) -> None:
    """The same, one token of each after another."""
    drafting = list(orders)
    starts, counts = [order.start for order in orders], [order.stop - order.start for order in orders]
    kept: list[int] | None = None
    num_drawn = 0
    while drafting:
        drawn = draw(drafting, starts, counts, kept, num_drawn)
        num_drawn += 1
        kept = []
        for at, (order, token_id) in enumerate(zip(drafting, drawn, strict=True)):
            if token_id is not None:
                order.drafts.append(token_id)
                if num_drawn < order.num_drafts:
                    order.row.tokens.set_drafts(order.drafts)
                    kept.append(at)
        drafting = [drafting[at] for at in kept]
        starts, counts = [order.stop + num_drawn - 1 for order in drafting], [1] * len(drafting)


def drafting_state(row: DraftedSequence, sharpness: float = 1.0) -> SamplingState:
    """What draws for a sequence as its state does, but for what looks back at tokens or reports: that is left out.

    It is made once. sharpness: its temperature is divided by this; `math.inf` takes what is likeliest.
    """
    if row.plain_state is None:
        assert (state := row.state) is not None, "nothing says how it is drawn for"
        temperature = state.params.temperature / sharpness
        kept = {name: getattr(state.params, name) for name in _KEPT}
        plain = SamplingParams(temperature=temperature if temperature >= _LEAST else 0.0, **kept)
        seed, index = state.seed, state.sequence_index
        size = state.vocab_size
        row.plain_state = SamplingState(plain, state.tokens, seed=seed, sequence_index=index, vocab_size=size)
    return row.plain_state


def rank_tokens(
    target: Target | None, logits: Tensor, states: list[SamplingState], nums: list[int]
) -> list[Sequence[int]]:
    """Of each row so many of the likeliest tokens, best first; fewer, or none, where there are no more."""
    ranked = rank(logits, [Draw(*of) for of in zip(states, range(len(states)), nums, strict=True)], target)
    return [found.token_ids if isinstance(found, TokenLogprobs) else () for found in ranked]
