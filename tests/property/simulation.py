"""A deterministic simulation of the engine core: random load on a virtual clock, replayable from its seed.

One or two plans are in flight, drafts are right with some probability, requests fork at their prompt's end or, as a
`Grove`, in between; some have grammars; sequences fail, the executor raises, Ctrl-C comes at any time, the engine goes
on elsewhere, holds what runs, or sleeps; some have two or three stages. What must hold is said by `world`. A failure
names the command that shows it again; for long runs: `python tests/property/simulation.py --seeds 200 --steps 20000`.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from expectation import EOS_TOKEN, STOP_TOKENS, USER_STOP_TOKEN
from fake_grammars import NUM_LANGUAGES
from world import VOCAB, Disturbance, Kind, World

from quire.config.scheduler import PolicyOptions, SchedulerConfig
from quire.kvcache.groups import window_reach
from quire.protocol.cache import CacheGroup, CacheLayout
from quire.protocol.requests import NewRequest, SamplingTask
from quire.sampling_params import SamplingParams
from quire.scheduler.policies.registry import POLICIES
from quire.structured_outputs import StructuredOutputsParams

Windows = tuple[int | None, ...]  # of each KV group; None: full attention


@dataclass(frozen=True)
class Scenario:
    """Everything that a simulation depends on; what is None is drawn from the seed.

    `windows` has one entry for each KV group. Windows free blocks by tiles of 64 tokens, so that contexts are longer.
    """

    seed: int
    num_steps: int
    kind: Kind | None = None
    windows: Windows = (None,)
    policy: str | None = None
    hosts: int | None = None  # host blocks, in quarters of the device's
    disturbed: float = 0.015  # share of the steps in which something is aborted, interrupted or dies

    def command(self) -> str:
        """What runs it again."""
        words = [f"--first {self.seed} --seeds 1 --steps {self.num_steps}"]
        if self.kind is not None:
            words.append(f"--kind {self.kind.max_in_flight},{self.kind.max_drafts},{self.kind.accuracy}")
        if self.windows != (None,):
            words.append(f"--windows {','.join(str(window or 0) for window in self.windows)}")
        if self.policy is not None:
            words.append(f"--policy {self.policy}")
        if self.hosts is not None:
            words.append(f"--hosts {self.hosts}")
        if self.disturbed != 0.015:
            words.append(f"--disturbed {self.disturbed}")
        return f"python tests/property/simulation.py {' '.join(words)}"


class Load:
    """Random requests, the same for the same seed."""

    def __init__(self, rng: random.Random, world: World) -> None:
        self.rng = rng
        self.world = world
        self.num_made = 0
        self.odds = _odds(rng)  # of what seldom comes
        limit = world.config.max_model_len
        self.prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, limit))] for _ in range(4)]

    def request(self, request_id: str | None = None) -> NewRequest:
        """A request; about one in twenty is refused."""
        rng, odds, limit = self.rng, self.odds, self.world.config.max_model_len
        has_targets = self.world.scheduler.config.policy == "deadline" and odds.random() < 0.5
        prefix = rng.choice(self.prefixes)
        prompt = prefix[: rng.randrange(len(prefix) + 1)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        max_tokens = rng.randrange(1, max(2, limit - len(prompt)))
        n = rng.choice((1, 1, 1, 2, 3, 7))
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=rng.randrange(max_tokens) if rng.random() < 0.2 else 0,
            stop_token_ids=[USER_STOP_TOKEN],
            logprobs=rng.choice((None, None, 0)),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            ignore_eos=rng.random() < 0.2,
        )
        if guided := rng.random() < 0.3:
            language = StructuredOutputsParams(regex=str(rng.randrange(NUM_LANGUAGES)))
            params = msgspec.structs.replace(params, structured_outputs=language)
        if n > 1 and rng.random() < 0.35:
            params = self.beams(params)
        self.num_made += 1
        return NewRequest(
            # An id in use, perhaps.
            request_id=request_id or str(self.num_made if rng.random() < 0.99 else self.num_made - 1),
            prompt_token_ids=prompt,
            task=SamplingTask(
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=STOP_TOKENS if rng.random() < 0.7 else frozenset({EOS_TOKEN} if guided else ()),
                eos_token_id=EOS_TOKEN,
                seed=rng.randrange(1000),
                first_sequence_index=rng.choice((0, 0, 0, 7)),
                has_grammar=guided,
            ),
            arrival_time=self.world.clock - (odds.random() if odds.random() < 0.1 else 0.0),
            priority=rng.randrange(3),
            cache_salt=rng.choice((None, None, None, "a", "b")),
            client=rng.choice((None, "a", "b", "c")),
            ttft_target=odds.choice((0.1, 1.0, 10.0)) if has_targets else None,
            tpot_target=odds.choice((None, 0.01, 0.1)) if has_targets else None,
        )

    def beams(self, params: SamplingParams) -> SamplingParams:
        """A beam search of as many beams, or a few more, in place of draws."""
        rng = self.rng
        return msgspec.structs.replace(
            params,
            best_of=params.n + rng.choice((0, 0, 2)),
            use_beam_search=True,
            temperature=0.0,
            prompt_logprobs=None,
            length_penalty=rng.choice((0.0, 1.0, 1.0, 2.0)),
            early_stopping=rng.choice((False, True, "never")),
        )

    def arrive(self) -> None:
        """Add one request, under the id of one that is aborted for it, perhaps."""
        request_id = self.victim() if self.odds.random() < 0.05 else None
        if request_id is not None:
            self.world.abort(request_id)
        request = self.request(request_id)
        faults = {}
        assert isinstance(request.task, SamplingTask)
        if self.rng.random() < 0.04:
            faults = {self.rng.randrange(request.task.num_sequences): self.rng.randrange(6)}
        has_stop_string = self.rng.random() < 0.3 and not request.task.num_beams
        self.world.add(request, has_stop_string, faults)

    def victim(self) -> str:
        """A request to abort: mostly one that lives, sometimes one that is unknown."""
        live = list(self.world.expectations)
        return self.rng.choice(live) if live and self.rng.random() < 0.9 else "nobody"

    def change_limits(self, may_change_policy: bool) -> None:
        """The operator has the engine keep to other limits, or to another policy."""
        rng, most = self.rng, self.world.config
        changes: dict[str, object] = {"max_num_seqs": rng.randint(1, most.max_num_seqs)}
        if most.enable_chunked_prefill:
            changes["max_num_batched_tokens"] = rng.randint(1, most.max_num_batched_tokens)
        policy = rng.choice(list(POLICIES))
        if may_change_policy:
            changes["policy"] = policy
        changes |= some_options(self.odds, policy if may_change_policy else self.world.scheduler.config.policy)
        self.world.scheduler.set_limits(changes)
        self.world.ends["limits"] += 1

    def pin(self) -> None:
        """A beginning that many requests share is to stay, or may go."""
        prefix = self.rng.choice(self.prefixes)
        self.world.pin(self.rng.choice("ab"), prefix[: self.rng.randrange(1, len(prefix) + 1)], None)

    def disturbance(self, share: float) -> Disturbance | None:
        """What happens while the next step is under way, mostly nothing."""
        chance = self.rng.random() / share
        if chance >= 1.0:
            return None
        act: Callable[[], None] = interrupt if chance < 0.2 else fail
        if chance >= 0.33:
            act = partial(self.world.abort, self.victim())
        return Disturbance(act, self.rng.choice(("submitted", "computed")))


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def fail() -> None:
    """The whole step fails, and with it the workers."""
    raise RuntimeError("injected")


def _odds(rng: random.Random) -> random.Random:
    """Numbers of their own, which take none of the others."""
    return random.Random(str(rng.getstate()[1][:4]))


def some_options(rng: random.Random, policy: str) -> dict[str, float]:
    """Options of a policy, some of which it has no other value of than by default."""
    choices = {
        "fair": {"fair_input_weight": (0.0, 1.0, 3.0), "fair_output_weight": (0.5, 2.0)},
        "shortest": {"ageing_rate": (0.1, 100.0)},
        "deadline": {"ttft_target": (0.5, 5.0), "tpot_target": (0.02, 0.2)},
    }
    found = {name: rng.choice(values) for name, values in choices.get(policy, {}).items()}
    return {name: value for name, value in found.items() if rng.random() < 0.3}


def make_world(
    rng: random.Random,
    kind: Kind | None = None,
    windows: Windows = (None,),
    policy: str | None = None,
    hosts: int | None = None,
) -> World:
    """A world of random, narrow limits: preemption, chunking and eviction happen all the time."""
    limit = rng.choice((24, 40)) if windows == (None,) else rng.choice((150, 200))
    block_size = rng.choice((1, 2, 4, 4, 8, 16))
    chunked = rng.random() < 0.75
    config = SchedulerConfig(
        max_model_len=limit,
        max_num_batched_tokens=rng.choice((5, 12, 32, 100)) if chunked else limit + rng.randrange(40),
        max_num_seqs=rng.choice((1, 3, 6, 8, 12, 12)),
        policy=policy or rng.choice(list(POLICIES)),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice((0, 0, 2, 7)) if chunked else 0,
    )
    odds = _odds(rng)
    config = replace(config, policy_options=PolicyOptions(**some_options(odds, config.policy)))
    # From less than the longest request needs, so that some are refused, to room for about five.
    num_blocks = max(1, limit * rng.choice((9, 12, 20, 30, 50)) // 10 // block_size)
    caching = rng.random() < 0.8
    drawn = rng.choice((0, 1, 4, 20))
    hosts = drawn if hosts is None else hosts
    if kind is None:
        kind = Kind(rng.choice((1, 2)), *rng.choice(((0, 0.0), (3, 0.0), (4, 0.5), (5, 0.9))))
        if odds.random() < 0.2:
            num_stages = odds.choice((2, 3))
            kind = replace(kind, max_in_flight=num_stages, num_stages=num_stages)
    counts: list[int] = []
    for window in windows:
        counts.append(num_blocks)
        if window is not None:  # what one sequence needs, and a little more, up to a whole context
            num_tokens = window_reach(window, block_size) + config.max_num_batched_tokens * kind.max_in_flight
            most = max(num_blocks, -(-limit // block_size))
            counts[-1] = min(-(-num_tokens // block_size) + rng.randrange(1 + 60 // block_size), most)
    layout = CacheLayout(
        block_size=block_size,
        groups=[CacheGroup([number], window) for number, window in enumerate(windows)],
        num_blocks=counts,
        max_model_len=limit,
        num_host_blocks=[] if not hosts else [count * hosts // 4 + 1 for count in counts],
        block_bytes=[1 for _ in counts],
    )
    return World(config, layout, caching, kind, has_disk=bool(hosts) and rng.random() < 0.5)


def simulate(seed: int, num_steps: int, **choices: object) -> World:
    """Run one seed; see `run`. `choices` are further fields of a `Scenario`."""
    return run(Scenario(seed, num_steps, **choices))  # type: ignore[arg-type]


def run(scenario: Scenario) -> World:
    """Bursts of arrivals and quiet times, aborts between and within steps, faults, Ctrl-C, deaths; then drain.

    Whatever is raised says by which command it is seen again.
    """
    step = 0
    try:
        rng = random.Random(scenario.seed)
        world = make_world(rng, scenario.kind, scenario.windows, scenario.policy, scenario.hosts)
        load = Load(rng, world)
        rate = 0.3
        for step in range(scenario.num_steps):
            if step % 200 == 0:
                rate = rng.choice((0.02, 0.1, 0.3, 0.6))
            if rng.random() < rate and len(world.expectations) < 30:
                load.arrive()
            if rng.random() < 0.01:
                world.abort(load.victim())
            if rng.random() < 0.002:
                world.go_on_elsewhere()
            if rng.random() < 0.004:
                load.change_limits(scenario.policy is None)
            if rng.random() < 0.01:
                load.pin()
            if load.odds.random() < 0.002:
                world.hold()
            if load.odds.random() < 0.001:
                world.sleep(load.request())
            world.step(load.disturbance(scenario.disturbed))
            if step % 32 == 0 and world.disk and rng.random() < 0.5:  # a file is lost, or damaged
                del world.disk[rng.choice(list(world.disk))]
            if step % 64 == 0:
                world.check_integrity()
            if step % 500 == 0 and world.core.reset_prefix_cache(closes_disk=True):
                world.ends["reset"] += 1
        world.drain()
        return world
    except Exception as error:
        error.add_note(f"in step {step} of seed {scenario.seed}; this shows it again: {scenario.command()}")
        raise


def parse_scenarios(words: list[str] | None = None) -> list[Scenario]:
    """The scenarios that a command line asks for; None: this process's."""
    parser = argparse.ArgumentParser(description="Simulate the scheduler under random load.")
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--steps", type=int, default=20_000, help="steps per seed")
    parser.add_argument("--kind", help="plans in flight, drafts at once and their accuracy, as 2,4,0.5")
    parser.add_argument("--windows", default="0", help="each KV group's window, 0 for none, as 0,20")
    parser.add_argument("--policy", choices=list(POLICIES), help="one policy only")
    parser.add_argument("--hosts", type=int, help="host blocks, in quarters of the device's; 0: none")
    parser.add_argument("--disturbed", type=float, default=0.015, help="share of the steps in which something happens")
    args = parser.parse_args(words)
    kind = None
    if args.kind is not None:
        flight, drafts, accuracy = args.kind.split(",")
        kind = Kind(int(flight), int(drafts), float(accuracy))
    windows = tuple(int(window) or None for window in args.windows.split(","))
    seeds = range(args.first, args.first + args.seeds)
    return [Scenario(seed, args.steps, kind, windows, args.policy, args.hosts, args.disturbed) for seed in seeds]


def main() -> None:
    """Run many seeds; a failing one raises after its number was printed."""
    for scenario in parse_scenarios():
        print(f"seed {scenario.seed}", end=" ", flush=True)
        world = run(scenario)
        stats = world.scheduler.stats()
        print(
            f"{world.config.policy} {world.kind} {dict(world.ends)} preemptions {stats.num_preemptions_total} "
            f"out {world.num_out} in {world.num_in} read {world.num_disk_hits} copies {world.num_copies} "
            f"forks {world.num_forks} accepted {world.num_accepted} forced {world.num_forced} "
            f"hits {stats.prefix_cache_hits_total}/{stats.prefix_cache_queries_total} trace {world.trace:08x}",
            flush=True,
        )


if __name__ == "__main__":
    main()
