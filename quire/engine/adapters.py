"""The adapters that requests have named: each id stands for one adapter, whose files were read when it came first.

The engine's front end keeps one. Whether an adapter suits the model a worker finds out when it loads it.
"""

import threading
from contextlib import nullcontext
from dataclasses import astuple

from quire.config.engine_args import EngineArgs
from quire.errors import InvalidRequestError, require
from quire.lora.request import AdapterRequest, LoRARequest, PromptAdapterRequest, one_adapter
from quire.models.peft import AdapterError, read_adapter
from quire.protocol.requests import NUM_IDS, AdapterRef


class AdapterBook:
    """Id -> adapter.

    Args:
        args: which adapters the engine takes.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args, self._lock = args, threading.Lock()
        self._known: dict[int, AdapterRef] = {}

    def knows(self, request: AdapterRequest | None) -> bool:
        """Whether `find` has no file to read."""
        return not isinstance(request, AdapterRequest) or (astuple(request)[1] in self._known and not _reloads(request))

    def find(
        self, request: AdapterRequest | None, prompt_adapter: PromptAdapterRequest | None = None
    ) -> AdapterRef | None:
        """The adapter that a request names, if any, by the one parameter or the other.

        Raises:
            InvalidRequestError: this engine takes none, the id is another adapter's, or the files can't be used; or
                a request names two.
        """
        if (request := one_adapter(request, prompt_adapter)) is None:
            return None
        param = "lora_request" if prompt_adapter is None else "prompt_adapter_request"
        require(isinstance(request, AdapterRequest), param, request, "a LoRARequest or a PromptAdapterRequest")
        is_lora = isinstance(request, LoRARequest)
        param, option = ("lora_request", "lora") if is_lora else ("prompt_adapter_request", "prompt_adapter")
        if not getattr(self._args, f"enable_{option}"):
            raise InvalidRequestError(f"{param} needs an engine with enable_{option}=True.", param)
        name, own, path, *stated = astuple(request)[: 3 if is_lora else 4]
        with nullcontext() if self.knows(request) else self._lock:  # who is known waits for no other's files
            if (ref := self._known.get(own)) is None or _reloads(request):
                try:
                    files = read_adapter(path, name, self._args.max_lora_rank, self._args.max_prompt_adapter_token)
                except AdapterError as error:
                    error.param = param
                    raise
                version = own if ref is None else ref.adapter_id + NUM_IDS  # what runs keeps its own
                read = AdapterRef(version, files.digest, name, path, *files.shape[:1])
                if stated != [*files.shape[:1]]:
                    what = f"the adapter {name!r} has {read.num_virtual} virtual tokens (0: it is a LoRA)"
                    raise InvalidRequestError(f"{what}, and {sum(stated)} by what the request says of it.", param)
                if ref is None or (ref.digest, ref.path) != (read.digest, path):
                    self._known[own] = ref = read
        if (ref.path, ref.param) != (path, param):
            what = f"{'lora_int' if is_lora else 'prompt_adapter'}_id={own} stands for the adapter {ref.name!r}"
            raise InvalidRequestError(f"{what}, and {name!r} has another path: give it another id.", param)
        return ref


def _reloads(request: AdapterRequest) -> bool:
    return isinstance(request, LoRARequest) and request.load_inplace
