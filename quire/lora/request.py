"""How a caller names the adapter that a request runs with, as vLLM has it."""

from dataclasses import dataclass

from quire.errors import InvalidRequestError
from quire.utils.values import number


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: passed to `LLM.generate` and its like.

    Attributes:
        lora_name: for people.
        lora_int_id: at least 1; stands for this adapter for as long as the engine lives.
        lora_path: its folder, with adapter_config.json and adapter_model.safetensors as PEFT writes them.

    Raises:
        InvalidRequestError: a name or path that is no text, or an id out of its range.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not (isinstance(value := getattr(self, name), str) and value):
                raise InvalidRequestError(f"{name} must be a non-empty text, got {repr(value)[:80]}.", "lora_request")
        if (found := number(self.lora_int_id, int)) is None or not 1 <= found < 2**31:
            got, most = repr(self.lora_int_id)[:80], 2**31 - 1
            raise InvalidRequestError(f"lora_int_id must be an integer from 1 to {most}, got {got}.", "lora_request")
