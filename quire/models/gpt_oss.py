"""gpt-oss (arXiv:2508.10925): Llama with biases, attention sinks, windows in every other layer, and experts throughout.

The router has a bias, too, and weighs those chosen by their scores alone. Checkpoints hold a layer's experts as one
tensor, in bf16 or in MXFP4, gates and what they open by turns: each is cut into matrices as it is read.
"""

from dataclasses import replace
from functools import partial

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.llama import LlamaShape, biases
from quire.models.mixtures import mixture
from quire.models.settings import number
from quire.models.stacked import cut_experts
from quire.models.weights import CheckpointFormat
from quire.ops.activation import OAI_LIMIT, OAI_SLOPE

FORMAT = CheckpointFormat(names=((".mlp.gate.", ".mlp.router."),), cut=partial(cut_experts, by_turns=True))


def shape(config: ModelConfig) -> LlamaShape:
    """GptOssForCausalLM."""
    for key, wanted in (("swiglu_limit", OAI_LIMIT), ("swiglu_alpha", OAI_SLOPE)):
        if (found := number(config, key, wanted)) != wanted:
            said = f"config.json of model {config.model!r} has {key} = {found}"
            raise ModelLoadError(f"{said}; only {wanted} is supported.")
    experts = mixture(config, bias=True, activation="swiglu_oai")
    return replace(biases(config, default=True), sinks=True, feed_forward=experts, form=FORMAT)
