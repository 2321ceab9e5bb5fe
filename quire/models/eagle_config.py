"""What an EAGLE head's config.json and the names of its tensors say, held against the model that it drafts for.

The worker asks when it builds a head. Knows no tensor.
"""

from collections.abc import Container, Iterable

from quire.config.model import ModelConfig
from quire.errors import ConfigError

_OPTION = "speculative_config"

# Of a checkpoint, what the model has already, or what follows from other tensors.
_LEFT = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t", "rotary_emb.inv_freq")


def our_name(name: str) -> str:
    """What a checkpoint's tensor is called here: EAGLE-3's one layer has a name of its own, and some have a prefix."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def eagle_names(theirs: Iterable[str], places: Container[str]) -> dict[str, str | None]:
    """A checkpoint's tensors by their places here; None for one that is left out. Unknown ones are not in it."""
    ours = {name: our_name(name) for name in theirs}
    return {name: own if own in places else None for name, own in ours.items() if own in places or own.endswith(_LEFT)}


def check_eagle_head(head: ModelConfig, model: ModelConfig) -> None:
    """Refuse a head that was trained for another model (ConfigError)."""
    size = head.hf_config.get("target_hidden_size") or head.hidden_size
    for what, its, of_model in (
        ("a vocabulary", head.vocab_size, model.vocab_size),
        ("a hidden size", size, model.hidden_size),
    ):
        if its != of_model:
            raise ConfigError(
                f"{_OPTION}: the head {head.model!r} is for {what} of {its}, and the model {model.model!r} has one of "
                f"{of_model}; use a head that was trained for this model."
            )
    if any(window is not None for window in head.layer_windows):
        raise ConfigError(f"{_OPTION}: the head {head.model!r} has a sliding window, which is not supported yet.")


def eagle_taps(head: ModelConfig, model: ModelConfig) -> list[int]:
    """The model's layers whose outputs an EAGLE-3 head reads (ConfigError); [] where it reads the last hidden state.

    Published configurations count what enters a layer: their layer 2 is the output of the second one, of index 1.
    """
    own = head.hf_config.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise ConfigError(f"{_OPTION}: the head {head.model!r} has eagle_config = {own!r}; it must be an object.")
    if own.get("use_aux_hidden_state") is False:
        return []
    name, last = "eagle_aux_hidden_state_layer_ids", model.num_layers
    layers = own.get(name) or head.hf_config.get(name) or [2, last // 2, last - 3]
    if not isinstance(layers, list) or not all(type(layer) is int and 1 <= layer <= last for layer in layers):
        raise ConfigError(
            f"{_OPTION}: the head {head.model!r} reads the layers {layers!r} ({name}), and the model {model.model!r} "
            f"has layers 1 to {last}; use a head that was trained for this model."
        )
    return [layer - 1 for layer in layers]
