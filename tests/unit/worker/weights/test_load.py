"""The loader fills a model from good files in any layout, and names file, tensor and numbers of a bad one."""

import json
import re
import struct
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from quire import LLM
from quire.config.model import ModelConfig
from quire.errors import ConfigError, ModelLoadError
from quire.models import safetensors
from quire.models.causal_lm import CausalLM
from quire.models.shards import read_header
from quire.models.weights import CheckpointFormat
from quire.worker.weights.load import LoadReport, load_model_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 32,
}


class TinyModel(nn.Module):
    """Three parameters, or those of `modules`, under their checkpoint names; ignores other names, as a model may."""

    filled_weights: AbstractSet[str] = frozenset()
    form = CheckpointFormat()

    def __init__(self, dtype: torch.dtype = torch.float32, **modules: nn.Module) -> None:
        super().__init__()
        self.dtype = dtype
        for name, module in (modules or {"embed": nn.Embedding(16, 8), "proj": nn.Linear(8, 6)}).items():
            self.add_module(name, module.to(dtype))
        for parameter in self.parameters():
            nn.init.constant_(parameter, torch.nan)
        self.missing_weights = set(self.checkpoint_shapes())

    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def reads(self, name: str) -> bool:
        return name not in self.filled_weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in parameters:
                parameters[name].copy_(tensor)
                self.missing_weights.discard(name)


def good_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (16, 8), "proj.weight": (6, 8), "proj.bias": (6,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def config_of(directory: Path) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return ModelConfig.from_pretrained(directory)


def load(
    directory: Path, model: nn.Module | None = None, progress: Any = False, load_format: str = "auto"
) -> tuple[nn.Module, LoadReport]:
    model = model or TinyModel()
    report = load_model_weights(cast(CausalLM, model), config_of(directory), load_format, progress)
    return model, report


def assert_loaded(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for name, tensor in good_tensors().items():
        assert torch.equal(dict(model.named_parameters())[name], tensor.to(dtype)), name


def write_shards(directory: Path, home: dict[str, str], index: dict[str, str] | None = None) -> None:
    """Write each tensor into the file that `home` gives it, and `index` (default: the truth) as the index."""
    tensors = good_tensors()
    for file in set(home.values()):
        save_file({name: tensors[name] for name, place in home.items() if place == file}, directory / file)
    text = json.dumps({"metadata": {}, "weight_map": home if index is None else index})
    (directory / "model.safetensors.index.json").write_text(text)


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HOME = {"embed.weight": A, "proj.weight": B, "proj.bias": B}


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else text(header)
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# --- good checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_single_file(tmp_path: Path, load_format: str) -> None:
    save_file(good_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, report = load(tmp_path, load_format=load_format)
    assert_loaded(model)
    assert (report.num_files, report.num_bytes) == (1, 4 * (16 * 8 + 6 * 8 + 6))
    assert report.seconds > 0


def test_cast_on_copy(tmp_path: Path) -> None:
    save_file(good_tensors(), tmp_path / "model.safetensors")
    model, _ = load(tmp_path, TinyModel(torch.bfloat16))
    assert_loaded(model, torch.bfloat16)


def test_shards_with_and_without_index(tmp_path: Path) -> None:
    write_shards(tmp_path, HOME)
    model, report = load(tmp_path)
    assert_loaded(model)
    assert report.num_files == 2
    (tmp_path / "model.safetensors.index.json").unlink()
    model, report = load(tmp_path)
    assert_loaded(model)
    assert report.num_files == 2


def test_copies_in_other_layouts_are_ignored(tmp_path: Path) -> None:
    save_file(good_tensors(), tmp_path / "model.safetensors")
    save_file(good_tensors(), tmp_path / "consolidated.safetensors")
    save_file(good_tensors(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    assert load(tmp_path)[1].num_files == 1


def test_extra_tensors_are_left_to_the_model(tmp_path: Path) -> None:
    save_file(good_tensors() | {"rotary.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    assert_loaded(load(tmp_path)[0])


def test_windows_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "_WINDOW_BYTES", 200)  # tensors of 512, 24 and 192 bytes
    save_file(good_tensors(), tmp_path / "model.safetensors")
    opened: list[Path] = []
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda path, **kw: opened.append(path) or real(path, **kw))
    assert_loaded(load(tmp_path)[0])
    assert len(opened) == 2  # for each window


def test_tensors_that_are_there_already_are_not_read(tmp_path: Path) -> None:
    save_file(good_tensors(), tmp_path / "model.safetensors")
    model = TinyModel()
    model.filled_weights = {"embed.weight"}
    model.missing_weights -= model.filled_weights
    given: list[str] = []
    real = model.load_weights
    model.load_weights = lambda weights: real((given.append(name) or name, tensor) for name, tensor in weights)
    load(tmp_path, model)
    assert sorted(given) == ["proj.bias", "proj.weight"]
    assert model.get_parameter("embed.weight").isnan().all()


def test_progress_is_drawn_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(good_tensors(), tmp_path / "model.safetensors")
    load(tmp_path, progress=False)
    assert capsys.readouterr().err == ""
    load(tmp_path, progress=True)
    assert "Loading weights: 100%" in capsys.readouterr().err


# --- bad checkpoints --------------------------------------------------------------------------------------------------


def refused(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    return str(caught.value)


def test_no_weights_says_what_is_supported(tmp_path: Path) -> None:
    assert "no *.safetensors" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pickle" in refused(tmp_path)


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    tensors = good_tensors()
    save_file({"embed.weight": tensors["embed.weight"]}, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert "lacks 2 of the model's tensors: proj.bias, proj.weight" in message
    assert "LlamaForCausalLM" in message


def test_wrong_shape_names_the_tensor(tmp_path: Path) -> None:
    save_file(good_tensors() | {"proj.weight": torch.zeros(5, 8)}, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert "'proj.weight' [5, 8] of model.safetensors" in message
    assert "does not fit" in message


def test_the_models_own_refusal_gets_the_file(tmp_path: Path) -> None:
    class Strict(TinyModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, _ in weights:
                raise ModelLoadError(f"no place for {name!r}")

    save_file(good_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"^model\.safetensors: no place for 'embed\.weight'"):
        load(tmp_path, Strict())


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, HOME)
    (tmp_path / B).unlink()
    assert f"names 1 missing shards: {B}" in refused(tmp_path)


def test_index_that_lies(tmp_path: Path) -> None:
    write_shards(tmp_path, HOME, index=HOME | {"proj.bias": A})
    assert f"places tensor 'proj.bias' in {A}, but it is in {B}" in refused(tmp_path)
    write_shards(tmp_path, HOME, index=HOME | {"ghost": A})
    assert f"places tensor 'ghost' in {A}, but no shard holds it" in refused(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write_shards(tmp_path, HOME)
    tensors = good_tensors()
    save_file({name: tensors[name] for name in ("embed.weight", "proj.bias")}, tmp_path / A)
    assert f"'proj.bias' of {str(tmp_path)!r} is in both {A} and {B}" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "[" * 100_000])
def test_broken_index(tmp_path: Path, text: str) -> None:
    save_file(good_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(tmp_path)


@pytest.mark.parametrize(
    "file", ["../up.safetensors", "/abs.safetensors", "sub/a.safetensors", "model.bin", "", 3, None]
)
def test_index_that_leads_out_of_the_directory(tmp_path: Path, file: Any) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(good_tensors(), tmp_path / "up.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"embed.weight": file}}))
    assert "no *.safetensors name" in refused(inside)


ONE = entry(0, 32, [8])
BAD_FILES = {
    "empty": (b"", "(0 bytes)"),
    "shorter than its length field": (b"\x01\x00", "(2 bytes)"),
    "header longer than the file": (pack(b"{}", length=1000), "invalid header length (10 bytes)"),
    "header length huge": (pack(b"{}", length=2**64 - 1), "header too large"),
    "header not JSON": (pack(b"{oops}"), "invalid JSON"),
    "header not UTF-8": (pack(b'{"\xff": 1}'), "invalid UTF-8"),
    "header nested deep": (pack(b"[" * 100_000), "invalid JSON"),
    "header a list": (pack([]), "invalid JSON"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "expected a string"),
    "tensor twice": (pack({"a": ONE, "b": ONE}, bytes(32)), "invalid offset for tensor"),
    "one name twice": (
        pack(b'{"a": %b, "a": %b}' % (text(ONE), text(entry(32, 64, [8]))), bytes(64)),
        "invalid offset for tensor",
    ),
    "key twice": (
        pack(b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 4]}}'),
        "duplicate field `dtype`",
    ),
    "entry a number": (pack({"a": 1}), "invalid type: integer `1`"),
    "entry lacks a key": (pack({"a": {"dtype": "F32", "shape": []}}), "missing field `data_offsets`"),
    "unknown dtype": (pack({"a": entry(0, 32, [8], "F128")}, bytes(32)), "`F128`"),
    "dtype that torch lacks": (pack({"a": entry(0, 3, [4], "F6_E2M3")}, bytes(3)), "'a' has dtype 'F6_E2M3'"),
    "dtype a list": (pack({"a": ONE | {"dtype": []}}, bytes(32)), "invalid type: sequence"),
    "negative size": (pack({"a": entry(0, 32, [-8])}, bytes(32)), "integer `-8`"),
    "float size": (pack({"a": entry(0, 32, [8.0])}, bytes(32)), "floating point `8.0`"),
    "one offset": (pack({"a": ONE | {"data_offsets": [0]}}, bytes(32)), "expected a tuple of size 2"),
    "end before begin": (pack({"a": entry(32, 0, [8])}, bytes(32)), "tensor `a`"),
    "wrong span": (pack({"a": entry(0, 16, [8])}, bytes(16)), "invalid shape, data type, or offset"),
    "wrong dtype size": (pack({"a": entry(0, 32, [8], "BF16")}, bytes(32)), "invalid shape, data type, or offset"),
    "product overflows": (pack({"a": entry(0, 0, [2**62, 2**62])}), "overflow"),
    "overlap": (pack({"a": ONE, "b": entry(16, 48, [8])}, bytes(48)), "tensor `b`"),
    "gap": (pack({"a": ONE, "b": entry(40, 72, [8])}, bytes(72)), "tensor `b`"),
    "gap at the start": (pack({"a": entry(8, 40, [8])}, bytes(40)), "tensor `a`"),
    "truncated data": (pack({"a": ONE}, bytes(31)), "file not fully covered"),
    "bytes left over": (pack({"a": ONE}, bytes(33)), "file not fully covered"),
    "no tensors but data": (pack({}, bytes(4)), "file not fully covered"),
}


@pytest.mark.parametrize(("data", "complaint"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_corrupt_file(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path}/model.safetensors")
    assert complaint in message


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(good_tensors(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 23):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            read_header(path)


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert re.search(r"model.safetensors can't be read: (?!None)\w", refused(tmp_path))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=4)), min_size=1, max_size=3))
def test_any_corruption_of_the_header_is_an_error_or_harmless(tmp_path: Path, edits: list[tuple[int, bytes]]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(good_tensors(), path)
    data = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(data[:8], "little")
    for position, new in edits:
        position %= header_end
        new = new[: header_end - position]
        data[position : position + len(new)] = new
    path.write_bytes(data)
    try:
        model, _ = load(tmp_path)
    except ModelLoadError:
        return
    # An edit may still rename, reorder or reinterpret tensors, but every parameter was filled from the file.
    assert all(name in {e.name for e in read_header(path)} for name, _ in model.named_parameters())


# --- dummy weights ----------------------------------------------------------------------------------------------------


def dummy(directory: Path, model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    config = ModelConfig.from_pretrained(directory, seed=seed, load_format="dummy")
    report = load_model_weights(cast(CausalLM, model), config, load_format="dummy", progress=False)
    parameters = dict(model.named_parameters())
    assert report.num_files == 0
    assert report.num_bytes == sum(p.numel() * p.element_size() for p in parameters.values())
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path: Path) -> None:
    first = dummy(tmp_path, TinyModel())
    torch.manual_seed(99)
    again = dummy(tmp_path, TinyModel())
    alone = dummy(tmp_path, TinyModel(proj=nn.Linear(8, 6)))
    other = dummy(tmp_path, TinyModel(), seed=1)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
    assert torch.equal(first["proj.weight"], alone["proj.weight"])
    assert not torch.equal(first["embed.weight"][:6], first["proj.weight"])


def test_dummy_weights_of_another_dtype_are_the_same_rounded(tmp_path: Path) -> None:
    full, half = dummy(tmp_path, TinyModel()), dummy(tmp_path, TinyModel(torch.bfloat16))
    assert all(torch.equal(tensor.bfloat16(), half[name]) for name, tensor in full.items())


def test_dummy_weights_leave_the_global_generator_alone(tmp_path: Path) -> None:
    model = TinyModel()
    before = torch.get_rng_state()
    dummy(tmp_path, model)
    assert torch.equal(before, torch.get_rng_state())


def test_dummy_scales(tmp_path: Path) -> None:
    values = dummy(tmp_path, TinyModel(norm=nn.LayerNorm(64), wide=nn.Linear(512, 1200)))  # over two periods long
    assert torch.equal(values["norm.weight"], torch.ones(64))
    assert 0 < values["norm.bias"].abs().max() < 0.1
    wide = values["wide.weight"]
    assert abs(wide.std().item() - 0.02) < 1e-3
    assert abs(wide.mean().item()) < 1e-3
    assert wide.unique(dim=0).shape[0] == 1200  # equal rows would tie logits


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "change", [{"vocab_size": 2**31 - 1, "hidden_size": 2**17}, {"max_position_embeddings": 2**17}]
)
def test_a_model_that_no_memory_holds(tmp_path: Path, kernels: str, change: dict[str, int]) -> None:
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0**31}, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="there is no memory for the model"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, kernels=kernels)
