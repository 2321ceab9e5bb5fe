"""What an adapter's files say, as PEFT writes them: which is checked here, before any tensor is read.

A LoRA's tensors are factors; virtual tokens (prompt tuning, P-tuning, prefix tuning) have one table of what stands for
them. The engine's front end reads files when an adapter is first named, a worker when it loads one. A file is named in
messages without its folder. Knows no model: whether the shapes are those of its layers is found out there. No torch.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire.errors import InvalidRequestError
from quire.utils.values import number

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
VIRTUAL = "prompt_embeddings"  # the tensor of virtual tokens
_KINDS = ("LORA", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
# What an adapter may not ask for; where the value is one of these, it does not.
_REFUSED = {
    "use_dora": "magnitudes of its own (DoRA)",
    "modules_to_save": "whole modules of its own",
    "bias": "biases of its own",
    "lora_bias": "biases of its own",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "token embeddings of its own",
    "target_parameters": "parameters that are no modules",
    "alora_invocation_tokens": "that it begins at some token only (aLoRA)",
    "init_lora_weights": "a base model that was changed first (where this engine runs that one, set it to true)",
}
_NOTHING = (None, False, "none", [], {}, "")
_CHANGES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # of init_lora_weights, what subtracts from the base model
# Of a tensor: its module, which factor.
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?(A|B)(?:\.default)?(?:\.weight)?")
# A pattern of modules: what is matched in no time, with few repetitions and alternatives, and no group repeated.
_ALTERNATIVE = r"\^?((\\[.dw]|\[[\w-]+\]|[\w.-])[*+?]?|\((\?:)?\w+(\|\w+)*\))*\$?"
_PATTERN = re.compile(rf"(?!([^*+?]*[*+?]){{4}})(?!([^|]*\|){{9}}){_ALTERNATIVE}(\|{_ALTERNATIVE})*")


class AdapterError(InvalidRequestError):
    """An adapter's files, or what they are for, can't be used."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"the adapter {name!r} can't be used: {what}", "lora_request")


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as its files describe it.

    Attributes:
        digest: of all of it, SHA-256.
        tensors: by module and factor ("A" or "B"), names of tensors and their shapes.
        config: adapter_config.json.
        shape: of the virtual tokens' tensor; () of a LoRA.
    """

    name: str
    path: Path
    digest: bytes
    tensors: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]
    config: Mapping[str, Any]
    shape: tuple[int, ...] = ()

    def rank(self, module: str) -> int:
        """What the configuration says of a module (its name in the base model)."""
        return self._of(module, "rank_pattern", "r", 8)

    def scale(self, module: str) -> float:
        """What ``B A x`` is multiplied by."""
        rank, alpha = self.rank(module), self._of(module, "alpha_pattern", "lora_alpha", 8)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _of(self, module: str, pattern: str, name: str, default: int) -> Any:
        own = (self.config.get(pattern) or {}).items()
        return next((one for key, one in own if re.match(rf"(.*\.)?({key})$", module)), self.config.get(name, default))


def read_adapter(path: str, name: str, max_rank: int = MAX_RANK, max_virtual: int = 2**31) -> AdapterFiles:
    """An adapter's description.

    Raises:
        AdapterError: files that are missing, damaged, pickles, or ask for what there is not; the message says which.
    """
    folder = Path(os.path.expanduser(path))
    text, config = _read_config(folder, name)
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickles = sorted(file.name for file in folder.glob("adapter_model.*") if file.suffix in (".bin", ".pt", ".pth"))
        why = f"{pickles[0]} is a pickle, which could run anything" if pickles else f"{WEIGHTS} is missing"
        raise AdapterError(name, f"{why}; save it again with safe_serialization=True.")
    try:
        with safe_open(weights, framework="np") as file:  # PEFT saves tables beside their factors, as they were
            names = [tensor for tensor in file.keys() if not tensor.endswith(".base_layer.weight")]  # noqa: SIM118
            shapes = {tensor: tuple(file.get_slice(tensor).get_shape()) for tensor in names}
        with weights.open("rb") as raw:  # piece by piece: nobody waits for this thread to let go of the interpreter
            digest = hashlib.file_digest(raw, lambda: hashlib.sha256(text)).digest()
    except (SafetensorError, OSError) as error:
        raise AdapterError(name, f"{WEIGHTS} is truncated or damaged ({error}); fetch it again.") from None
    if config["peft_type"] != "LORA":
        _check_virtual(name, config, shapes, max_virtual)
        return AdapterFiles(name, folder, digest, {}, config, shapes[VIRTUAL])
    tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for tensor, shape in shapes.items():
        if (found := _NAME.fullmatch(tensor)) is None or len(shape) != 2:
            raise AdapterError(name, f"{WEIGHTS} has a tensor {tensor!r} {list(shape)}, which is no factor of a LoRA.")
        tensors.setdefault(found[1], {})[found[2]] = tensor, shape
    files = AdapterFiles(name, folder, digest, tensors, config)
    if not tensors:
        raise AdapterError(name, f"{WEIGHTS} has no tensors.")
    for module in tensors:
        _check_module(files, module, max_rank)
    return files


def num_virtual_tokens(path: str, name: str) -> int:
    """How many an adapter's configuration says that it has, 0 of a LoRA; whether it has them `read_adapter` says."""
    _, config = _read_config(Path(os.path.expanduser(path)), name)
    return 0 if config["peft_type"] == "LORA" else number(config.get("num_virtual_tokens"), int) or 1


def _read_config(folder: Path, name: str) -> tuple[bytes, dict[str, Any]]:
    try:
        text = (folder / CONFIG).read_bytes()
        config = json.loads(text)
    except OSError as error:
        raise AdapterError(name, f"its folder has no {CONFIG} that can be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(name, f"{CONFIG} is no JSON ({error}).") from None
    if (kind := config.get("peft_type") if isinstance(config, dict) else None) not in _KINDS:
        raise AdapterError(name, f"{CONFIG} says peft_type {kind!r:.80}; what can be served is {', '.join(_KINDS)}.")
    for key, what in _REFUSED.items():
        changes = key != "init_lora_weights" or str(config.get(key)).startswith(_CHANGES)
        if changes and config.get(key) not in _NOTHING:
            raise AdapterError(name, f"{CONFIG} asks by {key}={config[key]!r:.80} for {what}; merge, or train without.")
    for key, kind, least in (("r", int, 1), ("lora_alpha", int | float, 0)):
        patterns = config.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
        for value in [config.get(key, 8), *(patterns.values() if isinstance(patterns, dict) else [str(patterns)])]:
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
                raise AdapterError(name, f"{CONFIG} has {key}={value!r:.80}, which must be a number from {least} on.")
        if strange := [pattern for pattern in patterns if not _PATTERN.fullmatch(pattern)]:
            raise AdapterError(name, f"{CONFIG} has {strange[0][:80]!r}, where names and few wildcards are to be.")
    return text, config


def _check_virtual(name: str, config: Mapping[str, Any], shapes: Mapping[str, Any], most: int) -> None:
    stated, shape = number(config.get("num_virtual_tokens"), int), shapes.get(VIRTUAL, ())
    if [*shapes] != [VIRTUAL] or len(shape) != 2 or not shape[0] or shape[0] != stated:
        found = {tensor: [*size] for tensor, size in shapes.items()}
        wanted = f"{VIRTUAL!r} [{stated}, width] alone, as num_virtual_tokens in {CONFIG} says"
        raise AdapterError(name, f"{WEIGHTS} has {str(found)[:200]}, and must have {wanted}.")
    if shape[0] > most:
        raise AdapterError(name, f"it has {shape[0]} virtual tokens, over max_prompt_adapter_token={most}.")


def _check_module(files: AdapterFiles, module: str, max_rank: int) -> None:
    """Both factors are there, and of the rank that the configuration says."""
    factors, rank = files.tensors[module], files.rank(module)
    if len(factors) < 2:
        raise AdapterError(files.name, f"{WEIGHTS} has but one factor for {module!r}; fetch it again.")
    (tensor, a), (_, b) = factors["A"], factors["B"]
    if not a[0] == b[1] == rank:
        both = f"{tensor!r} {list(a)} and its B {list(b)}"
        raise AdapterError(files.name, f"{both} are not of rank {rank}, as {CONFIG} says they are.")
    if rank > max_rank:
        raise AdapterError(files.name, f"{module!r} has rank {rank}, over max_lora_rank={max_rank} (256 at most).")
