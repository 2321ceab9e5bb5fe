"""The loading of an adapter for a model's places, by the names that PEFT gives; `quire.worker.adapters` calls it."""

from safetensors import safe_open

from quire.lora.slots import Packed
from quire.models.causal_lm import CausalLM
from quire.models.peft import WEIGHTS, AdapterError, AdapterFiles


def load_adapter(model: CausalLM, files: AdapterFiles) -> Packed:
    """Read and pack an adapter's matrices for a model's places, which may take a while.

    Raises:
        AdapterError: it is another model's, or has numbers that are none.
    """
    assert model.lora is not None, "the model has no places for adapters"
    packed: Packed = {}
    with safe_open(files.path / WEIGHTS, framework="pt") as file:
        for module, factors in files.tensors.items():
            name = model.form.canonical(f"{module}.weight")
            target = model.lora.targets.get(name.removesuffix(".weight"))
            if target is None:
                if name in model.elsewhere:
                    continue
                raise AdapterError(files.name, f"it changes {module!r}, which is no layer that adapters can change.")
            (a_name, a), (b_name, b) = factors["A"], factors["B"]
            if (a[1], b[0]) != target.shapes:
                wanted = f"[r, {target.shapes[0]}] and [{target.shapes[1]}, r]"
                what = f"{a_name!r} and its B are {list(a)} and {list(b)}, and {module!r} takes {wanted}"
                raise AdapterError(files.name, f"{what}: it was made for another base model.")
            tensors = {tensor: file.get_tensor(tensor).float() for tensor in (a_name, b_name)}
            for tensor, values in tensors.items():
                if not values.isfinite().all():
                    raise AdapterError(files.name, f"{WEIGHTS} has numbers in {tensor!r} that are not finite.")
            own = target.pack(tensors[a_name], tensors[b_name], files.scale(module))
            packed.setdefault(target.layer, {})[target.part] = own
    return packed
