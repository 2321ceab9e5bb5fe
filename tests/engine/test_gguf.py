"""The demo as GGUF: its tokens, its text, its parts, its refusals."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.entrypoints.cli.plan import make_plan
from quire.entrypoints.server.catalog import _folders
from quire.errors import ConfigError, ModelLoadError
from quire.models.gguf import GGUFSource
from quire.models.registry import DTYPES
from quire.models.weights import CheckpointFormat
from quire.utils.hub import resolve_model_path

gguf = pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parents[1]))
gguf_files: Any = importlib.import_module("gguf_files")
Kind = gguf.GGMLQuantizationType


DEMO = resolve_model_path("demo")
PROMPTS = ["Once upon a time", "The 3 dogs, 1234 of them, didn't <|end|> say"]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def convert(path: Path, kind: Any = Kind.BF16, split: int = 0, pre: str = "gpt-2", **options: Any) -> Path:
    def tokenizer(writer: Any) -> None:
        gguf_files.add_tokenizer(writer, DEMO / "tokenizer.json", pre, add_bos_token=True)
        writer.add_chat_template(TEMPLATE)

    return gguf_files.convert(DEMO, path, kind, split=split, change=tokenizer, **options)


def answers(model: str, **options: Any) -> list[tuple[Any, ...]]:
    llm = LLM(model, max_model_len=128, weight_cache=False, **options)
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    first = [out.outputs[0] for out in outputs]
    return [
        (all.prompt_token_ids, list(out.token_ids), out.text, out.logprobs)
        for all, out in zip(outputs, first, strict=True)
    ]


def test_weights_of_a_folder_in_place_of_the_file_s(tmp_path: Path) -> None:
    llm = LLM(str(convert(tmp_path / "demo.gguf", Kind.Q4_0)), max_model_len=128, weight_cache=False)
    assert llm.update_weights(DEMO)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in found] == [answer[1] for answer in answers(str(DEMO))]


def mixed(name: str) -> Any:
    """Types as llama.cpp mixes them: one of q, k and v is of more bits, and so are some layers' others."""
    if "attn_v" in name or name == "token_embd" or name == "blk.1.ffn_down":
        return Kind.Q8_0
    return Kind.Q5_1 if "attn_output" in name else Kind.Q4_0


def gate_apart(name: str) -> Any:
    return Kind.Q8_0 if "ffn_gate" in name else Kind.Q4_0


@pytest.mark.parametrize("split", [0, 10])
def test_the_demo_answers_as_ever(tmp_path: Path, split: int) -> None:
    path = convert(tmp_path / "demo.gguf", split=split)
    given = str(tmp_path) if split else str(path)
    assert answers(given) == answers("demo")


@pytest.mark.parametrize("kind", [mixed, Kind.Q8_0])
def test_blocks_stay_as_they_are(tmp_path: Path, kind: Any, multiplying_numbers: str) -> None:
    """The model computes what one of the dequantized values does, to the last bit, in the memory of the blocks.

    Where integers are multiplied it does so within rounding.
    """
    path, plain = convert(tmp_path / "blocks.gguf", kind), convert(tmp_path / "plain.gguf", kind, dequantized=True)
    exact = answers(str(path), kernels=multiplying_numbers)
    assert exact == answers(str(plain), kernels=multiplying_numbers)
    for found, expected in zip(answers(str(path)), exact, strict=True):
        first, same = (each[3][0][each[1][0]].logprob for each in (found, expected))
        assert first == pytest.approx(same, abs=0.1)
    assert [each[1] for each in answers(str(path), kernels="torch")] == [
        each[1] for each in answers(str(plain), kernels="torch")
    ]
    plans = [make_plan(EngineArgs(str(each), max_model_len=128)) for each in (path, plain)]
    assert plans[0].shares[0].weights < 1.1 * path.stat().st_size
    assert plans[0].worker.num_parameters == plans[1].worker.num_parameters


@pytest.mark.slow
def test_ranks_share_blocks(tmp_path: Path) -> None:
    path = str(convert(tmp_path / "blocks.gguf", mixed))
    assert answers(path, tensor_parallel_size=2) == answers(path)


@pytest.mark.nightly
def test_what_is_cut_by_columns_is_dequantized(tmp_path: Path) -> None:
    assert answers(str(convert(tmp_path / "blocks.gguf", mixed)), tensor_parallel_size=2, tp_collective="reduce")


def test_gates_of_another_type_are_within_rounding(tmp_path: Path) -> None:
    """What is multiplied with them is rounded before, as it is not the same product."""
    path, plain = (convert(tmp_path / f"{i}.gguf", gate_apart, dequantized=bool(i)) for i in range(2))
    for found, expected in zip(answers(str(path)), answers(str(plain)), strict=True):
        first, same = found[3][0], expected[3][0]
        assert [value.logprob for value in first.values()] == pytest.approx(
            [v.logprob for v in same.values()], abs=0.05
        )


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
    source = GGUFSource(config, CheckpointFormat(), DTYPES[config.dtype], {})
    found = {spec.name: tensor.clone() for spec, tensor in source.stream(())}["model.layers.1.mlp.up_proj.weight"]
    expected = gguf_files.torch_of(gguf.quants.dequantize(data, kind)).bfloat16()
    assert found.equal(expected)
    assert found.isfinite().all()
