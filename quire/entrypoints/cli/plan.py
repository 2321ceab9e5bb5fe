"""`quire plan`: what a model would take of this machine with these options, before anything is loaded.

Builds each rank's share of the model on a page of zeros, and asks it what an engine asks at start-up: the figures are
those of a start. Where it does not fit, smaller weight formats and shorter contexts are tried in its place.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from msgspec import structs

from quire.config.engine_args import EngineArgs, EngineConfig
from quire.config.families import built_family
from quire.entrypoints.cli.flags import add_engine_flags, engine_args_from, human_bytes
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.protocol.cache import least
from quire.protocol.worker import WorkerReport
from quire.utils.host_memory import available_memory_bytes

_SMALLER = ("int8", "int4")  # weight formats, each smaller than the one before


@dataclass(frozen=True)
class Share:
    """What one rank of one engine holds, in bytes."""

    weights: int
    kv_cache: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.activations


@dataclass(frozen=True)
class Plan:
    """A start that was thought through.

    Attributes:
        shares: one a rank, the same for every engine; without KV cache where there is a refusal.
        free: memory that is free now, in bytes.
        num_blocks: of the largest KV group.
        refusal: why it does not fit.
    """

    config: EngineConfig
    worker: WorkerReport
    shares: list[Share]
    free: int
    num_blocks: int = 0
    max_model_len: int = 0
    refusal: str | None = None


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire plan`: an engine's, and a form."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_engine_flags(parser)
    parser.epilog = "Loads nothing: config.json is enough. Exit code 1: it does not fit."


def run(namespace: Namespace) -> None:
    """Plan, and print; ends with code 1 where it does not fit."""
    args = engine_args_from(namespace)
    plan = make_plan(args)
    changes = [] if plan.refusal is None else [*_changes(args)]
    print(json.dumps(_facts(plan, changes), indent=2) if namespace.json else "\n".join(_lines(plan, changes)))
    if plan.refusal is not None:
        raise SystemExit(1)


def make_plan(args: EngineArgs) -> Plan:
    """What a start with these options would hold.

    Raises:
        ConfigError, ModelLoadError: what a start would be refused for before any memory is asked for.
    """
    from quire.engine.build import cache_request  # with torch: --help is quick without
    from quire.kvcache.capacity import num_bytes, plan_cache

    config = args.resolve()
    ranks = [_rank(config, rank) for rank in range(config.args.num_ranks)]
    loaded = [rank.start(progress=False) for rank in ranks]
    shares = [Share(each.weight_bytes, 0, 0) for each in loaded]
    free = available_memory_bytes()
    left = free - config.args.data_parallel_size * sum(share.weights for share in shares)  # all are on this machine
    if left < 0:  # and to run through them, to measure the rest, would take minutes
        refusal = f"the weights take {human_bytes(free - left)}, and {human_bytes(free)} of memory are free."
        return Plan(config, loaded[0], shares, free, refusal=refusal)
    reports = [rank.cache_report() for rank in ranks]
    shares = [replace(share, activations=each.activation_bytes) for share, each in zip(shares, reports, strict=True)]
    report = least([structs.replace(report, available_bytes=left // len(ranks)) for report in reports])
    try:
        layout = plan_cache(cache_request(config, config.args.pipeline_parallel_size), report)
    except ConfigError as error:
        return Plan(config, loaded[0], shares, free, refusal=str(error))
    caches = [num_bytes(layout.num_blocks, each) for each in reports]
    shares = [replace(share, kv_cache=size) for share, size in zip(shares, caches, strict=True)]
    return Plan(config, loaded[0], shares, free, max(layout.num_blocks, default=0), layout.max_model_len)


def _rank(config: EngineConfig, rank: int) -> Executor:
    """One of the workers, that loads nothing and meets no other."""
    from quire.engine.build import worker_config
    from quire.executor.inprocess import InProcessExecutor

    built_family(config.model.architecture, config.model.model)
    num_ranks = config.args.num_ranks
    alone = replace(worker_config(config), rank=rank, num_ranks=num_ranks, load_format="none", kv_cache_dir=None)
    return InProcessExecutor(alone)


def _changes(args: EngineArgs) -> Iterator[str]:
    """Flags with which it would fit, the least change first."""
    own = args.resolve().quantization
    smaller = _SMALLER[_SMALLER.index(own) + 1 :] if own in _SMALLER else () if own else _SMALLER
    for quantization in (args.quantization, *smaller):
        changed = replace(args, quantization=quantization)
        flags = [] if quantization == args.quantization else [f"--quantization {quantization}"]
        if flags and make_plan(changed).refusal is None:
            yield " ".join(flags)
            return
        plan = make_plan(replace(changed, max_model_len=None))
        if args.max_model_len is not None and plan.refusal is None:
            fits = plan.max_model_len // 1024 * 1024 or plan.max_model_len  # what is free changes by the minute
            yield " ".join([*flags, f"--max-model-len {fits}"])


def _facts(plan: Plan, changes: list[str]) -> dict[str, object]:
    """For programs: bytes, and numbers."""
    return {
        "model": plan.config.model.model,
        "num_parameters": plan.worker.num_parameters,
        "kernels": plan.worker.kernels,
        "engines": plan.config.args.data_parallel_size,
        "ranks": [asdict(share) | {"total": share.total} for share in plan.shares],
        "free": plan.free,
        "num_kv_blocks": plan.num_blocks,
        "block_size": plan.config.args.block_size,
        "max_model_len": plan.max_model_len,
        "fits": plan.refusal is None,
        "refusal": plan.refusal,
        "changes": changes,
    }


def _lines(plan: Plan, changes: list[str]) -> Iterator[str]:
    """For people."""
    model, block_size = plan.config.model, plan.config.args.block_size
    formats = model.dtype if plan.worker.quantization is None else f"{plan.worker.quantization} weights, {model.dtype}"
    yield f"{model.model}: {plan.worker.num_parameters:,} parameters; {formats}; kernels {plan.worker.kernels}"
    yield f"{'':8}{'weights':>12}{'KV cache':>12}{'activations':>14}{'in all':>12}"
    for rank, share in enumerate(plan.shares):
        sizes = [human_bytes(size) for size in (share.weights, share.kv_cache, share.activations, share.total)]
        yield f"{f'rank {rank}':8}{sizes[0]:>12}{sizes[1]:>12}{sizes[2]:>14}{sizes[3]:>12}"
    engines = plan.config.args.data_parallel_size
    taken = engines * sum(share.total for share in plan.shares)
    if engines > 1:
        yield f"{engines} engines, each of {'that' if len(plan.shares) == 1 else 'those ranks'}"
    if plan.refusal is None:
        num_tokens = plan.num_blocks * block_size
        contexts = f"{num_tokens / plan.max_model_len:.1f} contexts of {plan.max_model_len:,}"
        yield f"KV cache: {plan.num_blocks:,} blocks of {block_size} tokens: {num_tokens:,} tokens, {contexts}"
        if plan.max_model_len < model.max_model_len:
            yield f"The context is shortened from {model.max_model_len:,} tokens to what the KV cache holds."
        yield f"It fits: {human_bytes(taken)} of the {human_bytes(plan.free)} that are free."
        return
    yield f"It does not fit: {plan.refusal}"
    yield from (f"It fits with {change}" for change in changes)
    if not changes:
        yield "No weight format that Quire makes is small enough: free memory, or take a smaller model."
