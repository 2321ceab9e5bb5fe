"""The loading of an adapter for a model's places, by the names that PEFT gives; `quire.worker.adapters` calls it."""

import itertools

from safetensors import safe_open
from torch import Tensor

from quire.layers.linear import Matrix
from quire.lora.slots import Packed
from quire.models.causal_lm import CausalLM
from quire.models.peft import VIRTUAL, WEIGHTS, AdapterError, AdapterFiles


def load_adapter(model: CausalLM, files: AdapterFiles) -> Packed:
    """Read and pack an adapter's matrices for a model's places, which may take a while.

    Raises:
        AdapterError: it is another model's, or has numbers that are none.
    """
    assert model.lora is not None, "the model has no places for adapters"
    packed: Packed = {}
    with safe_open(files.path / WEIGHTS, framework="pt") as file:
        if files.shape:
            return _load_virtual(model, files, file.get_tensor(VIRTUAL))
        for module, factors in files.tensors.items():
            name = model.form.canonical(f"{module}.weight")
            if (target := model.lora.targets.get(name.removesuffix(".weight"))) is None:
                if name in model.elsewhere or model.form.passes_over(name):
                    continue
                raise AdapterError(files.name, f"it changes {module!r}, which is no layer that adapters can change.")
            (a_name, a), (b_name, b) = factors["A"], factors["B"]
            if (a[1], b[0]) != target.shapes:
                wanted = f"[r, {target.shapes[0]}] and [{target.shapes[1]}, r]"
                what = f"{a_name!r} and its B are {list(a)} and {list(b)}, and {module!r} takes {wanted}"
                raise AdapterError(files.name, f"{what}: it was made for another base model.")
            tensors = {tensor: _finite(files, tensor, file.get_tensor(tensor)) for tensor in (a_name, b_name)}
            own = target.pack(tensors[a_name], tensors[b_name], files.scale(module))
            packed.setdefault(target.layer, {})[target.part] = own
    return packed


def _load_virtual(model: CausalLM, files: AdapterFiles, rows: Tensor) -> Packed:
    """Virtual tokens' embeddings, for the table that the first stage has; or their keys and values in each layer."""
    assert model.lora is not None, "the model has no places for adapters"
    rows = _finite(files, VIRTUAL, rows)
    if files.config["peft_type"] != "PREFIX_TUNING":
        _check_width(files, model.embedding.in_features)
        table = model.embedding.lora
        return {table: {0: table.virtual(rows)}} if table is not None else {}
    packed: Packed = {}
    for number, attention in model.lora.attentions.items():
        qkv, prefix = attention.qkv_proj, attention.spec.prefix
        assert isinstance(qkv, Matrix), "a model's own attention has one projection"
        assert prefix is not None
        starts = itertools.accumulate(qkv.parts.values(), initial=0)
        first, end = attention.kv_start, sum(qkv.parts.values())
        here = [start + i for start, part in zip(starts, qkv.parts, strict=False) for r in qkv.rows[part] for i in r]
        _check_width(files, model.lora.num_layers * (end - first))
        own = rows.unflatten(1, (model.lora.num_layers, -1))[:, number, [i - first for i in here if i >= first]]
        packed[prefix] = {0: prefix.virtual(own)}
    return packed


def _check_width(files: AdapterFiles, width: int) -> None:
    if files.shape[1] != width:
        what = f"{VIRTUAL!r} is {[*files.shape]}, and this model's are {width} wide"
        raise AdapterError(files.name, f"{what}: it was made for another base model.")


def _finite(files: AdapterFiles, name: str, tensor: Tensor) -> Tensor:
    """A tensor in float32, whatever it is in: types of eight bits can't tell whether they are finite."""
    if not (tensor := tensor.float()).isfinite().all():
        raise AdapterError(files.name, f"{WEIGHTS} has numbers in {name!r} that are not finite.")
    return tensor
