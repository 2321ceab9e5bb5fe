"""The demo as GGUF: its tokens, its text, its parts, its refusals."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.entrypoints.server.catalog import _folders
from quire.errors import ConfigError, ModelLoadError
from quire.models.gguf import GGUFSource
from quire.models.llama import FORMAT
from quire.models.registry import DTYPES
from quire.utils.hub import resolve_model_path

gguf = pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parents[1]))
gguf_files: Any = importlib.import_module("gguf_files")
Kind = gguf.GGMLQuantizationType


DEMO = resolve_model_path("demo")
PROMPTS = ["Once upon a time", "The 3 dogs, 1234 of them, didn't <|end|> say"]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def convert(path: Path, kind: Any = Kind.BF16, split: int = 0, pre: str = "gpt-2") -> Path:
    def tokenizer(writer: Any) -> None:
        gguf_files.add_tokenizer(writer, DEMO / "tokenizer.json", pre, add_bos_token=True)
        writer.add_chat_template(TEMPLATE)

    return gguf_files.convert(DEMO, path, kind, split=split, change=tokenizer)


def answers(model: str, **options: Any) -> list[tuple[list[int], list[int], str]]:
    llm = LLM(model, max_model_len=128, **options)
    params = SamplingParams(max_tokens=12, temperature=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(out.prompt_token_ids, list(out.outputs[0].token_ids), out.outputs[0].text) for out in outputs]


@pytest.mark.parametrize("split", [0, 10])
def test_the_demo_answers_as_ever(tmp_path: Path, split: int) -> None:
    path = convert(tmp_path / "demo.gguf", split=split)
    given = str(tmp_path) if split else str(path)
    assert answers(given, weight_cache=False) == answers("demo")


def test_blocks_are_dequantized_to_the_models_type(tmp_path: Path) -> None:
    path = convert(tmp_path / "demo.gguf", Kind.Q4_0)
    config = EngineArgs(str(path)).resolve().model
    assert config.dtype == "bfloat16"
    llm = LLM(str(path), max_model_len=128)
    assert llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
    chat = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|user|>hi<|end|>"


def test_quantizing_what_is_quantized_is_refused(tmp_path: Path) -> None:
    path = convert(tmp_path / "demo.gguf", Kind.Q8_0)
    with pytest.raises(ConfigError, match=r"quantization='int8' contradicts .*gguf: Q8_0"):
        EngineArgs(str(path), quantization="int8").resolve()
    assert EngineArgs(str(convert(tmp_path / "plain.gguf")), quantization="int8").resolve().model.dtype == "bfloat16"


def test_a_folder_of_models_has_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    convert(tmp_path / "one" / "demo.gguf")
    assert _folders(str(tmp_path)) == [("one", str(tmp_path / "one"))]


def test_the_missing_tensor_is_named(tmp_path: Path) -> None:
    def tokenizer(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", gguf_files.np.zeros(4, "f4"))

    path = gguf_files.convert(DEMO, tmp_path / "demo.gguf", change=tokenizer)
    with pytest.raises(ModelLoadError, match=r"demo\.gguf: tensor 'blk\.0\.attn_sinks\.weight' \[4\] has no place"):
        LLM(str(path), skip_tokenizer_init=True)


def test_an_unknown_split_of_text_is_refused(tmp_path: Path) -> None:
    path = convert(tmp_path / "demo.gguf", pre="klingon")
    with pytest.raises(Exception, match=r"splits text as 'klingon'.*supported are llama-bpe"):
        LLM(str(path))


@pytest.mark.parametrize("name", KINDS)
def test_values_are_the_packages(tmp_path: Path, name: str) -> None:
    """Also of kinds that the package can't make itself: any bytes are blocks of theirs."""
    kind = Kind[name]
    rng = gguf_files.np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 60, (704, 256 // block * size), gguf_files.np.uint8)  # no scale is infinite
    path = tmp_path / "demo.gguf"

    def replace(writer: Any) -> None:
        add = writer.add_tensor

        def other(name: str, values: Any, **options: Any) -> None:
            if name == "blk.1.ffn_up.weight":
                values, options = data, {"raw_dtype": kind}
            add(name, values, **options)

        writer.add_tensor = other

    gguf_files.convert(DEMO, path, Kind.BF16, change=replace)
    config = EngineArgs(str(path)).resolve().model
    source = GGUFSource(config, FORMAT, DTYPES[config.dtype])
    found = {spec.name: tensor.clone() for spec, tensor in source.stream(())}["model.layers.1.mlp.up_proj.weight"]
    expected = gguf_files.torch_of(gguf.quants.dequantize(data, kind)).bfloat16()
    assert found.equal(expected)
    assert found.isfinite().all()
