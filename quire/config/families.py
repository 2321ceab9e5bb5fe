"""The model families that have an implementation: one line each, and what their config.json leaves unsaid.

`quire.config.model` reads shapes and windows by it, `quire.text.files` the tokenizer's class, `quire.models.registry`
finds the shape; `quire.config.engine_args` asks which way of drafting a checkpoint is for. Knows no torch: what says
the shape is a name, imported when a model is built.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError, ModelLoadError

Get = Callable[..., Any]  # get(key, default=None): a value of config.json, or the family's default
WindowRule = Callable[[Get, int], bool]


def _by_pattern(get: Get, layer: int) -> bool:
    """Every layer, or all but every so manieth one where there is a pattern."""
    every = get("sliding_window_pattern", default=0)
    return not every or (layer + 1) % every > 0


def _late_layers(get: Get, layer: int) -> bool:
    """From max_window_layers on."""
    return layer >= get("max_window_layers", default=28)


def _early_even_layers(get: Get, layer: int) -> bool:
    """Every other layer before max_window_layers."""
    return layer % 2 == 0 and layer < get("max_window_layers", default=28)


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: config.json's, under which it is found where no architecture is named.
        shape: where it is said in quire.models what is built, "module:function".
        defaults: what transformers assumes where a key is absent, as far as that differs between the families.
        learned_positions: they are a table of the checkpoint, which no scaling makes longer.
        scaled_length: max_position_embeddings has a scaling of the positions in it already.
        windowed: whether a layer has the sliding window, where config.json names one and no `layer_types`.
        plain_windows: layers with a window rotate by rope_theta, without the scaling of the others.
        window_switch: the key that must be true for any layer to have it; "" for none.
        text_of: model_types of what reads text in models that see or hear, where it is like this family.
        tokenizer_class: the class that reads the tokenizer's files; "" takes them as they are.
        tokenizer_overrides: it does so whatever tokenizer_config.json says.
    """

    architecture: str
    model_type: str
    shape: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    learned_positions: bool = False
    scaled_length: bool = False
    windowed: WindowRule = _by_pattern
    plain_windows: bool = False
    window_switch: str = ""
    text_of: tuple[str, ...] = ()
    tokenizer_class: str = ""
    tokenizer_overrides: bool = False


_COHERE: dict[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 8192}
_GEMMA: dict[str, Any] = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}
_GLM: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072}
_GLM |= {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
_OLMO: dict[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_QWEN_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "num_key_value_heads": 16}
_QWEN: dict[str, Any] = {"window_switch": "use_sliding_window", "tokenizer_class": "Qwen2Tokenizer"}

# fmt: off
FAMILIES = (
    Family("ArceeForCausalLM", "arcee", "plain_mlps:arcee_shape", _OLMO | {"max_position_embeddings": 4096}),
    Family("CohereForCausalLM", "cohere", "cohere:cohere_shape", _COHERE | {"rope_theta": 5e5}),
    Family("Cohere2ForCausalLM", "cohere2", "cohere:cohere2_shape",
        _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4}),
    Family("Ernie4_5ForCausalLM", "ernie4_5", "llama:ernie_shape",
        _OLMO | {"tie_word_embeddings": True, "head_dim": 128, "num_key_value_heads": 2, "rope_theta": 5e5,
            "max_position_embeddings": 131_072}),
    Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "mixtures:ernie_moe_shape",
        _OLMO | {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 5e5,
            "max_position_embeddings": 131_072}),
    Family("Exaone4ForCausalLM", "exaone4", "llama:exaone4_shape",
        _OLMO | {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}),
    Family("GemmaForCausalLM", "gemma", "gemma:gemma_shape", _GEMMA),
    Family("Gemma2ForCausalLM", "gemma2", "gemma:gemma2_shape",
        _GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096, "sliding_window_pattern": 2}),
    Family("Gemma3ForCausalLM", "gemma3_text", "gemma:gemma3_shape",
        _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208, "sliding_window": 4096,
            "sliding_window_pattern": 6, "max_position_embeddings": 131_072, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4}, scaled_length=True),
    Family("GlmForCausalLM", "glm", "glm:glm_shape", _GLM),
    Family("Glm4ForCausalLM", "glm4", "glm:glm4_shape", _GLM),
    Family("Glm4MoeForCausalLM", "glm4_moe", "mixtures:glm_shape",
        _OLMO | {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "partial_rotary_factor": 0.5}),
    Family("GPT2LMHeadModel", "gpt2", "gpt2:shape", {"tie_word_embeddings": True, "n_positions": 1024},
        learned_positions=True, tokenizer_class="GPT2Tokenizer"),
    Family("GptOssForCausalLM", "gpt_oss", "mixtures:gpt_oss_shape",
        {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "sliding_window_pattern": 2,
            "rope_theta": 150_000.0, "max_position_embeddings": 131_072, "num_local_experts": 128,
            "num_experts_per_tok": 4, "dtype": "bfloat16"}),
    Family("GraniteForCausalLM", "granite", "llama:granite_shape"),
    Family("GraniteMoeForCausalLM", "granitemoe", "mixtures:granite_moe_shape", {"num_experts_per_tok": 2}),
    Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", "mixtures:granite_hybrid_shape"),
    Family("HeliumForCausalLM", "helium", "llama:ernie_shape", {"rms_norm_eps": 1e-8, "head_dim": 128,
        "num_key_value_heads": 20, "rope_theta": 1e5, "max_position_embeddings": 4096}),
    Family("LlamaForCausalLM", "llama", "llama:llama_shape"),
    Family("Ministral3ForCausalLM", "ministral3", "llama:mistral_shape", {"rms_norm_eps": 1e-5, "head_dim": 128,
        "num_key_value_heads": 8, "max_position_embeddings": 262_144}, tokenizer_overrides=True),
    Family("MistralForCausalLM", "mistral", "llama:mistral_shape", {"num_key_value_heads": 8, "sliding_window": 4096},
        tokenizer_overrides=True),
    Family("MixtralForCausalLM", "mixtral", "mixtures:mixtral_shape", {"num_key_value_heads": 8, "rope_theta": 1e6},
        tokenizer_overrides=True),
    Family("Olmo2ForCausalLM", "olmo2", "llama:olmo_shape", _OLMO),
    Family("Olmo3ForCausalLM", "olmo3", "llama:olmo_shape",
        _OLMO | {"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4}, plain_windows=True),
    Family("OlmoeForCausalLM", "olmoe", "mixtures:olmoe_shape",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8}),
    Family("OPTForCausalLM", "opt", "opt:shape", {"tie_word_embeddings": True, "max_position_embeddings": 2048},
        learned_positions=True, tokenizer_class="GPT2Tokenizer"),
    Family("Phi3ForCausalLM", "phi3", "llama:phi3_shape", {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}),
    Family("Qwen2ForCausalLM", "qwen2", "llama:qwen2_shape", {"sliding_window": 4096}, windowed=_late_layers,
        text_of=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), tokenizer_overrides=True, **_QWEN),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", "mixtures:qwen2_shape",
        _QWEN_MOE | {"sliding_window": 4096}, windowed=_early_even_layers, **_QWEN),
    Family("Qwen3ForCausalLM", "qwen3", "llama:qwen3_shape", {"head_dim": 128, "sliding_window": 4096},
        windowed=_late_layers, text_of=("qwen3_vl_text",), **_QWEN),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", "mixtures:qwen3_shape", {"moe_intermediate_size": 768,
        "num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8}, **_QWEN),
    Family("Qwen3VLMoeForCausalLM", "qwen3_vl_moe_text", "mixtures:qwen3_vl_shape",
        _QWEN_MOE | {"rope_theta": 5e5, "max_position_embeddings": 128_000}, tokenizer_class="Qwen2Tokenizer"),
    Family("SeedOssForCausalLM", "seed_oss", "llama:seed_oss_shape",
        {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524_288}),
    Family("SmolLM3ForCausalLM", "smollm3", "llama:smollm3_shape",
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32_768},
        window_switch="use_sliding_window"),
    Family("Starcoder2ForCausalLM", "starcoder2", "plain_mlps:starcoder2_shape",
        {"tie_word_embeddings": True, "num_key_value_heads": 2, "max_position_embeddings": 4096}),
)
# Models that see or hear, of which the language model is run alone, where it is of one of these families.
WITH_TEXT = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3", "InternVL", "Llava", "LlavaNext", "LlavaOnevision", "Mistral3", "Qwen2Audio", "Qwen2VL", "Qwen2_5_VL",
        "Qwen3VL", "Qwen3VLMoe", "Voxtral",
    )
)
# fmt: on
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
BY_MODEL_TYPE = {family.model_type: family for family in sorted(FAMILIES, key=lambda f: f.model_type)}
_BY_ANY_NAME = BY_ARCHITECTURE | BY_MODEL_TYPE | {name: family for family in FAMILIES for name in family.text_of}
_UNKNOWN = Family("", "", "")
CLASSIFIER = "ForSequenceClassification"  # an architecture's ending: a family with a head of classes in place of tokens


def built_family(architecture: str, model: str) -> Family:
    """The family that implements a model's architecture, whatever its head; ModelLoadError where none does."""
    name = architecture.replace(CLASSIFIER, "LMHeadModel" if architecture == f"GPT2{CLASSIFIER}" else "ForCausalLM")
    if name not in BY_ARCHITECTURE:
        known = ", ".join([*sorted(BY_ARCHITECTURE), *sorted(f"the text of {name}" for name in WITH_TEXT)])
        raise ModelLoadError(
            f"architecture {architecture!r} of model {model!r} is not supported; supported are {known}."
        )
    return BY_ARCHITECTURE[name]


def family_of(name: Any) -> Family:
    """The family that a model_type, or an architecture, stands for; of others, a family without peculiarities."""
    return _BY_ANY_NAME.get(str(name), _UNKNOWN)


_HELD = {"medusa": "Medusa heads", "eagle3": "an EAGLE-3 head", "eagle": "an EAGLE head", "draft_model": "a model"}


def drafting_method(method: str | None, config: Mapping[str, Any], name: str) -> str:
    """The method of `speculative_config` that a checkpoint drafts by.

    Args:
        method: the one that was asked for; None for the one that fits. EAGLE heads may have a model's config.json: they
            are known by the name then, as vLLM knows them.
        config: its config.json.
        name: as the user gave it.

    Raises:
        ConfigError: it holds heads, and `method` reads others.
    """
    said = f"{config.get('model_type')} {config.get('architectures')}".lower()
    held = next((kind for kind in _HELD if kind in said), None)
    if held in (None, "eagle") and "draft_vocab_size" in config:
        held = "eagle3"
    if held is None and "medusa_num_heads" in config:
        held = "medusa"
    if method is None:
        return held or next((kind for kind in ("eagle3", "eagle") if kind in name.lower()), "draft_model")
    check_drafting_method(method, held, name)
    return method


def check_drafting_method(method: str, held: str | None, name: str) -> None:
    """Refuse a method that reads another kind of checkpoint than `held`, if that is known (ConfigError)."""
    if held not in (None, method):
        raise ConfigError(
            f"speculative_config: {name!r} holds {_HELD[held]}, which the method {method!r} can't use; "
            f"say 'method': {held!r}."
        )
