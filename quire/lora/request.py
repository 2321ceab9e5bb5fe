"""How a caller names the adapter that a request runs with, as vLLM has it."""

from dataclasses import dataclass, field

from quire.errors import InvalidRequestError, require
from quire.utils.values import number, plain


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: passed to `LLM.generate` and its like.

    Attributes:
        lora_name: for people.
        lora_int_id: at least 1; stands for this adapter for as long as the engine lives, but for `load_inplace`.
        lora_path: its folder, with adapter_config.json and adapter_model.safetensors as PEFT writes them.
        base_model_name: for people; the engine runs with one model.
        load_inplace: read the files anew: from now on the id stands for what they hold; what runs keeps the other.

    Raises:
        InvalidRequestError: a name or path that is no text, or an id out of its range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = field(default=False, kw_only=True)
    name = property(lambda self: self.lora_name)
    path = property(lambda self: self.lora_path)
    adapter_id = property(lambda self: self.lora_int_id)

    def __post_init__(self) -> None:
        _check(self, "lora_request")


@dataclass(frozen=True)
class PromptAdapterRequest:
    """An adapter of virtual tokens, which stand before the prompt: passed likewise.

    Attributes:
        prompt_adapter_name: for people.
        prompt_adapter_id: as `LoRARequest.lora_int_id`, of which none may be the same.
        prompt_adapter_local_path: as `LoRARequest.lora_path`.
        prompt_adapter_num_virtual_tokens: how many it has, as its files say, too.

    Raises:
        InvalidRequestError: as by `LoRARequest`.
    """

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def __post_init__(self) -> None:
        _check(self, "prompt_adapter_request")


AdapterRequest = LoRARequest | PromptAdapterRequest  # both begin with name, id and path


def one_adapter(lora_request: AdapterRequest | None, other: AdapterRequest | None) -> AdapterRequest | None:
    """What a request runs with, of the two that may be named. Raises InvalidRequestError for both."""
    if lora_request is not None and other is not None:
        message = "a request runs with a LoRA or with a prompt adapter: leave out lora_request or this"
        raise InvalidRequestError(f"{message}.", "prompt_adapter_request")
    return lora_request if other is None else other


def _check(request: AdapterRequest, param: str) -> None:
    for name, value in vars(request).items():
        if name.endswith(("_name", "_path")):
            value = vars(request)[name] = plain(value)
            if not (isinstance(value, str) and value) and (name, value) != ("base_model_name", None):
                raise InvalidRequestError(f"{name} must be a non-empty text, got {repr(value)[:80]}.", param)
        elif name == "load_inplace":
            require(isinstance(value, bool), f"{param}.{name}", value, "True or False")
        elif (found := number(value, int)) is None or not 1 <= found < 2**31:
            raise InvalidRequestError(f"{name} must be an integer from 1 to {2**31 - 1}, got {value!r:.80}.", param)
