"""`quire quantize`: what it writes, read back by the formats' own formulas, and what it refuses."""

import json
import math
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.model import ModelConfig
from quire.entrypoints.cli import quantize_files, quantize_model
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.quantize_codes import Scheme, gptq, nearest, search_scales
from quire.models.layerwise import Survey
from quire.utils.hub import resolve_model_path

DEMO = resolve_model_path("demo")
METHODS = ("gptq", "awq", "int4", "int8", "fp8")
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each column of eight
FEW = ("--num-samples", "8", "--length", "64")


def unpack(words: Tensor, bits: int, places: Any = None) -> Tensor:
    """int32 [N, W] -> codes [N, W * 32 / bits], one by one."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    columns = [wide >> (bits * place) & (2**bits - 1) for place in places or range(32 // bits)]
    return torch.stack(columns, dim=2).flatten(1)


def dequantized(tensors: dict[str, Tensor], name: str, method: str, bits: int) -> Tensor:
    """A matrix [N, K] as the format's documents say."""
    if method == "gptq":
        codes, zeros = unpack(tensors[f"{name}.qweight"].t(), bits), unpack(tensors[f"{name}.qzeros"], bits) + 1
        groups, scales = tensors[f"{name}.g_idx"].long(), tensors[f"{name}.scales"].float()
        return (codes - zeros.t()[:, groups]) * scales.t()[:, groups]
    if method == "awq":
        codes, zeros = (unpack(tensors[f"{name}.{each}"], bits, AWQ_PLACES) for each in ("qweight", "qzeros"))
        size, scales = len(codes) // len(zeros), tensors[f"{name}.scales"].float()
        return ((codes - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).t()
    scales = tensors[f"{name}.weight_scale"].float()
    if method == "fp8":
        return tensors[f"{name}.weight"].float() * scales
    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    codes = unpack(tensors[f"{name}.weight_packed"], bits)[:, :columns] - 2 ** (bits - 1)
    assert len(codes) == rows
    return codes * scales.repeat_interleave(columns // scales.shape[1], 1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the demo's family."""
    return made(tmp_path_factory.mktemp("model") / "small")


def made(folder: Path, **change: Any) -> Path:
    """A model of two layers whose inputs differ a lot in size; of the demo's family, but for what is changed."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEMO / name, folder / name)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = json.loads((DEMO / "config.json").read_text()) | sizes | change
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = Survey(ModelConfig.from_pretrained(folder, dtype="float32")).model.checkpoint_shapes()
    tensors = {name: (torch.randn(shape) * 0.2).to(torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {name: (1 + each.abs() * 9) for name, each in tensors.items() if each.dim() == 1}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_of_a_model_that_sees_the_text_is_written(small: Path, tmp_path: Path) -> None:
    sees, outs = tmp_path / "sees", [tmp_path / "text", tmp_path / "whole"]
    shutil.copytree(small, sees)
    text = json.loads((small / "config.json").read_text())
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (sees / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 8}}))
    tensors = {f"language_model.{name}": each for name, each in load_file(small / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.patch.weight": torch.zeros(8, 3)}, sees / "model.safetensors")
    for model, out in zip((small, sees), outs, strict=True):
        assert main(["quantize", str(model), str(out), "--method", "int8", *FEW]) == 0
    expected, found = (load_file(out / "model.safetensors") for out in outs)
    assert expected.keys() == found.keys()
    assert [name for name, each in expected.items() if not torch.equal(each, found[name])] == []
    assert json.loads((outs[1] / "config.json").read_text())["architectures"] == text["architectures"]
    assert ModelConfig.from_pretrained(outs[1]).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_stands_for_the_weights(
    small: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(small), str(out), "--method", method, *FEW]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    names = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "tokenizer.json", "tokenizer_config.json"]
    before, after = load_file(small / "model.safetensors"), load_file(out / "model.safetensors")
    bits = 8 if method in ("int8", "fp8") else 4
    for name, weight in before.items():
        if ".layers." not in name or weight.dim() == 1:
            if method != "awq" or "layernorm" not in name:
                assert torch.equal(after[name], weight)
        elif method != "awq":  # whose matrices are scaled: see the next test
            error = (dequantized(after, name.removesuffix(".weight"), method, bits) - weight.float()).norm()
            assert error < {"gptq": 0.2, "int4": 0.12, "int8": 0.01, "fp8": 0.05}[method] * weight.float().norm()
    said = json.loads((out / "config.json").read_text())
    kind = method if method in ("gptq", "awq") else "compressed-tensors"
    assert said.pop("quantization_config")["quant_method"] == kind
    assert said == json.loads((small / "config.json").read_text())
    card = (out / "README.md").read_text()
    assert f"small, {method}" in card
    assert "| before | " in card
    assert "| 1 | " in card


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_model_says_what_the_card_says(small: Path, tmp_path: Path, method: str) -> None:
    """The dequantized checkpoint is a plain one, whose loss is the one that was told (activations apart)."""
    out, plain = tmp_path / "out", tmp_path / "plain"
    assert main(["quantize", str(small), str(out), "--method", method, *FEW]) == 0
    after = load_file(out / "model.safetensors")
    tensors = {}
    for name, weight in load_file(small / "model.safetensors").items():
        is_matrix = ".layers." in name and weight.dim() == 2
        bits = 8 if method in ("int8", "fp8") else 4
        tensors[name] = dequantized(after, name.removesuffix(".weight"), method, bits) if is_matrix else after[name]
    shutil.copytree(small, plain)
    save_file({name: each.float().contiguous() for name, each in tensors.items()}, plain / "model.safetensors")
    assert main(["quantize", str(plain), str(tmp_path / "again"), "--method", "int8", *FEW]) == 0
    told = [losses((folder / "README.md").read_text()) for folder in (out, tmp_path / "again")]
    assert told[0][1] == pytest.approx(told[1][0], abs=0.05 if method == "fp8" else 2e-3)


def losses(card: str) -> list[float]:
    """Before and after."""
    return [float(card.split(f"| {when} | ")[1].split(" ")[0]) for when in ("before", "after")]


@pytest.mark.nightly
def test_calibration_makes_the_demo_better_than_rounding(tmp_path: Path) -> None:
    found, served = {}, {"demo": loss_of("demo")}
    for method in METHODS:
        args = ["quantize", "demo", str(tmp_path / method), "--method", method, "--num-samples", "24"]
        assert main([*args, "--length", "256"]) == 0
        before, found[method] = losses((tmp_path / method / "README.md").read_text())
        assert before - 0.005 < found[method] < before + 0.03
        served[method] = loss_of(str(tmp_path / method))
        assert served[method] - served["demo"] == pytest.approx(found[method] - before, abs=0.008)
    for losses_of in (found, served):
        assert losses_of["gptq"] < losses_of["int4"]
        assert losses_of["awq"] < losses_of["int4"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq", "int4"])
def test_what_is_written_is_served(small: Path, tmp_path: Path, method: str) -> None:
    assert main(["quantize", str(small), str(tmp_path / "out"), "--method", method, *FEW]) == 0
    before, after = losses((tmp_path / "out" / "README.md").read_text())
    plain, served = loss_of(str(small), 8, 64), loss_of(str(tmp_path / "out"), 8, 64)
    assert served - plain == pytest.approx(after - before, abs=0.1)


@pytest.mark.slow
def test_queries_of_their_own_and_experts_are_scaled(tmp_path: Path) -> None:
    """Norms give what they gave, times what the columns after them are divided by."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = made(tmp_path / "small", architectures=["OlmoeForCausalLM"], model_type="olmoe", **experts)
    assert main(["quantize", str(small), str(tmp_path / "out"), "--method", "awq", *FEW]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (small, tmp_path / "out"))
    layer = "model.layers.0."
    for norm, matrix in (
        ("input", "self_attn.q_proj"),
        ("input", "self_attn.k_proj"),
        ("post_attention", "mlp.experts.3.up_proj"),
    ):
        scales, new_scales = (x[f"{layer}{norm}_layernorm.weight"].float() for x in (before, after))
        assert not torch.equal(scales, new_scales)
        expected = before[f"{layer}{matrix}.weight"].float() * scales
        error = (dequantized(after, f"{layer}{matrix}", "awq", 4) * new_scales - expected).norm()
        assert error < 0.15 * expected.norm()


def loss_of(model: str, num_samples: int = 24, length: int = 256) -> float:
    """Mean cross entropy of the text that is held out by default, as the engine has it, in nats."""
    llm = LLM(model, num_kv_blocks=64, max_model_len=length + 1, show_progress=False, weight_cache=False)
    tokenizer = llm.get_tokenizer()
    start, ids = tokenizer.encode(""), tokenizer.encode(quantize_model._STORIES.read_text("utf-8"), False)
    step = length - len(start)
    rows = [start + ids[i : i + step] for i in range(0, num_samples * step, 8 * step)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = 0.0
    for output in llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False):
        told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found -= sum(told_of[token].logprob for token, told_of in told) / (length - 1) / len(rows)
    llm.llm_engine.shutdown()
    return found


def test_gptq_leaves_less_error_than_rounding() -> None:
    torch.manual_seed(1)
    matrix, inputs = torch.randn(48, 96), torch.randn(400, 24) @ torch.randn(24, 96) + 0.1 * torch.randn(400, 96)
    hessian = inputs.t() @ inputs
    errors = []
    for desc_act in (False, True):
        scheme = Scheme("gptq", 4, 32, torch.float16, desc_act)
        codes = gptq(matrix, hessian, scheme)
        assert codes.groups.bincount().tolist() == [32, 32, 32]
        assert (codes.groups.tolist() == sorted(codes.groups.tolist())) == (not desc_act)
        errors.append((inputs @ (codes.expand() - matrix).t()).norm())
    rounded = (inputs @ (nearest(matrix, scheme, None).expand() - matrix).t()).norm()
    assert errors[0] < 0.6 * rounded
    assert errors[1] < 0.6 * rounded


def test_gptq_of_inputs_that_depend_on_each_other_or_never_come() -> None:
    matrix, hessian = torch.randn(8, 32), torch.zeros(32, 32)
    hessian[:16, :16] = 1.0  # rank 1
    codes = gptq(matrix, hessian, Scheme("gptq", 4, 32, torch.float16))
    assert (codes.expand() - matrix).abs().max() < 1.0


def test_scales_follow_what_inputs_are_large() -> None:
    torch.manual_seed(2)
    matrix, activity = torch.randn(32, 64), torch.ones(64)
    activity[5] = 100.0
    hessian = torch.diag(activity**2)
    scheme = Scheme("awq", 4, 64, torch.float16)
    scales = search_scales([(matrix, hessian)], activity, scheme)
    assert scales.argmax() == 5
    plain, scaled = (nearest(matrix * by, scheme, None).expand() / by - matrix for by in (1.0, scales))
    assert ((scaled @ hessian) * scaled).sum() < 0.5 * ((plain @ hessian) * plain).sum()


@pytest.mark.slow
def test_a_big_checkpoint_is_written_in_shards(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_files, "SHARD_BYTES", 20_000)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["quantize", str(small), str(parts), "--method", "int8", *FEW]) == 0
    monkeypatch.undo()
    assert main(["quantize", str(small), str(whole), "--method", "int8", *FEW]) == 0
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
    count = len(set(index["weight_map"].values()))
    assert count > 2
    for name, shard in index["weight_map"].items():
        assert shard.endswith(f"-of-{count:05}.safetensors")
        assert torch.equal(load_file(parts / shard)[name], tensors[name])


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["quantize", *map(str, args)]) == 2
    return capsys.readouterr().err


def test_refusals(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").touch()
    assert "is not empty" in refusal(capsys, small, full, "--method", "int4")
    assert "is not empty" in refusal(capsys, small, full / "kept", "--method", "int4")
    assert "48 does not divide the 64 columns" in refusal(capsys, small, out, "--method", "int4", "--group-size", 48)
    assert "leave it out" in refusal(capsys, small, out, "--method", "fp8", "--group-size", 32)
    for size in (0, -7):
        assert "-1 for rows" in refusal(capsys, small, out, "--method", "int4", "--group-size", size)
    assert "gptq's" in refusal(capsys, small, out, "--method", "awq", "--bits", 8)
    assert "gptq's" in refusal(capsys, small, out, "--method", "int8", "--desc-act")
    assert "between 0 and 1" in refusal(capsys, small, out, "--method", "gptq", "--damp", 2)
    missing, short, binary = tmp_path / "missing.txt", tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("too short")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "missing.txt: No such file" in refusal(capsys, small, out, "--method", "gptq", "--calibration", missing)
    assert "does not end" in refusal(capsys, small, out, "--method", "gptq", "--calibration", "/dev/zero")
    assert "too few" in refusal(capsys, small, out, "--method", "gptq", "--calibration", short)
    assert "and --length 1" in refusal(capsys, small, out, "--method", "gptq", "--length", 3)
    for method in ("gptq", "awq"):  # the only one would be held out
        assert "are the least, --num-samples 2" in refusal(capsys, small, out, "--method", method, "--num-samples", 1)
    assert "UTF-8" in refusal(capsys, small, out, "--method", "gptq", "--calibration", binary)
    with pytest.raises(SystemExit):
        main(["quantize", str(small), str(out), "--method", "gguf"])
    assert "invalid choice: 'gguf'" in capsys.readouterr().err
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(quantize_model.shutil, "disk_usage", lambda _: usage)
    assert "make room" in refusal(capsys, small, out, "--method", "int4")
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.txt", "full", "short.txt"]


def test_a_name_that_is_no_text(small: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text-\udcff", tmp_path / "out"
    shutil.copyfile(quantize_model._STORIES, text)
    assert main(["quantize", str(small), str(out), "--method", "int8", "--calibration", str(text), *FEW]) == 0
    assert "of text-?, which it was not" in (out / "README.md").read_text()


def test_a_configuration_with_half_a_character_is_written_as_it_is(small: Path, tmp_path: Path) -> None:
    lone, out = tmp_path / "lone", tmp_path / "out"
    shutil.copytree(small, lone)
    config = json.loads((small / "config.json").read_text()) | {"_name_or_path": "x\ud800y"}
    (lone / "config.json").write_text(json.dumps(config))
    assert main(["quantize", str(lone), str(out), "--method", "int8", *FEW]) == 0
    assert json.loads((out / "config.json").read_text())["_name_or_path"] == "x\ud800y"


def test_what_is_quantized_already_is_refused(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = tmp_path / "done"
    assert main(["quantize", str(small), str(done), "--method", "int8", *FEW]) == 0
    assert "quantized" in refusal(capsys, done, tmp_path / "out", "--method", "int4")


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_zeros_in_float16_stay_zeros(small: Path, tmp_path: Path, method: str) -> None:
    half, name = shutil.copytree(small, tmp_path / "half"), "model.layers.0.mlp.up_proj"
    tensors = {key: each.half() for key, each in load_file(small / "model.safetensors").items()}
    tensors[f"{name}.weight"][3] = 0
    tensors[f"{name}.weight"][4] = 1e-6
    save_file(tensors, half / "model.safetensors")
    assert main(["quantize", str(half), str(tmp_path / "out"), "--method", method, *FEW]) == 0
    bits = 8 if method in ("int8", "fp8") else 4
    found = dequantized(load_file(tmp_path / "out" / "model.safetensors"), name, method, bits)
    assert not found[3].any()
    assert (found[4] - (1e-6 if method != "awq" else found[4])).abs().max() < 1e-6
    assert found.isfinite().all()


def test_rows_that_are_no_whole_words_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would be written could not be read again: words of a row hold eight columns, and of int8 four."""
    small = made(tmp_path / "small", intermediate_size=92)
    for method in ("int4", "gptq"):
        told = refusal(capsys, small, tmp_path / "out", "--method", method)
        assert f"{method} packs 8 numbers in a word (int8 4), and model.layers.0.mlp." in told
    assert main(["quantize", str(small), str(tmp_path / "out"), "--method", "int8", *FEW]) == 0
    assert loss_of(str(tmp_path / "out"), 8, 64) == pytest.approx(loss_of(str(small), 8, 64), abs=0.1)


def test_every_template_is_brought_along(small: Path, tmp_path: Path) -> None:
    model = shutil.copytree(small, tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (model / name).write_text(name)
    assert main(["quantize", str(model), str(tmp_path / "out"), "--method", "int8", *FEW]) == 0
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "out" / name).read_text() == name


def test_experts_in_one_tensor_are_refused(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated = json.loads((small / "config.json").read_text())
    model = shutil.copytree(small, tmp_path / "experts")
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 8, stated["hidden_size"])}
    save_file(stacked, model / "model.safetensors")
    seeing = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe_text"}
    for config in ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, seeing):
        (model / "config.json").write_text(json.dumps(stated | config))
        assert "all experts of a layer in one tensor" in refusal(capsys, model, tmp_path / "out", "--method", "int4")


def test_weights_that_are_no_numbers_are_refused(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = math.nan
    save_file(tensors, broken / "model.safetensors")
    assert main(["quantize", str(broken), str(tmp_path / "out"), "--method", "int4", *FEW]) == 1
    assert "'model.layers.1.mlp.up_proj.weight' has values that are not finite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_link_to_an_empty_folder_and_the_working_directory(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("real")
    assert main(["quantize", str(small), str(tmp_path / "link"), "--method", "int8", *FEW]) == 0
    monkeypatch.chdir(tmp_path / "here")
    assert main(["quantize", str(small), ".", "--method", "int8", *FEW]) == 0
    assert (tmp_path / "link").is_symlink()
    for name in ("real", "here"):
        assert (tmp_path / name / "model.safetensors").is_file()


def test_a_mounted_disk_is_refused_before(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder can't take its place, which would show when all is done."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert "a disk of its own: name a new folder" in refusal(capsys, small, tmp_path / "out", "--method", "int4")


def test_a_disk_that_is_full_in_the_end(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        told = refusal(capsys, small, tmp_path / "out", "--method", "int8", *FEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"error: {tmp_path / 'out'} can't be written: Error while serializing: I/O error: File too large" in told
    assert [*tmp_path.iterdir()] == []


def test_a_signal_leaves_nothing_half_written(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_model, "_check_room", lambda *_: signal.raise_signal(signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["quantize", str(small), str(tmp_path / "out"), "--method", "int4"]) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not list(tmp_path.iterdir())
