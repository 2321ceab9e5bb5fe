"""A worker's adapters: read in a thread beside the steps, kept in memory, and put in their places between two steps.

The engine says which adapter belongs in which place, and says it again until that is so. It decides who makes room
there; here only those that were unused for longest, and are in no place, are forgotten.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from quire.attention.step import AdapterBatch
from quire.lora.slots import Packed
from quire.models.adapters import load_adapter
from quire.models.causal_lm import CausalLM
from quire.models.peft import AdapterError, read_adapter
from quire.ops.native.library import torch_threads
from quire.protocol.requests import AdapterRef
from quire.protocol.worker import AdapterReply, PlaceAdapters
from quire.utils.child import work_behind_others
from quire.worker.rows import Row


class Adapters:
    """Those of one model, which has places for them.

    Args:
        max_held: most adapters in memory.
    """

    def __init__(self, model: CausalLM, max_held: int) -> None:
        self._model, self._max_held = model, max_held
        self._held: dict[int, Packed] = {}  # by id; the one used last at the end
        self._loading: dict[int, Future[Packed]] = {}
        self._places: dict[int, int] = {}  # id -> place
        self._threads = ThreadPoolExecutor(1, "quire-adapters", work_behind_others)

    def place(self, call: PlaceAdapters) -> AdapterReply:
        """Put those that are loaded where they belong, and load the others; waits for `call.seconds` at most."""
        wanted, loading = {ref.adapter_id: (slot, ref) for slot, ref in call.wanted}, self._loading
        for own in [own for own, one in loading.items() if own not in wanted and (one.cancel() or one.done())]:
            del loading[own]  # whoever awaited it has left
        for own in [own for own in wanted if own not in self._held and own not in loading]:
            loading[own] = self._threads.submit(self._load, wanted[own][1])
        wait([loading[own] for own in wanted if own in loading], call.seconds)
        ready, failed = list[int](), list[tuple[int, str]]()
        for own, (slot, ref) in wanted.items():
            if own in loading and loading[own].done():
                try:
                    self._held[own] = loading.pop(own).result()
                except Exception as error:  # whatever its files hold, it is the fault of nobody else
                    known = isinstance(error, AdapterError)
                    failed.append((own, str(error if known else AdapterError(ref.name, f"{error!r}."))))
            if own in self._held:
                self._put(slot, own)
                ready.append(own)
        return AdapterReply(ready, failed)

    def batch(self, rows: Sequence[Row], ends: Sequence[int]) -> AdapterBatch | None:
        """The place of each token's adapter, where a row has any; `ends` as of `quire.worker.gather.StepBatch`."""
        if not any(row.request.adapter for row in rows):
            return None
        slots = np.full(ends[-1], -1, np.int32)
        for row, start, end in zip(rows, [0, *ends], ends, strict=False):
            if (ref := row.request.adapter) is not None:
                virtual = max(0, ref.num_virtual - row.num_computed) if ref.num_virtual else end
                # Without a place where its request ended while the plan was in flight: nobody hears of its tokens.
                slots[start : min(end, start + virtual)] = self._places.get(ref.adapter_id, -1)
        device = next(self._model.parameters()).device
        return AdapterBatch(torch.from_numpy(slots), device) if slots.max() >= 0 else None

    def close(self) -> None:
        """Load no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _put(self, slot: int, own: int) -> None:
        assert self._model.lora is not None, "the model has no places for adapters"
        for other in [other for other, place in self._places.items() if place == slot]:
            del self._places[other]
        self._places[own] = slot
        self._held[own] = packed = self._held.pop(own)
        self._model.lora.put(slot, packed)
        idle = [other for other in self._held if other not in self._places]
        for other in idle[: max(0, len(self._held) - self._max_held)]:
            del self._held[other]

    def _load(self, ref: AdapterRef) -> Packed:
        files = read_adapter(ref.path, ref.name)
        if files.digest != ref.digest:
            raise AdapterError(ref.name, "its files have changed since it was first used; give it a new lora_int_id.")
        with torch_threads(1):  # others' are for steps
            return load_adapter(self._model, files)
