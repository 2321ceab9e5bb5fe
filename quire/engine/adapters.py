"""The adapters that requests have named: each id stands for one adapter, whose files were read when it came first.

The engine's front end keeps one. Whether an adapter suits the model a worker finds out when it loads it.
"""

import threading

from quire.errors import InvalidRequestError
from quire.lora.request import LoRARequest
from quire.models.peft import read_adapter
from quire.protocol.requests import AdapterRef


class AdapterBook:
    """Id -> adapter.

    Args:
        max_rank: None where the engine takes no adapters.
    """

    def __init__(self, max_rank: int | None) -> None:
        self._max_rank = max_rank
        self._known: dict[int, AdapterRef] = {}
        self._lock = threading.Lock()

    def knows(self, request: LoRARequest | None) -> bool:
        """Whether `find` has no file to read."""
        return request is None or self._known.get(getattr(request, "lora_int_id", 0)) is not None

    def find(self, request: LoRARequest | None) -> AdapterRef | None:
        """The adapter that a request names, if any.

        Raises:
            InvalidRequestError: this engine takes none, the id is another adapter's, or the files can't be used.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            what = f"must be a quire.lora.request.LoRARequest, got {type(request).__name__}"
            raise InvalidRequestError(f"lora_request {what}.", "lora_request")
        if self._max_rank is None:
            raise InvalidRequestError("lora_request needs an engine with enable_lora=True.", "lora_request")
        own, name, path = request.lora_int_id, request.lora_name, request.lora_path
        with self._lock:
            ref = self._known.get(own)
            if ref is None:
                digest = read_adapter(path, name, self._max_rank).digest
                ref = self._known[own] = AdapterRef(own, digest, name, path)
        if ref.path != path:
            raise InvalidRequestError(
                f"lora_int_id={own} stands for the adapter {ref.name!r}, and {name!r} has another lora_path: give it "
                "another id.",
                "lora_request",
            )
        return ref
