"""Where each tensor of a checkpoint belongs in a model, by name.

Names follow from the modules: a parameter is called by its path, a part of a merged linear layer as a sibling of
that layer. How a family's checkpoints differ from that is the `CheckpointFormat` in its file. `CausalLM` loads by
these; nothing here knows files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear


@dataclass(frozen=True)
class CheckpointFormat:
    """What a family's checkpoints do differently from the modules built here.

    Attributes:
        prefix: start of every name but the output head's; checkpoints of a bare backbone leave it out.
        names: (ours, theirs) pieces of names, replaced in order.
        ignored: endings of names that are no parameters (tables and masks that are computed here).
        transposed: endings of names of matrices stored [in, out] instead of [out, in].
    """

    prefix: str = "model."
    names: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()

    def checkpoint_name(self, ours: str) -> str:
        """The checkpoint's name of what is called `ours` here."""
        for mine, theirs in self.names:
            ours = ours.replace(mine, theirs)
        return ours

    def canonical(self, name: str) -> str:
        """A checkpoint's name with its prefix."""
        return name if name.startswith((self.prefix, "lm_head.")) else self.prefix + name


@dataclass(frozen=True)
class WeightSlot:
    """The place of one checkpoint tensor.

    Attributes:
        module: path of the module that takes it.
        shape: the shape that it must have in the checkpoint.
        load: copies it into the module's parameters.
        filled: it is there already.
    """

    module: str
    shape: tuple[int, ...]
    load: Callable[[Tensor], object]
    filled: bool = False


def weight_slots(model: nn.Module, form: CheckpointFormat) -> dict[str, WeightSlot]:
    """Every tensor that the model needs: checkpoint name -> its place. Shared modules are listed once."""
    slots: dict[str, WeightSlot] = {}

    def add(
        ours: str, path: str, shape: tuple[int, ...], load: Callable[[Tensor], object], filled: bool = False
    ) -> None:
        name = form.checkpoint_name(ours)
        if name.endswith(form.transposed):
            slots[name] = WeightSlot(path, shape[::-1], lambda loaded: load(loaded.t()), filled)
        else:
            slots[name] = WeightSlot(path, shape, load, filled)

    for path, module in model.named_modules():
        if isinstance(module, Linear):
            for part, start, shapes in module.checkpoint_parts():
                owner = f"{path.rpartition('.')[0]}.{part}" if part else path
                for tensor, shape in shapes.items():
                    filled = tensor in module.method.filled
                    add(f"{owner}.{tensor}", path, shape, partial(module.load, tensor, start), filled)
        elif isinstance(module, Embedding):
            for tensor, shape in module.method.checkpoint_shapes(module.shape).items():
                add(f"{path}.{tensor}", path, shape, partial(module.load, tensor), tensor in module.method.filled)
        else:
            for tensor, parameter in module.named_parameters(recurse=False):
                add(f"{path}.{tensor}", path, tuple(parameter.shape), parameter.copy_)
    return slots
