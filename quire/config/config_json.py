"""Reads a model's config.json and generation_config.json, by whichever names its family, or transformers, used.

`quire.config.model` asks it for the facts of a `ModelConfig`; every error names the key and the model. GGUF files say
the same in a config.json of their own (`quire.config.gguf`). Must not know options.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from quire.config.families import BY_ARCHITECTURE, BY_MODEL_TYPE, CLASSIFIER, WITH_TEXT, family_of
from quire.config.gguf import gguf_config
from quire.config.quantized import read_quantization
from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, NotYetSupportedError
from quire.sampling_params import GENERATION_KEYS, SamplingParams

logger = logging.getLogger(__name__)

# Of which max_position_embeddings is the scaled length already.
_UNSCALED_ROPE_TYPES = ("default", "llama3", "longrope", "mrope", "su")
_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")  # the last is Granite's for the first
_DEFAULT_MAX_MODEL_LEN = 2048  # where config.json names no length
_TOO_LARGE = 2**31  # no size of a model reaches it
# Names of files that are not read -> what to say of them.
_UNREAD = {
    r"\.gguf$": "It holds GGUF files: give one of them.",
    r"\.(bin|pt|pth|ckpt)$": "It holds pickle files (.bin, .pt, .pth), which can run code and are refused: convert "
    "them to safetensors, for example with transformers' save_pretrained.",
    r"^consolidated": "It holds Mistral's consolidated layout only: use the Hugging Face layout (model*.safetensors).",
    r"^adapter_": "It holds an adapter only: give the base model that the adapter was made for.",
}
_KEPT_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")  # of rope_parameters, under a rope_scaling


class HfConfig(dict[str, Any]):
    """What config.json says; its keys are attributes as well, as of transformers' configurations."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"config.json has no {name!r}.", name=name, obj=self)
        return self[name]


def read_config(path: Path, model: str, overrides: dict[str, Any]) -> tuple[HfConfig, dict[str, Any]]:
    """What the files of a model say: config.json with the overrides in it, and generation_config.json, {} without.

    Of a multi-modal model's the text part; with the quantization of its weights, checked, under "quantization_config".

    Raises:
        ConfigError: the overrides lose what they don't name.
        ModelLoadError: a file is missing, broken or contradictory.
        NotYetSupportedError: the checkpoint is quantized in a way that is not read.
    """
    stated, generation = gguf_config(path, model) or (
        read_json(path, "config.json", model),
        read_json(path, "generation_config.json", model) if (path / "generation_config.json").is_file() else {},
    )
    config = _text_part(stated | overrides)
    _refuse_lost_theta(_text_part(stated), config)
    if config.get("architectures") != (stated | overrides).get("architectures"):
        logger.info("%s is run without what it sees and hears with: it takes text alone", model)
    if "auto_map" in config:
        logger.debug("auto_map in config.json of %s is ignored: code from a checkpoint is never run", model)
    if (quantization := read_quantization(config, path, model, read_json)) is not None:
        config["quantization_config"] = quantization
    return HfConfig(config), generation  # worker processes have a plain one


def read_generation(source: str) -> dict[str, Any]:
    """What the option generation_config names: a file, or generation_config.json of a folder; {} of "vllm".

    Raises:
        ConfigError: neither is there. ModelLoadError: it can't be read, or is broken.
    """
    if source in ("vllm", "quire"):
        return {}
    file = Path(os.path.expanduser(source))
    file = file if os.path.isfile(file) else file / "generation_config.json"
    if not os.path.isfile(file):  # nor is a name that is too long
        what = "is neither 'auto' nor 'vllm', nor a folder with generation_config.json"
        raise ConfigError(f"generation_config={source[:200]!r} {what}.")
    return read_json(file.parent, file.name, source)


def parse_json(path: Path, owner: str) -> dict[str, Any]:
    """The object of a JSON file of a model's; ModelLoadError where it is broken or none, FileNotFoundError without."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelLoadError(f"{path.name} of {owner} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name} of {owner} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} of {owner} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_json(path: Path, file: str, model: str) -> dict[str, Any]:
    """Parse a JSON object from `path / file`; ModelLoadError says what is wrong with it."""
    try:
        return parse_json(path / file, f"model {model!r}")
    except FileNotFoundError:
        hint = describe_unsupported_files(path) or "Is it a model directory in Hugging Face layout?"
        raise ModelLoadError(f"Model {model!r} has no {file}. {hint}") from None


def describe_unsupported_files(path: Path) -> str | None:
    """One sentence on weights in `path` that Quire does not read (GGUF, pickle, Mistral's layout), or None."""
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return next((said for form, said in _UNREAD.items() if any(re.search(form, name) for name in names)), None)


class ConfigReader:
    """Reads one config.json by whichever names its family uses; every error names the key and the model."""

    def __init__(self, config: dict[str, Any], model: str) -> None:
        self.config, self.model = config, model
        model_type = config.get("model_type")
        self.model_type: str = model_type if isinstance(model_type, str) else ""
        self.family = family_of(self.model_type)
        self.architecture = self._architecture()
        self.family = family_of(self.model_type or self.architecture)

    def get(self, *names: str, default: Any = None) -> Any:
        """The value under the first of `names` that is there and not null, else the family's default or `default`."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        # A null in the file is a statement ("no sliding window"); only an absent key takes the family's default.
        if any(name in self.config for name in names):
            return default
        return next((self.family.defaults[name] for name in names if name in self.family.defaults), default)

    def positive_int(self, *names: str, default: int | None = None, most: int = _TOO_LARGE - 1) -> int:
        if (value := self.get(*names, default=default)) is None:
            known = self.architecture in BY_ARCHITECTURE
            hint = "" if known else f" Architecture {self.architecture!r} is not one that this version of Quire reads."
            raise self.error(f"has no {' or '.join(map(repr, names))}.{hint}")
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(f"has {names[0]} = {value!r}; it must be a whole number from 1 to {most}.")
        return value

    def error(self, complaint: str) -> ModelLoadError:
        return ModelLoadError(f"config.json of model {self.model!r} {complaint}")

    def shapes(self) -> dict[str, int]:
        """The sizes that ModelConfig has under the same names, checked against one another."""
        hidden = self.positive_int("hidden_size", "n_embd")
        heads = self.positive_int("num_attention_heads", "n_head")
        kv_heads = self.positive_int("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise self.error(f"has {heads} attention heads, which {kv_heads} key-value heads don't divide evenly.")
        derived_head_dim = hidden // heads if hidden % heads == 0 else None
        if derived_head_dim is None and self.get("head_dim") is None:
            raise self.error(f"has hidden_size = {hidden}, which {heads} attention heads don't divide evenly.")
        return {
            "vocab_size": self.positive_int("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.positive_int("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            "num_layers": self.positive_int("num_hidden_layers", "n_layer", most=10_000),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": self.positive_int("head_dim", default=derived_head_dim),
        }

    def rope_parameters(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """One form of `rope_parameters` (transformers 5) and `rope_scaling` + `rope_theta` (before it).

        The second is for layers with a window, where those have frequencies of their own.
        """
        scaling, parameters = self.config.get("rope_scaling") or {}, self.config.get("rope_parameters") or {}
        for key, rope in (("rope_scaling", scaling), ("rope_parameters", parameters)):
            if not isinstance(rope, dict):
                raise self.error(f"has {key} = {rope!r}; it must be an object or null.")
        plain = self.get("rope_theta", default=10000.0) if self.family.plain_windows else None
        local = self.get("rope_local_base_freq", default=plain)
        window = None if local is None else self._one_rope({}, {"rope_type": "default", "rope_theta": local})
        by_type = parameters or scaling
        if any(isinstance(value, dict) for value in by_type.values()):
            if window is None or set(by_type) - {"full_attention", "sliding_attention"}:
                raise NotYetSupportedError(
                    f"Model {self.model!r} has rope parameters per layer type, {', '.join(by_type)}: not supported yet."
                )
            for kind, value in by_type.items():
                if not isinstance(value, dict):
                    raise self.error(f"has {kind} = {value!r} among its rope parameters; it must be an object.")
            window = self._one_rope({}, window | by_type.get("sliding_attention", {}))
            scaling, parameters = {}, by_type.get("full_attention", {})
        return self._one_rope(scaling, parameters), window

    def _one_rope(self, scaling: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
        # A scaling says nothing of the frequencies that it scales.
        rope = {k: v for k, v in parameters.items() if not scaling or k in _KEPT_ROPE_KEYS} | scaling
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", self.get("rope_theta", default=10000.0))
        for key in ("rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"):
            if (value := rope.get(key)) is not None and not (_is_number(value) and 0 < value < _TOO_LARGE**2):
                raise self.error(f"has {key} = {value!r} among its rope parameters; it must be a number over 0.")
        if not isinstance(rope["rope_type"], str):
            raise self.error(f"has rope_type = {rope['rope_type']!r}; it must be a name.")
        return rope

    def derived_max_model_len(self, rope: dict[str, Any], requested: int | None) -> int:
        """Tokens that the position encoding supports, rope scaling included (the same rule as vLLM's)."""
        stated = self.get("model_max_length") is not None  # Cohere's
        names = ("model_max_length",) if stated else ("max_position_embeddings", "n_positions")
        if self.get(*names) is None:
            logger.warning("config.json of %s names no context length; %s assumed", self.model, _DEFAULT_MAX_MODEL_LEN)
        length = self.positive_int(*names, default=requested or _DEFAULT_MAX_MODEL_LEN)
        if self.family.learned_positions or self.family.scaled_length or rope["rope_type"] in _UNSCALED_ROPE_TYPES:
            return length
        if rope["rope_type"] == "yarn":
            length = rope.get("original_max_position_embeddings") or length
        return int(length * (rope.get("factor") or 1.0))

    def num_labels(self) -> int:
        """Classes that the model's head tells apart, as transformers has it; 0 where it is for tokens."""
        if not self.architecture.endswith(CLASSIFIER):
            return 0
        if (tokens := self.get("classifier_from_token")) is not None:
            two = self.get("is_original_qwen3_reranker") or self.get("method") == "from_2_way_softmax"
            fits = isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens)
            if not fits or (two and len(tokens) != 2) or not (two or self.get("method") == "no_post_processing"):
                what = "a list of tokens with the method 'no_post_processing', or of two with 'from_2_way_softmax'"
                raise self.error(f"has classifier_from_token = {tokens!r}; it must be {what}.")
            return 1 if two else len(tokens)
        labels = self.get("id2label", default={})
        return self.positive_int("num_labels", default=len(labels) if isinstance(labels, dict) and labels else 2)

    def layer_windows(self, num_layers: int) -> tuple[int | None, ...]:
        """The sliding window of each layer: by `layer_types`, else by the family's older keys."""
        layer_types, switch = self.get("layer_types"), self.family.window_switch
        if layer_types is not None:
            if not isinstance(layer_types, list):
                raise self.error(f"has layer_types = {layer_types!r}; it must be a list.")
            if other := [kind for kind in layer_types if kind not in _LAYER_TYPES]:
                raise NotYetSupportedError(f"Model {self.model!r} has layers of type {other[0]!r}: not supported yet.")
            if len(layer_types) != num_layers:
                raise self.error(f"has {len(layer_types)} layer_types for {num_layers} layers.")
        if self.get("sliding_window") is None or (switch and not self.get(switch, default=False)):
            return (None,) * num_layers
        window = self.positive_int("sliding_window")
        if layer_types is not None:
            return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
        self.positive_int("sliding_window_pattern", default=1)
        first = self.get("max_window_layers", default=0)
        if type(first) is not int:
            raise self.error(f"has max_window_layers = {first!r}; it must be a whole number.")
        return tuple(window if self.family.windowed(self.get, layer) else None for layer in range(num_layers))

    def _architecture(self) -> str:
        if (names := self.config.get("architectures")) is None and self.family.architecture:
            return self.family.architecture
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        raise self.error(
            "doesn't say which architecture it is: add \"architectures\", for example ['LlamaForCausalLM'], "
            'to the file or to hf_overrides, or a "model_type" among ' + ", ".join(BY_MODEL_TYPE) + "."
        )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multi-modal config.json, under the architecture of the whole if it is not run."""
    text, names = config.get("text_config"), config.get("architectures")
    runs = isinstance(names, list) and not WITH_TEXT.isdisjoint(map(str, names[:1]))
    text = dict(text) if isinstance(text, dict) else {}  # it may stand among what all have
    if "tie_word_embeddings" in config and text.get("model_type") == "qwen3_vl_moe_text":
        text.pop("tie_word_embeddings", None)  # true by default there, and not so
    whole = {key: value for key, value in config.items() if key != "text_config"}
    part = whole | text | {key: whole[key] for key in ("architectures", "tie_word_embeddings") if whole.get(key)}
    family = family_of(part.get("model_type"))
    return part | ({"architectures": [family.architecture]} if runs and family.architecture else {})


def _refuse_lost_theta(stated: dict[str, Any], config: dict[str, Any]) -> None:
    """Overrides that replace rope_parameters must not lose the base of its frequencies without a word."""

    def theta(source: dict[str, Any]) -> Any:
        places = (source.get("rope_scaling"), source.get("rope_parameters"), source)
        return next((one["rope_theta"] for one in places if isinstance(one, dict) and "rope_theta" in one), None)

    if theta(config) is None and theta(stated) is not None:
        raise ConfigError(
            f"hf_overrides replaces rope_parameters, in which config.json names rope_theta = {theta(stated)!r}, by one "
            f"without: add 'rope_theta': {theta(stated)!r} to it, or override rope_scaling, which keeps it."
        )


def eos_token_ids(*files: dict[str, Any]) -> tuple[int, ...]:
    """The token ids that are each file's `eos_token_id`: null, one id, or a list."""
    stated = [file.get("eos_token_id") for file in files]
    ids = [token_id for value in stated for token_id in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(token_id for token_id in ids if type(token_id) is int and token_id >= 0))


def generation_defaults(generation: dict[str, Any], model: str) -> dict[str, Any]:
    """The sampling values that generation_config.json states; what no request may have is left out, with a warning."""
    defaults: dict[str, Any] = {}
    for key in GENERATION_KEYS:
        if (value := generation.get(key)) is None:
            continue
        try:
            SamplingParams.from_generation_defaults({key: value})
            defaults[key] = value
        except InvalidRequestError as error:
            logger.warning("generation_config.json of %s: %s = %r ignored: %s", model, key, value, error)
    return defaults


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _TOO_LARGE**2
