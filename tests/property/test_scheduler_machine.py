"""The engine core as a Hypothesis state machine: adds, aborts, steps, faults in any order, on the simulated executor.

Where the simulation finds a failure after thousands of steps, this one finds the shortest way to it.
"""

import random
from collections.abc import Callable

import hypothesis.strategies as st
from expectation import EOS_TOKEN, STOP_TOKENS, USER_STOP_TOKEN
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation import fail, interrupt, make_world
from world import Disturbance, World

from quire.protocol.requests import NewRequest, SamplingTask
from quire.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)  # few different ones, so that prefixes are shared


class SchedulerMachine(RuleBasedStateMachine):
    world: World

    @initialize(seed=st.integers(0, 500))
    def start(self, seed: int) -> None:
        self.world = make_world(random.Random(seed))
        self.num_added = 0

    @rule(
        prompt=TOKENS,
        n=st.integers(1, 4),
        seed=st.integers(0, 3),  # 0 and 3: a grove
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        wants_prompt_logprobs=st.booleans(),
        fault=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def add(
        self,
        prompt: list[int],
        n: int,
        seed: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        wants_prompt_logprobs: bool,
        fault: tuple[int, int] | None,
    ) -> None:
        self.num_added += 1
        max_tokens = min(max_tokens, max(1, self.world.config.max_model_len - len(prompt)))
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            stop_token_ids=[USER_STOP_TOKEN],
            prompt_logprobs=0 if wants_prompt_logprobs else None,
        )
        request = NewRequest(
            request_id=f"r{self.num_added}",
            prompt_token_ids=prompt,
            task=SamplingTask(
                params=params, max_tokens=max_tokens, stop_token_ids=STOP_TOKENS, eos_token_id=EOS_TOKEN, seed=seed
            ),
            arrival_time=self.world.clock,
            priority=priority,
            cache_salt=salt,
        )
        self.world.add(request, faults=dict([fault]) if fault else None)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @rule(data=st.data(), when=st.sampled_from(["between", "submitted", "computed"]))
    def abort(self, data: st.DataObject, when: str) -> None:
        request_id = data.draw(st.sampled_from([*self.world.expectations, "nobody"]))
        if when == "between":
            self.world.abort(request_id)
        else:
            self.world.step(Disturbance(lambda: self.world.abort(request_id), when))

    @rule(act=st.sampled_from([interrupt, fail]), when=st.sampled_from(["submitted", "computed"]))
    def disturb(self, act: Callable[[], None], when: str) -> None:
        """Ctrl-C, or the workers die."""
        self.world.step(Disturbance(act, when))

    @rule()
    def go_on_elsewhere(self) -> None:
        self.world.go_on_elsewhere()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.world.core.reset_prefix_cache(closes_disk=True)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(2_000)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
