"""What a checkpoint says of its quantization is recognized, checked, and held against what is asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs
from quire.config.model import ModelConfig
from quire.errors import ConfigError, ModelLoadError, QuireError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "torch_dtype": "float16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
WEIGHTS = {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
PACKED = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}


def write(path: Path, stated: dict[str, Any] | None, file: str = "") -> str:
    config = LLAMA | ({"quantization_config": stated} if stated and not file else {})
    (path / "config.json").write_text(json.dumps(config))
    if file:
        (path / file).write_text(json.dumps(stated))
    return str(path)


@pytest.mark.parametrize(
    ("stated", "file", "method"),
    [
        (GPTQ, "", "gptq"),
        ({"bits": 8, "group_size": -1, "desc_act": True, "sym": True}, "quantize_config.json", "gptq"),
        (AWQ, "", "awq"),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMV"}, "quant_config.json", "awq"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "", "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "", "fp8"),
        ({"quant_method": "compressed-tensors"} | PACKED, "", "compressed-tensors"),
        ({"load_in_4bit": True}, "", "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "", "mxfp4"),
        (None, "", None),
    ],
)
def test_methods_are_recognized(tmp_path: Path, stated: dict[str, Any] | None, file: str, method: str | None) -> None:
    path = write(tmp_path, stated, file)
    config = EngineArgs(path, device="cpu").resolve()
    assert config.quantization == method
    on_gpu = ModelConfig.from_pretrained(path, device="cuda")
    assert (config.model.dtype, on_gpu.dtype) == ("bfloat16", "float16" if method is None else "bfloat16")
    assert ModelConfig.from_pretrained(path, dtype="float16").dtype == "float16"
    if method is not None:
        assert EngineArgs(path, quantization=method).resolve().quantization == method  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("stated", "asked"), [(GPTQ, "gptq_marlin"), (AWQ, "awq_marlin")])
def test_vllms_names_of_kernels_are_those_of_methods(tmp_path: Path, stated: dict[str, Any], asked: Any) -> None:
    config = EngineArgs(write(tmp_path, stated), quantization=asked).resolve()
    assert config.quantization == stated["quant_method"]


@pytest.mark.parametrize(
    ("stated", "asked", "message"),
    [
        (GPTQ, "int8", r"quantization='int8' contradicts model .* quantized already \(gptq\)"),
        (GPTQ, "awq", r"quantization='awq' contradicts model .* quantized already \(gptq\)"),
        (GPTQ, "awq_marlin", r"quantization='awq' contradicts model .* quantized already \(gptq\)"),
        (None, "awq", "quantization='awq' contradicts model .* choose one of 'int8', 'int4', 'w8a8', 'w4a8', made"),
    ],
)
def test_contradictions_show_both(tmp_path: Path, stated: dict[str, Any] | None, asked: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(write(tmp_path, stated), quantization=asked).resolve()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("gptq", "quantization_config = 'gptq'; it must be an object"),
        ({"quant_method": "aqlm"}, "quantized with 'aqlm', which is not supported: .* gptq, awq, fp8"),
        (GPTQ | {"bits": 5}, "with gptq to 5 bits; supported are 2, 3, 4, 8"),
        (GPTQ | {"bits": "4"}, "with gptq to '4' bits"),
        (GPTQ | {"group_size": 0}, "group_size = 0; it must be a whole number over 0, or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq weights in the layout 'marlin', .* supported are 'gptq'"),
        (AWQ | {"bits": 8}, "with awq to 8 bits; supported are 4"),
        (AWQ | {"version": "gemv_fast"}, "awq weights in the layout 'gemv_fast', .* supported are 'gemm', 'gemv'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:("], "weights": WEIGHTS}}},
            r"targets \['re:\('\]: missing \), unterminated subpattern",
        ),
        ({"quant_method": "compressed-tensors", "sparsity_config": ["odd"]}, "sparse weights"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "a format 'marlin-24' of compressed-tensors"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}} | PACKED,
            "sparse weights .'sparse-24-bitmask'. of compressed-tensors, which is not supported",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}},
            },
            "weights of 3 bits in its config_groups",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": WEIGHTS}}},
            r"config_groups with targets None: it must be a list",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": 8}},
            },
            "input_activations an object or null",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": ["Linear"]}, "weights of None bits"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, stated: Any, message: str) -> None:
    with pytest.raises(QuireError, match=message):
        EngineArgs(write(tmp_path, stated)).resolve()


def _targeted(path: Path, target: str) -> str:
    group = {"targets": [target], "weights": WEIGHTS}
    return write(path, {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})


@pytest.mark.parametrize(
    "pattern",
    ["(.+)+x", "(?:a|b)*", "((.*)x?){9}", ".*.*.*.*.*x", "(a|.)(a|.)(a|.)(a|.)(a|.)x", "a?" * 200, "(" * 9999],
)
def test_patterns_that_may_take_for_ever_are_refused(tmp_path: Path, pattern: str) -> None:
    """No name of a module is matched with them: `re` would not come back."""
    with pytest.raises(ModelLoadError, match="config_groups with targets .*a pattern may take for ever; name"):
        EngineArgs(_targeted(tmp_path, f"re:{pattern}")).resolve()


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.self_attn\.(q|k|v|o)_proj$",
        r"^model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|gate_up|down)_proj$",
        r".*layers\.([0-9]|[1-5][0-9])\.mlp.*",
        r"^(?!.*lm_head).*_proj$",
        r"model\.layers\.(" + "|".join(map(str, range(61))) + r")\.mlp\.(gate_)?up_proj",
    ],
)
def test_patterns_as_they_are_published_are_taken(tmp_path: Path, pattern: str) -> None:
    assert EngineArgs(_targeted(tmp_path, f"re:{pattern}")).resolve().quantization == "compressed-tensors"
