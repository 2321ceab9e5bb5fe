"""What a model's checkpoint is: where its tensors are read from, and the types in which its matrices are kept.

The worker asks for the types before it builds a model, and for the source before it fills one. A new kind of checkpoint
is told apart here; what is in its files, and how a family names it, is known elsewhere.
"""

from quire.config.gguf import read_gguf
from quire.config.model import ModelConfig
from quire.models.causal_lm import CausalLM
from quire.models.classifiers import head_of_tokens
from quire.models.dummy import DummySource
from quire.models.gguf import GGUFSource, GGUFTypes
from quire.models.quantized import BlockTypes, QuantizedSource, find_matrices
from quire.models.registry import checkpoint_format
from quire.models.safetensors import SafetensorsSource
from quire.models.weights import CheckpointFormat, CutSource, TensorSource, weight_slots


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
    return source if (cut := head_of_tokens(config)) is None else CutSource(source, cut, config.hidden_size)
