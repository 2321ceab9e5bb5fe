"""Scores of pairs of texts, and classes of texts: transformers' numbers, whatever else runs."""

import asyncio
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loras import factors, write_adapter

from quire import LLM, AsyncLLM, AsyncOptions, PoolingParams, SamplingParams
from quire.config.engine_args import EngineArgs
from quire.errors import InvalidRequestError, ModelLoadError
from quire.lora.request import LoRARequest

QUERY = "Where did the fox live?"
DOCUMENTS = ["The fox lived in the wood.", "Tom had a red ball.", "Once upon a time there was a king. " * 8]
QUIET: dict[str, Any] = {"use_tqdm": False}


def scores(llm: LLM, data_1: Any, data_2: Any, **options: Any) -> list[float]:
    return [one.outputs.score for one in llm.score(data_1, data_2, **QUIET | options)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", num_kv_blocks=64)


def test_cosines_of_vectors(llm: LLM) -> None:
    query, *vectors = (one.outputs.embedding for one in llm.embed([QUERY, *DOCUMENTS], **QUIET))
    expected = [math.fsum(a * b for a, b in zip(query, other, strict=True)) for other in vectors]
    assert scores(llm, QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-12)
    raw = PoolingParams(use_activation=False)
    assert scores(llm, [QUERY] * 3, DOCUMENTS, pooling_params=raw) == pytest.approx(expected, abs=1e-12)
    assert scores(llm, {"text": QUERY}, [{"text": DOCUMENTS[1]}]) == pytest.approx(expected[1:2], abs=1e-12)
    (one,) = llm.score(QUERY, QUERY, **QUIET)
    assert (one.finished, one.prompt_token_ids) == (True, 2 * llm.get_tokenizer().encode(QUERY))
    assert one.outputs.score == pytest.approx(1)
    assert all(
        -1 <= one.outputs.score <= 1 for text in ("a", "a house", QUERY) for one in llm.score(text, text, **QUIET)
    )
    assert "_" in one.request_id


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8}, {"enable_prefix_caching": False}]
)
def test_scores_depend_on_nothing_else(llm: LLM, options: dict[str, Any]) -> None:
    alone = [scores(llm, QUERY, one)[0] for one in DOCUMENTS]
    other = LLM("demo", **{"num_kv_blocks": 64} | options)
    other.llm_engine.add_request("beside", "Once upon a time", SamplingParams(temperature=0, max_tokens=20))
    assert scores(other, QUERY, DOCUMENTS) == alone
    assert scores(other, [QUERY] * 3, DOCUMENTS) == alone


def test_what_is_no_pair(llm: LLM) -> None:
    for wrong in ([], 5, None, ["a", 5], [[1, 2]], {"content": "a"}):
        with pytest.raises(InvalidRequestError, match="^data_2 must be a text, or a list"):
            llm.score("a", wrong)
    for few, many in ((["a", "b"], ["c"]), (["a", "b"], ["c"] * 3)):
        with pytest.raises(InvalidRequestError, match=r"texts are no pairs: give 1 and 1, 1 and N, or N and N\.$"):
            llm.score(few, many)


HEADS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "gpt2", "opt", "mixtral", "glm4")
TOKENS = [[5, 17, 6, 90, 33, 4, 5], [9], [*range(3, 60)], [*range(3, 40), 8]]


def classifier(name: str, path: Path, **options: Any) -> tuple[Any, str]:
    """A tiny model of transformers' with a head, and where it is saved; `options` are of its config.json."""
    pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).parent.parent / "parity"))
    import transformers

    tiny: Any = importlib.import_module("tiny_models")
    config_class, model_class, settings = tiny.CASES[name]
    torch.manual_seed(5)
    config = getattr(transformers, config_class)(**{"num_labels": 3, "pad_token_id": 0} | settings | options)
    kind = model_class.replace("LMHeadModel", "ForCausalLM").replace("ForCausalLM", "ForSequenceClassification")
    theirs = getattr(transformers, kind)(config).eval()
    theirs.save_pretrained(path)
    return theirs, str(path)


def theirs_probs(theirs: Any, act: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [act(theirs(torch.tensor([tokens])).logits[0].float()) for tokens in TOKENS]


@pytest.mark.parametrize("name", HEADS)
def test_transformers_classes(name: str, tmp_path: Path) -> None:
    theirs, path = classifier(name, tmp_path)
    llm = LLM(path, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64)
    found = llm.classify(TOKENS, **QUIET)
    for one, expected in zip(found, theirs_probs(theirs, lambda logits: logits.softmax(-1)), strict=True):
        torch.testing.assert_close(torch.tensor(one.outputs.probs), expected, atol=1e-4, rtol=0)
        assert (one.outputs.num_classes, one.finished) == (3, True)
    raw = llm.encode(TOKENS[0], PoolingParams(use_activation=False), pooling_task="classify", **QUIET)[0]
    torch.testing.assert_close(raw.outputs.data, theirs_probs(theirs, lambda x: x)[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "act"),
    [
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 2}, lambda logits: logits.softmax(-1)),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression", "num_labels": 1}, lambda logits: logits),
        ({"num_labels": 40}, lambda logits: logits.softmax(-1)),
    ],
)
def test_activations(options: dict[str, Any], act: Any, tmp_path: Path) -> None:
    theirs, path = classifier("llama", tmp_path, **options)
    llm = LLM(path, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64)
    for one, expected in zip(llm.classify(TOKENS, **QUIET), theirs_probs(theirs, act), strict=True):
        torch.testing.assert_close(torch.tensor(one.outputs.probs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8},
        {"max_num_seqs": 2, "num_kv_blocks": 5, "max_model_len": 64},
        {"kernels": "torch"},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options),
)
def test_classes_depend_on_nothing_else(options: dict[str, Any], tmp_path: Path) -> None:
    theirs, path = classifier("qwen3", tmp_path)
    given = {"skip_tokenizer_init": True, "dtype": "float32"}
    plain = given | {k: v for k, v in options.items() if k in ("kernels", "quantization", "dtype")}
    llm = LLM(path, num_kv_blocks=32, enable_prefix_caching=False, **plain)
    alone = [llm.classify([tokens], **QUIET)[0].outputs.probs for tokens in TOKENS]
    other = LLM(path, **given | {"num_kv_blocks": 32} | options)
    for _ in "ab":  # the second time from the prefix cache
        assert [one.outputs.probs for one in other.classify(TOKENS, **QUIET)] == alone
    other.llm_engine.check_integrity()
    other.llm_engine.shutdown()
    near = {"quantization": 0.1, "dtype": 0.1}.get(next(iter(options)), 1e-4)
    for found, expected in zip(alone, theirs_probs(theirs, lambda logits: logits.softmax(-1)), strict=True):
        torch.testing.assert_close(torch.tensor(found), expected, atol=near, rtol=0)


def test_what_a_head_is_not_for(llm: LLM, tmp_path: Path) -> None:
    _, path = classifier("llama", tmp_path)
    other = LLM(path, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=32)
    with pytest.raises(InvalidRequestError, match="this model classifies, and writes no text: see LLM.classify"):
        other.generate(TOKENS, **QUIET)
    with pytest.raises(InvalidRequestError, match="task='embed' is not supported: this model can classify texts"):
        other.embed(TOKENS, **QUIET)
    with pytest.raises(InvalidRequestError, match="dimensions = 2 is more than this model's vectors have, 0"):
        other.classify(TOKENS, pooling_params=PoolingParams(dimensions=2), **QUIET)
    with pytest.raises(InvalidRequestError, match="task='classify' is not supported: this model can embed texts"):
        llm.classify("a", **QUIET)
    with pytest.raises(
        ModelLoadError, match="has a tensor 'lm_head.weight', for which|lacks 1 of the model's tensors: sc"
    ):
        LLM("demo", hf_overrides={"architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(ModelLoadError, match=r"num_labels = 0; it must be a whole number from 1"):
        LLM(path, hf_overrides={"num_labels": 0}, skip_tokenizer_init=True)


def test_two_texts_as_one_prompt(tmp_path: Path) -> None:
    """As transformers' tokenizer makes it of a pair; or as a template does, where one is given."""
    transformers = pytest.importorskip("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(LLM("demo", num_kv_blocks=16).model_config.path)
    theirs, path = classifier("qwen3", tmp_path, num_labels=1, vocab_size=len(tokens))
    tokens.save_pretrained(path)
    llm = LLM(path, dtype="float32", num_kv_blocks=64)
    prompts = [tokens(QUERY, text_pair=text).input_ids for text in DOCUMENTS]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([ids])).logits[0].sigmoid().item() for ids in prompts]
    found = llm.score(QUERY, DOCUMENTS, **QUIET)
    assert [one.prompt_token_ids for one in found] == prompts
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=1e-4)
    alone = [scores(llm, QUERY, text)[0] for text in DOCUMENTS]
    assert [one.outputs.score for one in found] == alone
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (one,) = llm.score("a", "b", chat_template=template, **QUIET)
    assert one.prompt_token_ids == tokens("<query>a<document>b").input_ids


QWEN3_RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "Ġyes"],
    "is_original_qwen3_reranker": True,
}


@pytest.mark.parametrize("name", ["qwen3", "qwen3-window-tied"])
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=str)
def test_qwen3_reranker_as_published(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A model that generates, asked how much likelier one token comes next than another."""
    transformers = pytest.importorskip("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(LLM("demo", num_kv_blocks=16).model_config.path)
    sys.path.append(str(Path(__file__).parent.parent / "parity"))
    tiny: Any = importlib.import_module("tiny_models")
    torch.manual_seed(5)
    config = transformers.Qwen3Config(**tiny.CASES[name][2] | {"vocab_size": len(tokens)})
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens.save_pretrained(tmp_path)
    given = {"dtype": "float32", "num_kv_blocks": 64, **options}
    llm = LLM(str(tmp_path), hf_overrides=QWEN3_RERANKER, **given)
    no, yes = tokens.convert_tokens_to_ids(["no", "Ġyes"])
    expected: list[float] = []
    for text in DOCUMENTS:
        ids = tokens(QUERY + text).input_ids
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids])).logits[0, -1]
        expected.append((logits[yes] - logits[no]).sigmoid().item())
    found = llm.score(QUERY, DOCUMENTS, **QUIET)
    assert found[0].prompt_token_ids == tokens(QUERY + DOCUMENTS[0]).input_ids
    near = 0.1 if options.get("quantization") else 1e-4
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=near)
    llm.llm_engine.shutdown()
    if options or name != "qwen3":
        return
    overrides = {**QWEN3_RERANKER, "is_original_qwen3_reranker": False, "method": "no_post_processing"}
    both = LLM(str(tmp_path), hf_overrides=overrides, **given)
    (one,) = both.classify(QUERY + DOCUMENTS[0], **QUIET)
    assert one.outputs.probs == pytest.approx([1 - expected[0], expected[0]], abs=1e-4)
    with pytest.raises(InvalidRequestError, match="head is for 2 classes, and scores are of one: take LLM.classify"):
        both.score("a", "b", **QUIET)
    for wrong, said in (
        ({"classifier_from_token": ["no", "never-a-token"]}, "has a token that .* does not have"),
        ({"classifier_from_token": ["no"]}, "it must be a list of tokens with the method"),
        ({"is_original_qwen3_reranker": False}, "it must be a list of tokens with the method"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            LLM(str(tmp_path), hf_overrides=QWEN3_RERANKER | wrong, **given)


def test_adapters_and_pins_of_a_model_with_a_head(tmp_path: Path) -> None:
    """An adapter merged into transformers' model; and the engine of servers, which loads it before it is asked for."""
    theirs, path = classifier("llama", tmp_path / "model")
    tensors = factors(
        {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.down_proj": (32, 52)}, 4, 3, 0.5
    )
    adapter = LoRARequest("voice", 1, str(write_adapter(tmp_path / "voice", tensors, 4)))
    expected = [theirs_probs(theirs, lambda logits: logits.softmax(-1))]
    with torch.no_grad():
        for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
            a, b = (tensors[f"base_model.model.model.{name}.lora_{end}.weight"] for end in "AB")
            theirs.get_submodule(f"model.{name}").weight += 2 * b @ a
    expected.append(theirs_probs(theirs, lambda logits: logits.softmax(-1)))
    options = EngineArgs(path, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64, enable_lora=True)
    engine = AsyncLLM.from_engine_args(options, options=AsyncOptions(engine="thread"))

    async def check() -> None:
        assert await engine.add_lora(adapter)
        assert (await engine.pin_prefix({"prompt_token_ids": TOKENS[2]}, "long")).name == "long"
        for lora, probs in zip((None, adapter), expected, strict=True):
            for tokens, wanted in zip(TOKENS, probs, strict=True):
                (one,) = [each async for each in engine.encode({"prompt_token_ids": tokens}, lora_request=lora)]
                torch.testing.assert_close(one.outputs.data, wanted, atol=1e-4, rtol=0)

    asyncio.run(check())
    engine.shutdown()
