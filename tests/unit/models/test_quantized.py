"""What quantized checkpoints hold is what the formulas of their formats say, and what lies is named."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.model import ModelConfig
from quire.errors import ModelLoadError
from quire.models.packings import Numbers
from quire.models.quantized import BlockTypes, QuantizedSource, find_matrices
from quire.models.safetensors import SafetensorsSource
from quire.models.weights import CheckpointFormat

sys.path.insert(0, str(Path(__file__).parents[2]))
files: Any = importlib.import_module("quantized_files")
LAYER = "layers.0.self_attn"


def read(directory: Path) -> dict[str, Tensor]:
    stated = ModelConfig.from_pretrained(directory).hf_config["quantization_config"]
    source = SafetensorsSource(directory, "a model")
    one = QuantizedSource(source, find_matrices(source, stated), {}, CheckpointFormat(), torch.float32)
    found = {spec.name: tensor.float().clone() for spec, tensor in one.stream(())}
    assert found.keys() <= {spec.name for spec in one.specs}
    return found


@pytest.mark.parametrize("case", files.CASES)
def test_values_are_those_of_the_formula(tmp_path: Path, case: str) -> None:
    stated, quantize = files.CASES[case]
    values = files.write(tmp_path, stated, quantize, ("o_proj",), only=LAYER)
    found = read(tmp_path)
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert torch.equal(found[name], tensor.float()), name
    source = SafetensorsSource(tmp_path, "a model")
    matrices = find_matrices(source, ModelConfig.from_pretrained(tmp_path).hf_config["quantization_config"])
    assert len(matrices) == 3, "one is ignored"
    assert all((matrix.type is None) == (case in files.DENSE) for matrix in matrices.values())


def test_types_are_found_by_the_names_of_the_model(tmp_path: Path) -> None:
    stated, quantize = files.CASES["gptq-4"]
    files.write(tmp_path, stated, quantize, only=LAYER)
    source = SafetensorsSource(tmp_path, "a model")
    form = CheckpointFormat(names=((".attn.", ".self_attn."),))
    types = BlockTypes(
        find_matrices(source, ModelConfig.from_pretrained(tmp_path).hf_config["quantization_config"]), form
    )
    assert types.get("model.layers.0.attn.q_proj", "none") == "U4_128"
    assert types.get("model.layers.1.attn.q_proj", "none") == "none"
    assert types.kinds == ["U4_128"]


def test_parts_that_lie_apart_are_put_together(tmp_path: Path) -> None:
    """In files of their own, and beside zeros that older tools add as a bias."""
    stated, quantize = files.CASES["gptq-4"]
    values = files.write(tmp_path, stated, quantize, only=LAYER)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = {f"model.{LAYER}.q_proj.bias": torch.zeros(256)}
    (tmp_path / "model.safetensors").unlink()
    save_file({name: one for name, one in tensors.items() if not name.endswith("scales")}, tmp_path / "a.safetensors")
    save_file(
        {name: one for name, one in tensors.items() if name.endswith("scales")} | bias, tmp_path / "b.safetensors"
    )
    assert read(tmp_path).keys() == values.keys()


Change = Callable[[dict[str, Tensor]], object]
QUERY = f"model.{LAYER}.q_proj"


def cut(part: str) -> Change:
    return lambda tensors: tensors.update({f"{QUERY}.{part}": tensors[f"{QUERY}.{part}"][:-1].clone()})


def drop(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{QUERY}.{part}")


def fill(part: str, value: int) -> Change:
    return lambda tensors: tensors[f"{QUERY}.{part}"].fill_(value)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "gptq-4",
            cut("qzeros"),
            r"model.safetensors: tensor 'model.*q_proj.qzeros' is I32 \[1, 32\]; .* I32 \[2, 32\]",
        ),
        ("gptq-4", cut("scales"), r"q_proj.scales' is F16 \[1, 256\]; .* F32 or F16 or BF16 \[2, 256\]"),
        ("gptq-4", drop("scales"), r"model.safetensors: module '.*q_proj' is quantized, but lacks a tensor 'scales'"),
        ("gptq-4", fill("g_idx", 7), "q_proj' .* can't be read: g_idx has groups outside of the 2 that have scales"),
        ("awq-gemm", drop("qzeros"), "lacks a tensor 'qzeros'"),
        ("awq-gemv", cut("scales"), r"q_proj.scales' is F16 \[255, 16\]"),
        ("fp8-tensor", drop("weight_scale"), "lacks a tensor 'weight_scale'"),
        ("fp8-block", cut("weight_scale_inv"), r"weight_scale_inv' is F32 \[1, 2\]; .* \[2, 2\]"),
        ("ct-w4", cut("weight_scale"), r"weight_scale' is BF16 \[255, 8\]; .* \[256, 8\]"),
        ("ct-w4-zeros", drop("weight_zero_point"), "lacks a tensor 'weight_zero_point'"),
        ("bnb-nf4", cut("weight.absmax"), r"weight.absmax' is F32 \[1023\]; .* \[1024\]"),
        ("bnb-nf4", fill("weight.quant_state.bitsandbytes__nf4", 65), "q_proj.*bitsandbytes__nf4' describes no matrix"),
        ("bnb-nested", drop("weight.nested_absmax"), "lacks a tensor 'weight.nested_absmax'"),
        ("bnb-int8", cut("SCB"), r"SCB' is F32 \[255\]; .* \[256, 1\]"),
        ("mxfp4", cut("weight_scales"), r"weight_scales' is U8 \[255, 8\]; .* \[256, 8\]"),
    ],
)
def test_what_lies_is_named(tmp_path: Path, case: str, change: Change, message: str) -> None:
    stated, quantize = files.CASES[case]
    files.write(tmp_path, stated, quantize, only=f"{LAYER}.q_proj")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


def test_groups_that_are_not_what_is_stated(tmp_path: Path) -> None:
    stated, quantize = files.CASES["gptq-4-sym"]
    files.write(tmp_path, stated | {"group_size": 32}, quantize, only=f"{LAYER}.q_proj")
    with pytest.raises(ModelLoadError, match=r"qzeros' is I32 \[4, 32\]; .* imply I32 \[8, 32\]"):
        read(tmp_path)


def test_modules_with_bits_and_groups_of_their_own(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: rules for some modules, by patterns."""
    stated, quantize = files.CASES["gptq-4"]
    rules = {r"+:.*\.k_proj": {"bits": 8, "group_size": 32}, r".*\.v_proj": {"group_size": 64}, r"-:.*\.o_proj": {}}
    own = {"k_proj": files.gptq(8, 32), "v_proj": files.gptq(4, 64)}

    def by_name(name: str, weight: Tensor) -> Any:
        return own.get(name.rpartition(".")[2], quantize)(name, weight)

    values = files.write(tmp_path, stated | {"dynamic": rules}, by_name, ("o_proj",), only=LAYER)
    found = read(tmp_path)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in values.items())
    source = SafetensorsSource(tmp_path, "a model")
    matrices = find_matrices(source, ModelConfig.from_pretrained(tmp_path).hf_config["quantization_config"])
    assert [matrices[f"model.{LAYER}.{part}_proj.weight"].type for part in "qkv"] == ["U4_128", "U8_32", "U4_32"]


def test_scattered_groups_are_no_blocks() -> None:
    numbers = Numbers(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 2), None, torch.arange(64) % 2)
    with pytest.raises(ValueError, match="scattered over columns, where 32 ones after another should share one"):
        numbers.blocks(False, 32)


def test_what_is_no_number_in_eight_bits_shows() -> None:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[1, 40] = 0x7F
    scales = Numbers(codes, torch.ones(2, 1), None, 64, "float8").blocks(True, 128).view(2, 2, 40)[:, :, 32:36]
    assert scales.contiguous().view(torch.float32).isnan().flatten().tolist() == [False, False, False, True]


def test_a_curve_that_is_none_is_refused(tmp_path: Path) -> None:
    files.write(tmp_path, *files.CASES["bnb-nf4"], only=f"{LAYER}.q_proj")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{QUERY}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"quant_type": "nf3"}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="quant_type is 'nf3'"):
        read(tmp_path)
