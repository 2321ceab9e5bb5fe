"""Fills a model with the weights of its checkpoint, or with random ones for measurements.

Called by the worker for its model, and for one that drafts. Streams the source tensor by tensor into the model's own
parameters, so that the peak is the model plus one window of mapped file. Must not know the names or layouts of a family
(`load_weights` of the model owns those), nor a file format (the sources do).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.causal_lm import CausalLM
from quire.models.shards import first_names
from quire.models.sources import open_source
from quire.models.weights import TensorSource


@dataclass(frozen=True)
class LoadReport:
    """What loading took, for the start-up log: fields of `WorkerReport`."""

    num_files: int  # 0 for dummy weights
    num_bytes: int  # tensor bytes of the files; for dummy weights the parameters' own
    seconds: float


def load_model_weights(model: CausalLM, config: ModelConfig, load_format: str, progress: bool) -> LoadReport:
    """Fill `model`, in place, from `config.path`.

    Args:
        load_format: "dummy" fills with random weights, the same for one (config.seed, parameter name) always; "none"
            leaves the model as it is, to plan; all others read the files that there are.
        progress: whether to draw a bar on stderr.

    Raises:
        ModelLoadError: no weights, a truncated or lying file, a tensor missing, twice, or of the wrong shape; the
            message names the file and the tensor.
    """
    if load_format == "none":
        return LoadReport(0, 0, 0.0)
    start = time.perf_counter()
    source = open_source(model, config, load_format)
    total = sum(spec.num_bytes for spec in source.specs)
    _stream(model, source, progress and source.num_files > 0)
    if missing := sorted(model.missing_weights):
        raise ModelLoadError(
            f"The checkpoint of {config.model!r} lacks {len(missing)} of the model's tensors: {first_names(missing)}. "
            f"It is incomplete, or not of the architecture {config.architecture} that its config.json names."
        )
    return LoadReport(source.num_files, total, time.perf_counter() - start)


def _stream(model: CausalLM, source: TensorSource, progress: bool) -> None:
    """Hand every tensor to the model; a misfit is reported with the tensor and the file that the model was given."""
    current, current_file = "no tensor", ""
    skip = {spec.name for spec in source.specs if not model.reads(spec.name)}
    total = sum(spec.num_bytes for spec in source.specs if spec.name not in skip)
    scale: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    bar = tqdm(total=total, desc="Loading weights", disable=not progress or total == 0, **scale)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current, current_file
        for spec, tensor in source.stream(skip):
            current, current_file = f"{spec.name!r} {list(spec.shape)} of {spec.file}", spec.file
            yield spec.name, tensor
            bar.update(spec.num_bytes)

    try:
        with torch.no_grad(), bar:
            model.load_weights(tensors())
    except ModelLoadError as error:
        if current_file in str(error):
            raise
        raise ModelLoadError(f"{current_file}: {error}") from error
    except RuntimeError as error:  # torch's word for shapes that don't match
        raise ModelLoadError(f"Tensor {current} does not fit the model that config.json describes: {error}") from error
