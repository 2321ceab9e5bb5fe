"""The engine core: the loop of schedule, execute, update.

`LLMEngine` drives it, or `CoreLoop` in the engine's own process or thread. It works on token ids alone: text, stop
strings and progress bars live above it, tensors below.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from msgspec import structs

from quire.engine.interrupts import InterruptShield
from quire.errors import EngineDeadError, OverloadedError, RequestFailedError, require
from quire.executor.base import Executor
from quire.lora.places import AdapterPlaces
from quire.protocol.cache import PinnedPrefix
from quire.protocol.core import CallName
from quire.protocol.kv_events import KVEventSink
from quire.protocol.requests import NewRequest
from quire.protocol.stats import SLEEP_STATES, EngineSnapshot, EngineStats, Limits
from quire.protocol.step import Failure, FailureKind, SampleGuide, SequenceOutput, StepPlan
from quire.protocol.worker import CheckIntegrity, Invoke, PlaceAdapters, Returned
from quire.scheduler.scheduler import Scheduler

T = TypeVar("T")
_IDLE_WAIT = 0.002  # seconds
_PARTS = {"weights", "kv_cache"}  # that an engine sleeps without


class Core(Protocol):
    """What `LLMEngine` drives, one engine or several: see `EngineCore`."""

    clock: Callable[[], float]
    first_scheduled: list[str]
    interrupts: InterruptShield
    max_model_len: int

    def add(self, request: NewRequest) -> None: ...
    def abort(self, request_id: str) -> list[SequenceOutput]: ...
    def finish_sequence(self, request_id: str, sequence_index: int) -> None: ...
    def has_unfinished(self) -> bool: ...
    def step(self) -> list[SequenceOutput]: ...
    def settle(self) -> None: ...
    def call(self, name: CallName, *arguments: Any) -> Any: ...
    def stats(self) -> EngineStats: ...
    def stop(self) -> None: ...


class EngineCore:
    """A scheduler and an executor, stepped together.

    Attributes:
        first_scheduled: requests that were new, or back from a preemption, in the last step's plans.
        interrupts: holds Ctrl-C back while books are open.
        places: of adapters on the workers, and the requests that wait for one.
        max_model_len: tokens; less than asked for where the KV cache holds no more.
        debug: check everything's integrity after each step.

    Raises:
        EngineDeadError: from every call after the executor failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        publisher: KVEventSink | None = None,
        debug: bool = False,
        num_places: int = 0,
    ) -> None:
        """`publisher` gets the KV manager's events; a step may mix `num_places` adapters."""
        self.scheduler, self.executor = scheduler, executor
        self.places = AdapterPlaces(num_places, scheduler.is_live)
        self.first_scheduled: list[str] = []
        self.interrupts = InterruptShield()
        self.max_model_len = scheduler.config.max_model_len
        self.debug, self._publisher = debug, publisher
        self.clock = executor.clock
        self._plans: deque[StepPlan] = deque()  # in flight
        self._aside = ThreadPoolExecutor(1, "quire-masks")  # starts no thread before it is needed
        self._guiding: Future[SampleGuide | None] | None = None
        self._undelivered: list[SequenceOutput] = []  # of a step that ended in an interrupt
        self._dead: str | None = None
        self._asleep, self._sleep_state = set[str](), SLEEP_STATES[0]  # of _PARTS, what is not there
        self._held = False  # whether requests are kept as they are

    def call(self, name: CallName, *arguments: Any) -> Any:
        """Call a method of this object, with Ctrl-C held back; where there are several engines, of each."""
        self._check_alive()
        with self.interrupts:
            return getattr(self, name)(*arguments)

    def stats(self) -> EngineStats:
        """The counters and gauges at this moment."""
        return structs.replace(self.scheduler.stats(), sleep_state=self._sleep_state)

    def add(self, request: NewRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never fit, or its id is taken.
            OverloadedError: the policy had rather not take it now, or the engine sleeps.
        """
        self._check_alive()
        if self._asleep:
            raise OverloadedError(f"the engine sleeps (without {', '.join(sorted(self._asleep))}); wake it up first.")
        self.scheduler.add(request, self.clock())
        self.places.add(request.request_id, request.adapter)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request now; returns the final output of each sequence that was not finished."""
        return self.scheduler.abort(request_id)

    def finish_sequence(self, request_id: str, sequence_index: int) -> None:
        """End one sequence whose stop string was found upstairs."""
        self.scheduler.finish_sequence(request_id, sequence_index)

    def set_limits(self, changes: dict[str, Any]) -> Limits:
        """Change limits, from the next plan on: see `Scheduler.set_limits`."""
        return self.scheduler.set_limits(changes)

    def has_unfinished(self) -> bool:
        """Whether a step has anything to do; on a dead engine it will say so."""
        is_still = self._held or self._asleep
        return not is_still and bool(self.scheduler.has_unfinished() or self._plans or self._undelivered)

    def step(self) -> list[SequenceOutput]:
        """One iteration: which tokens, compute them, what came of it.

        As many plans are in flight as the executor takes. A Ctrl-C comes out of it as KeyboardInterrupt, and the engine
        can go on: what was under way is planned again, and what had come is returned by the next step.
        """
        self._check_alive()
        with self.interrupts:
            plans, self.first_scheduled = self._plans, []
            if self.places.awaiting:
                self._place_adapters(_IDLE_WAIT if self.executor.plans_alike else 0.0)
            if self.scheduler.guidance.is_compiling:
                self._undelivered += self.scheduler.guidance.wake(0.0)
            while self.executor.plans_alike and self.scheduler.guidance.is_compiling:
                self._undelivered += self.scheduler.guidance.wake(_IDLE_WAIT)
            most = self.executor.max_in_flight
            while len(plans) < most and (plan := self.scheduler.schedule(self.clock())) is not None:
                plans.append(plan)
                self.first_scheduled += [new.request_id for new in plan.new_sequences]
                # Where `submit` computes, the masks are made meanwhile; else the engine makes them while it waits.
                if self.executor.computes_in_submit and self.scheduler.guidance.has_many:
                    self._guiding = self._aside.submit(self.scheduler.guide, plan)
                self._execute(self.executor.submit, plan)
            if plans:
                guide = self._guiding.result() if self._guiding is not None else self.scheduler.guide(plans[0])
                self._guiding = None
                result = self._execute(self.executor.collect, guide)
                self._undelivered += self.scheduler.update(plans.popleft(), result, self.clock())
            elif self.scheduler.guidance.is_compiling:  # nobody else can run: who comes meanwhile waits no longer
                self._undelivered += self.scheduler.guidance.wake(_IDLE_WAIT)
            elif self.places.awaiting:
                self._place_adapters(_IDLE_WAIT)
            self._publish()
            if self.debug:
                self.check_integrity()
        # Here no interrupt can come between the two: Python looks for them at calls and loops.
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def settle(self) -> None:
        """Unless a request runs, hand over what those that have ended leave to be written. No step waits for a disk."""
        while not self.scheduler.num_requests and (self._plans or self.scheduler.has_unfinished()):
            self._undelivered = self.step()

    def check_workers(self) -> None:
        """Raise EngineDeadError where one has died, or is no more like the others, while there is nothing to do."""
        self._check_alive()
        self._execute(self.executor.check)

    def reset_prefix_cache(self, closes_disk: bool = False, preempts: bool = False) -> bool:
        """Forget all cached prefixes, and pins; False (and nothing done) while requests hold blocks.

        Those on the disk stay, as the same tokens will still make the same blocks, unless it `closes_disk`. `preempts`:
        what runs gives its blocks up first, and is computed anew.
        """
        if preempts:
            self._start_over()
        if (done := self.scheduler.kv.reset_prefix_cache()) and closes_disk:
            self.close_disk()
        self._publish()
        return done

    def pin_prefix(self, name: str, token_ids: list[int], cache_salt: str | None) -> PinnedPrefix:
        """Keep the blocks of a prompt that was just computed: see `Scheduler.pin_prefix`."""
        require(isinstance(name, str), "name", name, "a string, or None for one that is made up")
        return self.scheduler.pin_prefix(name, token_ids, cache_salt)

    def unpin_prefix(self, name: str) -> bool:
        """Let a pinned prefix be evicted; False where there is none of this name."""
        require(isinstance(name, str), "name", name, "a string, as pin_prefix returned it")
        return self.scheduler.kv.pins.remove(name)

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """The pinned prefixes, in the order in which they were pinned."""
        return self.scheduler.kv.pins.listed()

    def hold(self, held: bool) -> None:
        """Keep requests as they are, and take no step; or go on.

        What ran goes back to its place, to be computed anew but for what the prefix cache holds: then nothing is in the
        way of other weights, or of sleep.
        """
        if held:
            self._start_over()
        self._held = held

    def sleep(self, level: int = 1, keep: bool = False) -> bool:
        """Give back the memory of weights and KV cache until `wake_up`; False (and nothing done) while requests run.

        Requests that come meanwhile are refused, and cached prefixes forgotten, but for those on the disk.

        Args:
            level: 1 wakes up with the weights that it had; 2 with those of its start, unless it is given others.
            keep: hold those that run; they go on once it is awake.
        """
        require(type(level) is int and level in (1, 2), "level", level, "1 or 2")
        if not self._begin_anew(keep):
            return False
        self._asleep, self._sleep_state = set(_PARTS), SLEEP_STATES[level]
        self.call_workers("sleep", [level])
        return True

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Load what the engine sleeps without, or first only "weights", or then "kv_cache", of that.

        Raises:
            InvalidRequestError: an unknown tag. RequestFailedError: the weights' files or the memory are gone.
        """
        known = isinstance(tags, Iterable | None) and all(str(tag) in _PARTS for tag in tags or ())
        require(known, "tags", tags, "a list of 'weights' and 'kv_cache'")
        wanted = self._asleep.intersection(tags or _PARTS)
        for part in ("weights", "kv_cache"):
            if part in wanted or (wanted and part == "weights"):
                self.call_workers("wake_up", [[part]])  # ranks meet for the cache: by then none has failed to load
                self._asleep.discard(part)
        if not self._asleep:
            self._sleep_state = SLEEP_STATES[0]

    def is_sleeping(self) -> bool:
        """Whether anything is missing."""
        return bool(self._asleep)

    def update_weights(self, path: str) -> bool:
        """Use the weights of another checkpoint of the same model, a directory; False while requests run.

        They are loaded beside those in use, unless the engine sleeps, and no cached prefix outlives the change.

        Raises:
            RequestFailedError: they are not there, broken, or another model's, and those in use stay so; or there is no
                memory left for the KV cache, which `wake_up` may be asked for again.
            EngineDeadError: some workers have them, and others could not.
        """
        if not self._begin_anew():
            return False
        self.call_workers("update_weights", [path])
        self._asleep.discard("weights")
        if "kv_cache" not in self._asleep:  # the worker that has them is a new one
            self._asleep, self._sleep_state = {"kv_cache"}, SLEEP_STATES[1]
            self.wake_up()
        if (disk := self.scheduler.kv.disk) is not None:
            disk.begin_anew()
        return True

    def call_workers(self, method: str, arguments: list[Any]) -> Returned:
        """Call a method of every worker, by name; what each returns, which has to be data.

        Raises:
            RequestFailedError: there is none of this name, or all refused.
            EngineDeadError: some did, so that workers are no more alike.
        """
        replies: list[Any] = self.executor.call(Invoke(method, arguments))
        faults = [reply.fault for reply in replies if reply.fault is not None]
        if faults and len(faults) < len(replies):
            self._dead = faults[0]
            raise EngineDeadError(f"the workers are no more alike: {faults[0]}")
        if faults:
            raise RequestFailedError(faults[0])
        if method not in ("sleep", "wake_up"):
            self.close_disk()
        return Returned([reply.value for reply in replies])

    def close_disk(self) -> None:
        """Workers may have other weights by now, for which names of blocks on the disk stand for others."""
        if (disk := self.scheduler.kv.disk) is not None:
            disk.close()

    def _begin_anew(self, keep: bool = False) -> bool:
        """Forget what workers know, and prefixes but for the disk's; False (and nothing done) while requests run.

        What runs may be planned anew where it is held, or to be kept.
        """
        self.settle()
        if self.has_unfinished() and not keep:
            return False
        self._start_over()
        self.reset_prefix_cache()
        self.places = AdapterPlaces(self.places.num_places, self.scheduler.is_live)
        for request in self.scheduler.await_adapters():
            self.places.add(request.request_id, request.adapter)
        return True

    def _start_over(self) -> None:
        """Plan and announce anew what is under way."""
        self._plans.clear()
        self.scheduler.cancel()
        if not self._asleep:  # whoever takes no other weights after all goes on
            self.executor.reset()

    def snapshot(self, watched: Iterable[str] = ()) -> EngineSnapshot:
        """The first sequences, those of `watched` requests, and the blocks at this moment."""
        return self.scheduler.snapshot(self.stats(), self.clock(), watched)

    def stop(self) -> None:
        """Stop the executor, and publish no more."""
        self._aside.shutdown()
        self.scheduler.guidance.close()
        self.executor.stop()
        if self._publisher is not None:
            self._publisher.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when scheduler, KV cache or rows are inconsistent."""
        self.scheduler.check_integrity()
        replies: list[Any] = self.executor.call(CheckIntegrity(self.scheduler.held_rows()))
        for reply in replies:
            assert reply.fault is None, reply.fault

    def _place_adapters(self, seconds: float) -> None:
        """Have workers load what requests await, and let those go on whose adapter is there."""
        while True:
            replies: list[Any] = []
            if wanted := self.places.wanted:
                replies = self._execute(self.executor.call, PlaceAdapters(wanted, seconds))
            failed = {own: why for reply in replies for own, why in reply.failed}
            ready = set.intersection(*(set(reply.ready) for reply in replies)) if replies else set[int]()
            adapters = dict(self.places.awaiting)
            found, lost = self.places.take(ready - failed.keys(), failed.keys())
            for request_id in found:
                self.scheduler.go_on(request_id)
            for request_id in lost:
                ref = adapters[request_id]
                failure = Failure(FailureKind.BAD_REQUEST, failed[ref.adapter_id], ref.param)
                self._undelivered += self.scheduler.fail(request_id, failure)
            if not (self.executor.plans_alike and self.places.loading):
                return

    def _execute(self, function: Callable[..., T], *args: Any) -> T:
        """Let the executor work, interruptibly; after an interrupt workers and scheduler begin anew."""
        try:
            try:
                return self.interrupts.let_through(function, *args)
            except KeyboardInterrupt:
                if self._guiding is not None:
                    self._guiding.result()
                self._guiding = None
                self._start_over()
                raise
        except EngineDeadError as error:  # it says what happened
            self._dead = str(error)
            raise
        except Exception as error:
            self._dead = f"{type(error).__name__}: {error}"
            raise EngineDeadError("the executor failed in a step; the engine can't go on") from error

    def _publish(self) -> None:
        if self._publisher is not None and (log := self.scheduler.kv.events) is not None and (events := log.take()):
            self._publisher.publish(events)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead since a step failed ({self._dead})")
