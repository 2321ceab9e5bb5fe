"""AWQ's scales of a layer: columns that matter are multiplied before they are rounded, and their inputs divided.

`quire quantize` calls `fold` before it quantizes a layer. What makes the inputs, a norm or a linear layer, takes the
division; where that does not leave the layer's output as it was, as behind an activation that is not linear, it is
taken back. Must not know text or files.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.entrypoints.cli.quantize_codes import Scheme, search_scales
from quire.models.layerwise import Inputs, Layer

_SAME = 0.02  # of the output: what rounding the norms to their own type may change
_NEXT = {"gate_up_proj": "down_proj", "fc1": "fc2"}  # of an MLP's first layer


def fold(layer: Layer, scheme: Scheme, inputs: dict[str, Inputs], probe: tuple[Tensor, Tensor | None]) -> None:
    """Scale whatever can be; `inputs` become those after it.

    Args:
        probe: what the layer is run on, to see that nothing has changed.
    """
    folding = _Folding(layer, scheme, inputs, probe)
    mlps = [path for path in layer.parts if ".mlp." in path and path.rpartition(".")[2] in _NEXT]
    norms = [f"{layer.path}.{name}_layernorm" for name in ("pre_feedforward", "post_attention")]
    qkv, name = f"{layer.path}.self_attn.qkv_proj", layer.model.form.checkpoint_name
    attention = [path for path in (f"{layer.path}.self_attn.q_proj", qkv) if path in layer.parts]
    folding.after_norm(f"{layer.path}.input_layernorm", attention, [])
    gates = [name(f"{layer.path}.mlp.{each}.weight") for each in ("gate", "shared_expert_gate")]  # of a mixture
    folding.after_norm(next(norm for norm in norms if norm in layer.norms), mlps, gates)
    folding.after_linear(qkv, f"{layer.path}.self_attn.o_proj")
    for path in mlps:
        owner, _, last = path.rpartition(".")
        folding.after_linear(path, f"{owner}.{_NEXT[last]}")


class _Folding:
    def __init__(
        self, layer: Layer, scheme: Scheme, inputs: dict[str, Inputs], probe: tuple[Tensor, Tensor | None]
    ) -> None:
        self.layer, self.scheme, self.inputs, self.probe = layer, scheme, inputs, probe

    def after_norm(self, path: str, linears: list[str], gates: list[str]) -> None:
        """`linears`, and `gates` that are not quantized, are what is given the norm's output."""
        layer, norm = self.layer, self.layer.norms[path]
        scales = self._search(linears, torch.stack([self.inputs[each].activity for each in linears]).sum(0))
        changed, offset = dict(layer.weights), float(getattr(norm, "plus_one", False))
        for key in (layer.model.form.checkpoint_name(f"{path}.{name}") for name, _ in norm.named_parameters()):
            changed[key] = ((changed[key] + offset) / scales - offset).to(layer.dtypes[key]).float()
        for key in changed.keys() & gates:
            changed[key] = (changed[key] * scales).to(layer.dtypes[key]).float()
        self._keep(changed, linears, scales)

    def after_linear(self, source: str, path: str) -> None:
        """The source's last output features are this one's inputs, each of as many of them as share a KV head."""
        layer, part, [kept] = self.layer, self.layer.parts[source], self.layer.model.cache_layers
        size = layer.parts[path].module.shape.in_features
        head, own = (kept.head_dim, kept.num_kv_heads * kept.head_dim) if source.endswith("qkv_proj") else (1, size)
        shared = self.inputs[path].activity.view(own // head, size // own, head)
        scales = self._search([path], shared.mean(1, keepdim=True).expand_as(shared).flatten())
        divisors, changed = scales.view_as(shared)[:, 0].flatten(), dict(layer.weights)
        for key in changed.keys() & {f"{part.names[-1]}.weight", f"{part.names[-1]}.bias"}:
            turned = part.turned and key.endswith(".weight")
            rows = changed[key].t().clone() if turned else changed[key].clone()
            rows[-own:] /= divisors.view(-1, *[1] * (rows.dim() - 1))
            changed[key] = rows.t() if turned else rows
        self._keep(changed, [path], scales)

    def _search(self, paths: Sequence[str], activity: Tensor) -> Tensor:
        parts = [self.layer.parts[path] for path in paths]
        pairs = [(matrix, self.inputs[part.path].hessian) for part in parts for matrix in self.layer.matrices(part)]
        return search_scales(pairs, activity, self.scheme)

    def _keep(self, changed: dict[str, Tensor], paths: Sequence[str], scales: Tensor) -> None:
        """Multiply the columns; take everything back where the layer's output is no more what it was."""
        layer, before, expected = self.layer, self.layer.weights, self.layer.run(*self.probe)
        for part in (layer.parts[path] for path in paths):
            for key in (f"{name}.weight" for name in part.names):
                changed[key] = changed[key] * (scales[:, None] if part.turned else scales)
        layer.fill(changed)
        if (layer.run(*self.probe) - expected).norm() > _SAME * expected.norm():
            layer.fill(before)
            return
        for path in paths:
            hessian, activity = self.inputs[path]
            self.inputs[path] = Inputs(hessian / scales / scales[:, None], activity / scales)
