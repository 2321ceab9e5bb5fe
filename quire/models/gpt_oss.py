"""gpt-oss (arXiv:2508.10925): Llama with biases, attention sinks, windows in every other layer, and experts throughout.

The router has a bias, too, and weighs those chosen by their scores alone. Checkpoints hold a layer's experts as one
tensor, in bf16 or in MXFP4, gates and what they open by turns: each is cut into matrices as it is read.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.layers.moe import Routing
from quire.models.builder import Builder
from quire.models.causal_lm import CausalLM
from quire.models.llama import biases, build_llama
from quire.models.settings import count, number
from quire.models.weights import CheckpointFormat, Cut, TensorSpec
from quire.ops.activation import OAI_LIMIT, OAI_SLOPE

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_ENDS = {"": ".weight", "_bias": ".bias"}
_PARTS = {"gate_up_proj": {"gate_proj": 0, "up_proj": 1}, "down_proj": {"down_proj": 0}}


def cut_experts(spec: TensorSpec) -> Iterator[Cut]:
    """Of a layer's experts the matrix or vector of each, under the names that Mixtral's kin give them.

    Matrices are [E, in, out], biases [E, out]; MXFP4 is [E, out, groups of 32, 16] and, of scales, [E, out, groups].
    """
    found = _STACKED.fullmatch(spec.name)
    if found is None or len(spec.shape) != {"_bias": 2, "_blocks": 4}.get(found[3], 3) or 0 in spec.shape:
        yield spec, lambda tensor: tensor
        return
    experts, parts, kind = found[1], _PARTS[found[2]], found[3]
    shape = spec.shape[:0:-1] if not kind else spec.shape[1:]
    for expert in range(spec.shape[0]):
        for part, first in parts.items():

            def take(tensor: Tensor, expert: int = expert, first: int = first) -> Tensor:
                own = tensor[expert] if kind else tensor[expert].t()
                return own[first :: len(parts)]

            own = len(range(first, shape[0], len(parts))), *shape[1:]
            size = spec.num_bytes // (spec.shape[0] * len(parts))
            name = f"{experts}.{expert}.{part}{_ENDS.get(kind, kind)}"
            yield replace(spec, name=name, shape=own, num_bytes=size), take


FORMAT = CheckpointFormat(names=((".mlp.gate.", ".mlp.router."),), cut=cut_experts)


def build(config: ModelConfig, builder: Builder) -> CausalLM:
    """GptOssForCausalLM."""
    for key, wanted in (("swiglu_limit", OAI_LIMIT), ("swiglu_alpha", OAI_SLOPE)):
        if (found := number(config, key, wanted)) != wanted:
            said = f"config.json of model {config.model!r} has {key} = {found}"
            raise ModelLoadError(f"{said}; only {wanted} is supported.")
    top_k = count(config, "num_experts_per_tok", 4)
    routing = Routing(count(config, "num_local_experts", 128), top_k, renormalize=True)

    def experts(index: int, builder: Builder) -> nn.Module:
        sizes = config.hidden_size, config.intermediate_size
        return builder.experts(*sizes, routing, activation="swiglu_oai", bias=True)

    shape = replace(biases(config, default=True), sinks=True, feed_forward=experts, form=FORMAT)
    return build_llama(config, builder, shape)
