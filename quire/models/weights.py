"""What the tensors of a checkpoint are, and where each belongs in a model, by name.

Names follow from the modules: a parameter is called by its path, a part of a merged linear layer as a sibling of
that layer. How a family's checkpoints differ from that is the `CheckpointFormat` in its file. `CausalLM` loads by
these. A checkpoint's files are a `TensorSource` (`quire.models.safetensors`, `gguf`, `pickled`), unknown here.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from quire.models.spec import TensorSpec as TensorSpec
from quire.quantization.base import CheckpointSlot


class TensorSource(Protocol):
    """The tensors of one checkpoint, whose promises were checked when it was opened.

    Attributes:
        num_files: that the tensors are read from.
        specs: every tensor, in the order of `stream`.
    """

    num_files: int
    specs: list[TensorSpec]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; one is only good until the next is asked for.

        Raises:
            ModelLoadError: a file can't be read; the message names it and the tensor.
        """
        ...


Cut = tuple[TensorSpec, Callable[[Tensor], Tensor]]  # a part of a tensor, and how it is taken


class CutSource:
    """A `TensorSource` whose tensors are parts of another's."""

    def __init__(self, source: TensorSource, cut: Callable[[TensorSpec, int], Iterable[Cut]], hidden_size: int) -> None:
        self._source, self.num_files = source, source.num_files
        self._cuts = {spec.name: [*cut(spec, hidden_size)] for spec in source.specs}
        self.specs = [spec for cuts in self._cuts.values() for spec, _ in cuts]

    def stream(self, skip: Collection[str]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor but those named in `skip`; one is only good until the next is asked for."""
        wanted = {name: [each for each in cuts if each[0].name not in skip] for name, cuts in self._cuts.items()}
        for whole, tensor in self._source.stream({name for name, cuts in wanted.items() if not cuts}):
            for spec, take in wanted[whole.name]:
                yield spec, take(tensor)


# What sees and hears, in checkpoints of which the language model alone is run.
_SENSES = ("visual.", "vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.", "image_newline")


@dataclass(frozen=True)
class CheckpointFormat:
    """What a family's checkpoints do differently from the modules built here.

    Attributes:
        prefix: start of every name but the output head's; checkpoints of a bare backbone leave it out.
        names: (ours, theirs) pieces of names, replaced in order.
        ignored: endings of names that are no parameters (tables and masks that are computed here).
        left_out: beginnings of names, after "model.", of what is not run here (layers that draft).
        transposed: endings of names of matrices stored [in, out] instead of [out, in].
        cut: what a tensor is here, given the hidden size, of checkpoints that hold several matrices as one; None where
            each is one.
    """

    prefix: str = "model."
    names: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    left_out: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    cut: Callable[[TensorSpec, int], Iterable[Cut]] | None = None

    def checkpoint_name(self, ours: str) -> str:
        """The checkpoint's name of what is called `ours` here."""
        for mine, theirs in self.names:
            ours = ours.replace(mine, theirs)
        return ours

    def canonical(self, name: str) -> str:
        """A checkpoint's name with its prefix; of the language model in one that sees or hears, that by itself."""
        name = name.replace("language_model.", "", 1)
        return name if name.startswith((self.prefix, "lm_head.", "score.")) else self.prefix + name

    def passes_over(self, name: str) -> bool:
        """Whether a checkpoint's tensor is none of the model's."""
        return name.endswith(self.ignored) or name.removeprefix("model.").startswith(_SENSES + self.left_out)


def weight_slots(model: nn.Module, form: CheckpointFormat) -> dict[str, CheckpointSlot]:
    """Every tensor that the model needs: checkpoint name -> its place. Shared modules are listed once."""
    slots: dict[str, CheckpointSlot] = {}
    for path, module in model.named_modules():
        if (places := getattr(module, "checkpoint_slots", None)) is None:
            assert not list(module.parameters(recurse=False)), f"{path} has parameters that no checkpoint could fill"
            continue
        for slot in places(path):
            name = form.checkpoint_name(slot.name)
            if name.endswith(form.transposed):
                turned = replace(slot.form, shape=slot.form.shape[::-1])
                slot = replace(slot, form=turned, load=partial(_load_turned, slot.load))
            slots[name] = slot
    return slots


def _load_turned(load: Callable[[Tensor], object], loaded: Tensor) -> None:
    load(loaded.t())
