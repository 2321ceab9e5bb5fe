"""Takes a checkpoint through `quire quantize`: what is checked before, the text, and layer after layer to its file.

Memory is that of one layer and of the text's hidden states. The folder gets its name when it is whole. Must not know
how codes are packed.
"""

import math
import shutil
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from quire.config.model import ModelConfig
from quire.entrypoints.cli import quantize_files as files
from quire.entrypoints.cli.files import read_text
from quire.entrypoints.cli.flags import human_bytes
from quire.entrypoints.cli.quantize_codes import Codes, Scheme, quantize, to_fp8
from quire.entrypoints.cli.quantize_scales import fold
from quire.errors import ConfigError
from quire.models.layerwise import Inputs, Layer, Survey
from quire.models.safetensors import SafetensorsSource
from quire.text.tokenizer import load_tokenizer

_STORIES = Path(__file__).with_name("calibration.txt")
_HELD_OUT = 8  # each of so many sequences is
_LEAST = 16  # tokens of a sequence


class _Text(NamedTuple):
    known: list[Tensor]  # token ids of sequences
    held: list[Tensor]
    about: str


class _Costs(NamedTuple):
    """On held-out text."""

    losses: list[float]  # before and after, nats a token
    errors: list[float]  # of each layer's output, squared, as a part of its square


def quantize_checkpoint(options: Namespace, out: Path) -> str:
    """Write the checkpoint; returns what to tell the user.

    Raises:
        ConfigError: what is asked for can't be had of this model, or there is no room for it.
        ModelLoadError: the checkpoint is broken.
    """
    config = ModelConfig.from_pretrained(options.model, dtype="float32", revision=options.revision)
    if config.path.is_file() or config.hf_config.get("quantization_config"):
        raise ConfigError(f"{options.model} is quantized already: name the checkpoint that it was made of.")
    survey, source = Survey(config), SafetensorsSource(config.path, config.model)
    if (cut := survey.model.form.cut) and any(len([*cut(spec, config.hidden_size)]) > 1 for spec in source.specs):
        raise ConfigError(f"{options.model} has all experts of a layer in one tensor, which can't be quantized here.")
    scheme, text = _scheme(options, survey, source), _read_text(options, config)
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.mkdir(parents=True)
        _check_room(survey, scheme, source, partial)
        writer = files.CheckpointWriter(partial)
        costs = _walk(config, scheme, text, source, writer)
        writer.close()
        files.copy_rest(config.path, partial)
        quantization = files.quantization_config(scheme, survey.plain)
        files.write_json(partial / "config.json", config.hf_config | {"quantization_config": quantization})
        card = files.card(options.model, scheme, text.about, *costs)
        (partial / "README.md").write_text(card, "utf-8", "replace")  # names of files need not be texts
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except FileExistsError:
        raise ConfigError(f"{partial} is there: remove it, unless another process is writing it.") from None
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(f"{out} can't be written: {getattr(error, 'strerror', error)}.") from error
        raise
    before, after = map(math.exp, costs.losses)
    return f"{out}: {human_bytes(writer.num_bytes)} of weights; perplexity {before:.3f} before, {after:.3f} after"


def _scheme(options: Namespace, survey: Survey, source: SafetensorsSource) -> Scheme:
    """What is asked for, as far as the model's sizes allow."""
    method = options.method
    bits = getattr(options, "bits", None) or (8 if method in ("int8", "fp8") else 4)
    columns = {name: part.module.shape.in_features for part in survey.parts.values() for name in part.names}
    fitting = (size for size in (128, 64, 32, 16) if not any(each % size for each in columns.values()))
    best = 0 if method in ("int8", "fp8") else next(fitting, 0)
    group = best if options.group_size is None else max(0, options.group_size)
    for name, each in columns.items():
        if group and each % group:
            raise ConfigError(f"--group-size {group} does not divide the {each} columns of {name}; try 64, 32, or -1.")
    for path, part in survey.parts.items():
        rows = (*part.module.parts.values(),) if method in ("gptq", "awq") else ()
        if part.turned and not rows:
            raise ConfigError(f"compressed-tensors can't have {path}, which is stored turned: take gptq or awq.")
        if any(size % {"fp8": 1, "int8": 4}.get(method, 8) for size in (*rows, part.module.shape.in_features)):
            raise ConfigError(f"{method} packs 8 numbers in a word (int8 4), and {path} has others: take int8 or fp8.")
    kept = {survey.model.form.canonical(spec.name): spec.dtype for spec in source.specs}
    stored = "F16" if method in ("gptq", "awq") else kept.get(f"{next(iter(columns))}.weight", "")
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored, torch.float32)
    return Scheme(method, bits, group, dtype, options.desc_act, options.damp)


def _read_text(options: Namespace, config: ModelConfig) -> _Text:
    """Sequences of the text, each beginning as the tokenizer has texts begin.

    Raises:
        ConfigError: the file can't be read, or is too short.
    """
    path = _STORIES if options.calibration is None else options.calibration
    text, tokenizer = read_text(str(path), "--calibration"), load_tokenizer(config.path)
    start, ids = tokenizer.encode(""), tokenizer.encode(text, False)
    length = min(options.length, config.max_model_len, len(start) + len(ids) // _HELD_OUT)
    step = length - len(start)
    if step < _LEAST or (options.num_samples == 1 and options.method in ("gptq", "awq")):  # which is held out
        least = f"{_LEAST * _HELD_OUT} tokens are the least, --num-samples 2 and --length {_LEAST + len(start)}"
        raise ConfigError(f"--calibration {path}: {len(ids)} tokens, {length} at once, are too few; {least}.")
    rows = [torch.tensor(start + ids[i : i + step]) for i in range(0, len(ids) - step + 1, step)[: options.num_samples]]
    held, known = rows[::_HELD_OUT], [row for i, row in enumerate(rows) if i % _HELD_OUT]
    name = "the stories that Quire brings" if options.calibration is None else path.name
    about = f"Measured on {len(held)} sequences of {length} tokens of {name}, which it was not calibrated with."
    calibrated = f" Calibrated with {len(known)} others." if options.method in ("gptq", "awq") else ""
    return _Text(known, held, about + calibrated)


def _check_room(survey: Survey, scheme: Scheme, source: SafetensorsSource, folder: Path) -> None:
    names = {f"{name}.weight" for part in survey.parts.values() for name in part.names}
    canonical, needed = survey.model.form.canonical, 0
    for spec in source.specs:
        needed += math.prod(spec.shape) * (scheme.bits + 1) // 8 if canonical(spec.name) in names else spec.num_bytes
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ConfigError(
            f"{folder.parent} has {human_bytes(free)} free, and the checkpoint takes {human_bytes(needed)}: make room."
        )


@torch.no_grad()
def _walk(
    config: ModelConfig, scheme: Scheme, text: _Text, source: SafetensorsSource, writer: files.CheckpointWriter
) -> _Costs:
    """Quantize and write layer after layer, each on what those before it, as they are now, make of the text."""
    costs, known = _Costs([], []), text.known if scheme.calibrates else []
    states = plain = rounded = None
    for index in tqdm(range(config.num_layers), desc="Quantizing", unit="layer"):
        layer, is_last = Layer(config, index, source), index == config.num_layers - 1
        plain = layer.run_all(text.held, plain)
        if is_last:
            costs.losses.append(layer.loss(text.held, plain))
        with layer.watched() as inputs:
            layer.run_all(known, states)
        if scheme.method == "awq":
            fold(layer, scheme, inputs, (known[0], states[0] if states else None))
        codes = _quantize(layer, scheme, inputs)
        states, rounded = layer.run_all(known, states), layer.run_all(text.held, rounded)
        off = sum(float((a - b).square().sum()) for a, b in zip(rounded, plain, strict=True))
        costs.errors.append(off / sum(float(each.square().sum()) for each in plain))
        if is_last:
            costs.losses.append(layer.loss(text.held, rounded))
        for name, weight in layer.weights.items():
            if (matrix := name.removesuffix(".weight")) in codes:
                for tensor, value in files.packed(codes[matrix], scheme).items():
                    writer.add(f"{matrix}.{tensor}", value)
            else:
                writer.add(name, weight.to(layer.dtypes[name]))
    return costs


def _quantize(layer: Layer, scheme: Scheme, inputs: dict[str, Inputs]) -> dict[str, Codes]:
    """Replace each matrix by what its codes stand for; returns the codes, by name in the checkpoint."""
    codes: dict[str, Codes] = {}
    for path, part in layer.parts.items():
        for name, matrix in zip(part.names, layer.matrices(part), strict=True):
            codes[name] = quantize(matrix, scheme, inputs[path].hessian)
            matrix.copy_(codes[name].expand())
        if scheme.method == "fp8":  # whose activations are rounded, too
            part.module.register_forward_pre_hook(lambda _, x: (to_fp8(x[0], torch.float32).expand(), *x[1:]))
    layer.fill(layer.weights)
    return codes
