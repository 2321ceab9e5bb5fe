"""gpt-oss as it is published: experts in MXFP4, which stay in four bits."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError
from quire.ops.native.library import TORCH

pytest.importorskip("transformers")
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
tiny: Any = importlib.import_module("tiny_models")
files: Any = importlib.import_module("quantized_files")

STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
PROMPT = [5, 90, 17, 3, 3, 41, 8, 77, 60, 12, 9, 33, 34, 35]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    sizes = {"hidden_size": 96, "intermediate_size": 32}  # of columns no multiple of 64, as 2880 are none of 128
    monkeypatch.setitem(tiny.CASES, "gpt-oss-mxfp4", ("GptOssConfig", "GptOssForCausalLM", tiny.GPT_OSS | sizes))
    return tiny.build_theirs("gpt-oss-mxfp4")


def quantize(model: Any, directory: Path) -> Path:
    """Write it with experts in MXFP4, and let it have the values that these stand for."""
    tiny.save(model, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, matrices in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            turned = matrices.transpose(1, 2)
            made, values = files.mxfp4(("blocks", "scales"))(name, turned.flatten(0, 1))
            matrices.copy_(values.view(turned.shape).transpose(1, 2))
            del tensors[name]
            tensors |= {f"{name}_{end}": each.unflatten(0, turned.shape[:2]) for end, each in made.items()}
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": STATED}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kernels", [TORCH, "native"], indirect=True)
def test_experts_in_mxfp4_are_those_of_the_dequantized_model(theirs: Any, kernels: str, tmp_path: Path) -> None:
    ours = tiny.build_ours(quantize(theirs, tmp_path), "float32", kernels)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(tiny.Paged(ours).prefill(0, PROMPT, chunk=5), expected, atol=1e-4, rtol=0)
    if kernels != TORCH:
        experts = ours.model.model.layers[0].mlp.experts
        assert all(expert.gate_up_proj.method.type.name == "C4_32" for expert in experts)
        assert experts[0].down_proj.weights["packed"].nbytes < experts[0].down_proj.in_features * 96


def test_a_checkpoint_of_other_experts_is_refused(theirs: Any, tmp_path: Path) -> None:
    config = json.loads((quantize(theirs, tmp_path) / "config.json").read_text())
    for change, message in (
        ({"num_local_experts": 4}, r"experts\.4\.\w+.*has no place|has no\s+place"),
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0; only 7.0 is supported"),
        ({"swiglu_limit": "7"}, "swiglu_limit = '7'; it must be a number"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6; it must be a whole number from 1 to 5"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadError, match=message):
            tiny.build_ours(tmp_path)
