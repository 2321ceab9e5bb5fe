"""What a checkpoint says of how its weights are quantized, in config.json or in the files that older tools wrote.

Called where a model's configuration is read: a method or setting that no reader of `quire.models.quantized` knows is
refused here, before any weight is looked for. Must not know tensors.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from quire.errors import ConfigError, ModelLoadError, NotYetSupportedError

logger = logging.getLogger(__name__)

MadeMethod = Literal["int8", "int4", "w8a8", "w4a8"]  # of plain checkpoints, as weights are loaded
KeptMethod = Literal["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4"]  # a checkpoint's own
MADE_METHODS, METHODS = get_args(MadeMethod), get_args(KeptMethod)
_ALIASES = {"fbgemm_fp8": "fp8", "gptqmodel": "gptq", "auto_gptq": "gptq", "compressed_tensors": "compressed-tensors"}
_OLDER_FILES = ("quantize_config.json", "quant_config.json")  # of GPTQ's and AWQ's tools
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_FORMATS += ("mxfp4-pack-quantized", "mixed-precision")
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
# A pattern that may be matched for ever: a group repeated; over four repetitions, or groups; too long.
_ENDLESS = re.compile(r"re:(.*\)[*+{]|([^*+{]*[*+{]){5}|([^(]*\(){5}|.{400})", re.DOTALL)
_VERSIONS = {"gptq": (None, "gptq", "gptq_v2"), "awq": ("gemm", "gemv")}


def read_quantization(
    config: Mapping[str, Any], path: Path, model: str, read_json: Callable[[Path, str, str], dict[str, Any]]
) -> dict[str, Any] | None:
    """The quantization of a checkpoint, its method under "quant_method" and checked; None where there is none.

    Raises:
        ModelLoadError: a setting that is none. NotYetSupportedError: a method, or a form of one, that is not read.
    """
    stated = config.get("quantization_config") or config.get("compression_config")
    if not stated and path.is_dir():
        older = next((name for name in _OLDER_FILES if (path / name).is_file()), None)
        stated = read_json(path, older, model) if older else None
        if stated:
            stated = {"quant_method": "awq" if "w_bit" in stated else "gptq"} | stated
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise ModelLoadError(f"config.json of {model!r} has quantization_config = {stated!r}; it must be an object.")
    method = stated.get("quant_method", "bitsandbytes" if "load_in_4bit" in stated else "unnamed")
    method = _ALIASES.get(str(method), method)
    if method == "gguf":
        return stated
    if method not in METHODS:
        raise NotYetSupportedError(
            f"Model {model!r} is quantized with {method!r}, which is not supported: use an unquantized checkpoint, or "
            f"one quantized with {', '.join(METHODS)}."
        )
    found = stated | {"quant_method": method}
    if method == "compressed-tensors":
        _check_groups(found, model)
    elif method in _BITS:
        _check_integers(found, method, model)
    if str(found.get("activation_scheme", "dynamic")) == "static" or _rounds_otherwise(found):
        logger.info("%s names a quantization of activations: they are kept in the model's type here", model)
    return found


def check_method(requested: str | None, config: Mapping[str, Any], model: str, on_gpu: bool = False) -> str | None:
    """The format of weights to run with: the checkpoint's own, or one made at load time; a GPU makes "fp8", too.

    Raises:
        ConfigError: the one asked for contradicts what the checkpoint says.
    """
    found, requested = config.get("quantization_config"), requested and requested.removesuffix("_marlin")  # as vLLM
    method = found["quant_method"] if found else None
    made = requested in (None, *MADE_METHODS) or (on_gpu and requested == "fp8")
    if found and requested not in (None, method):
        what = f"{method}: {', '.join(found['types'])}" if "types" in found else method
        raise ConfigError(
            f"quantization={requested!r} contradicts model {model!r}, whose weights are quantized already "
            f"({what}): leave it out, or use a plain checkpoint."
        )
    if not found and not made:
        raise ConfigError(
            f"quantization={requested!r} contradicts model {model!r}, whose config.json says that its weights are not "
            f"quantized: leave it out, or choose one of {', '.join(map(repr, MADE_METHODS))}, made at load time."
        )
    return requested or method


def _check_integers(found: dict[str, Any], method: str, model: str) -> None:
    """Of GPTQ and AWQ: brings their settings to "bits", "group_size" and "version"."""
    found["bits"] = found.get("bits", found.get("w_bit"))
    found["group_size"] = found.get("group_size", found.get("q_group_size"))
    version = found.get("checkpoint_format") if method == "gptq" else str(found.get("version", "gemm")).lower()
    found["version"] = version
    if type(found["bits"]) is not int or found["bits"] not in _BITS[method]:
        raise ModelLoadError(
            f"Model {model!r} is quantized with {method} to {found['bits']!r} bits; supported are "
            f"{', '.join(map(str, _BITS[method]))}."
        )
    size = found["group_size"]
    if type(size) is not int or not (size == -1 or 0 < size < 2**20):
        raise ModelLoadError(f"Model {model!r} has group_size = {size!r}; it must be a whole number over 0, or -1.")
    if version not in _VERSIONS[method]:
        raise NotYetSupportedError(
            f"Model {model!r} has {method} weights in the layout {version!r}, which is not read; supported are "
            f"{', '.join(map(repr, filter(None, _VERSIONS[method])))}: convert it, or use another checkpoint."
        )


def _groups(found: Mapping[str, Any]) -> list[Any]:
    groups = found.get("config_groups") or {}
    return list(groups.values()) if isinstance(groups, dict) else [groups]


def _rounds_otherwise(found: Mapping[str, Any]) -> bool:
    """Whether activations are to be rounded to something else than the integers of eight bits that products take."""
    all_told = [group.get("input_activations") for group in _groups(found) if isinstance(group, dict)]
    return any(told and (told.get("num_bits"), told.get("type", "int")) != (8, "int") for told in all_told)


def _check_groups(found: dict[str, Any], model: str) -> None:
    """Of compressed-tensors."""
    sparsity = found.get("sparsity_config") or {}
    sparsity = (sparsity.get("format") if isinstance(sparsity, dict) else sparsity) or "dense"
    formats = [found.get("format"), *(group.get("format") for group in _groups(found) if isinstance(group, dict))]
    unread = next((name for name in formats if name is not None and name not in _FORMATS), None)
    if sparsity != "dense" or unread:
        what = f"a format {unread!r}" if unread else f"sparse weights ({sparsity!r})"
        raise NotYetSupportedError(
            f"Model {model!r} has {what} of compressed-tensors, which is not supported; supported are "
            f"{', '.join(_FORMATS)}, none of them sparse."
        )
    for group in _groups(found):
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = weights.get("num_bits") if isinstance(weights, dict) else None
        if bits not in (4, 8):
            raise ModelLoadError(f"Model {model!r} has weights of {bits!r} bits in its config_groups, not 4 or 8.")
        targets: Any = group.get("targets")
        try:
            if not isinstance(targets, list) or not isinstance(group.get("input_activations") or {}, dict):
                raise TypeError("it must be a list, and input_activations an object or null")
            for target in targets:
                if _ENDLESS.match(target):
                    raise TypeError("a pattern may take for ever; name the modules, or use few wildcards")
                re.compile(target)
        except (re.error, TypeError) as error:
            raise ModelLoadError(f"Model {model!r} has config_groups with targets {targets!r:.99}: {error}.") from None
