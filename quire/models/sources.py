"""What a model's checkpoint is: where its tensors are read from, and the types in which its matrices are kept.

The worker asks for the types before it builds a model, and for the source before it fills one. A new kind of checkpoint
is told apart here; what is in its files, and how a family names it, is known elsewhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from quire.config.gguf import read_gguf
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.causal_lm import CausalLM
from quire.models.dummy import DummySource
from quire.models.gguf import GGUFSource, GGUFTypes
from quire.models.quantized import BlockTypes, QuantizedSource, find_matrices
from quire.models.registry import checkpoint_format
from quire.models.safetensors import SafetensorsSource
from quire.models.weights import CheckpointFormat, Cut, CutSource, TensorSource, TensorSpec, weight_slots
from quire.text.tokenizer import load_tokenizer


def block_types(config: ModelConfig, load_format: str) -> BlockTypes | GGUFTypes | None:
    """The types in which the matrices of a quantized checkpoint are kept; None where there are none."""
    stated = config.hf_config.get("quantization_config")
    if not stated or load_format == "dummy":
        return None
    if config.path.is_file():
        return GGUFTypes(read_gguf(config.path))
    form = checkpoint_format(config)
    return BlockTypes(find_matrices(_directory_source(config, form), stated), form)


def open_source(model: CausalLM, config: ModelConfig, load_format: str) -> TensorSource:
    """What the weights of `config.path` are read from.

    Args:
        load_format: see `quire.worker.weights.load.load_model_weights`.

    Raises:
        ModelLoadError: no weights, a truncated or lying file.
    """
    if load_format == "dummy":
        return DummySource(model.checkpoint_shapes(), model.dtype, config.seed)
    if config.path.is_file():
        return GGUFSource(config, model.form, model.dtype, weight_slots(model, model.form))
    source, stated = _directory_source(config, model.form), config.hf_config.get("quantization_config")
    if not stated:
        return source
    slots = weight_slots(model, model.form)
    return QuantizedSource(source, find_matrices(source, stated), slots, model.form, model.dtype)


def _directory_source(config: ModelConfig, form: CheckpointFormat) -> TensorSource:
    source = SafetensorsSource(config.path, config.model)
    source = source if form.cut is None else CutSource(source, form.cut, config.hidden_size)
    if not (config.num_labels and config.hf_config.get("classifier_from_token")):
        return source
    return CutSource(source, _head_of_tokens(config), config.hidden_size)


def _head_of_tokens(config: ModelConfig) -> Callable[[TensorSpec, int], Iterable[Cut]]:
    """Makes a head for classes of tokens' rows in the one for tokens; for one class, of two rows' difference."""
    tokens = config.hf_config["classifier_from_token"]
    ids = load_tokenizer(config.path).convert_tokens_to_ids(tokens)
    if None in ids:
        raise ModelLoadError(f"classifier_from_token = {tokens!r} has a token that {config.model!r} does not have.")

    def take(table: Tensor) -> Tensor:
        rows = table[ids]
        return rows if config.num_labels == len(ids) else (rows[1:].float() - rows[:1].float()).to(table.dtype)

    def cut(spec: TensorSpec, hidden_size: int) -> Iterable[Cut]:
        is_head = spec.name == "lm_head.weight"
        if not is_head:
            yield spec, lambda tensor: tensor
        if spec.name.endswith("embed_tokens.weight") if config.tie_word_embeddings else is_head:
            yield replace(spec, name="score.weight", shape=(config.num_labels, hidden_size), num_bytes=0), take

    return cut
