"""Vectors of texts: transformers' hidden states, whatever else runs."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import InvalidRequestError

PROMPTS = [[5, 6, 7], [9], [*range(3, 60)], [*range(3, 40), 8], "The old house stood at the edge of the wood."]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_transformers_hidden_states(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sys.path.append(str(Path(__file__).parent.parent / "parity"))
    tiny: Any = importlib.import_module("tiny_models")
    theirs = tiny.build_theirs(name)
    llm = LLM(str(tiny.save(theirs, tmp_path / name)), dtype="float32", skip_tokenizer_init=True, num_kv_blocks=64)
    tokens = [5, 17, 6, 90, 33, 4, 5]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1]
    raw = llm.encode(tokens, PoolingParams(normalize=False), use_tqdm=False)[0]
    torch.testing.assert_close(raw.outputs.data, expected, atol=1e-4, rtol=0)
    unit = llm.embed([tokens], use_tqdm=False)[0]
    torch.testing.assert_close(torch.tensor(unit.outputs.embedding), expected / expected.norm(), atol=1e-5, rtol=0)
    assert (unit.prompt_token_ids, unit.finished, unit.outputs.hidden_size) == (tokens, True, len(expected))


def vectors(llm: LLM) -> list[list[float]]:
    return [one.outputs.embedding for one in llm.embed(PROMPTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone() -> list[list[float]]:
    llm = LLM("demo", num_kv_blocks=32, enable_prefix_caching=False)
    return [llm.embed([prompt], use_tqdm=False)[0].outputs.embedding for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 8},
        {"kernels": "torch"},
        {"max_num_seqs": 2, "num_kv_blocks": 5, "max_model_len": 64},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options),
)
def test_vectors_depend_on_nothing_else(alone: list[list[float]], options: dict[str, Any]) -> None:
    llm = LLM("demo", **{"num_kv_blocks": 32} | options)
    engine = llm.llm_engine
    found = [vectors(llm), vectors(llm)]  # the second time from the prefix cache
    engine.add_request("beside", "Once upon a time", SamplingParams(temperature=0, max_tokens=20))
    found.append(vectors(llm))
    if options.get("kernels") == "torch":  # its own arithmetic
        assert found[0] == found[1] == found[2]
    else:
        assert found == [alone] * 3
    while engine.has_unfinished_requests():
        engine.step()
    engine.check_integrity()
    engine.shutdown()


def test_refusals() -> None:
    llm = LLM("demo", num_kv_blocks=32)
    for params in ({"dimensions": 0}, {"dimensions": 257}, {"dimensions": True}):
        with pytest.raises(InvalidRequestError, match="dimensions"):
            llm.embed("a", pooling_params=PoolingParams(**params))
    for name in ("normalize", "use_activation"):
        for given in ("x", 1, [], "false"):
            with pytest.raises(InvalidRequestError, match=f"^{name} must be True, False or None; it is ") as caught:
                PoolingParams(**{name: given})
            assert caught.value.param == name
    with pytest.raises(InvalidRequestError, match="2 pooling params for 1 prompts"):
        llm.embed("a", pooling_params=[PoolingParams()] * 2)
    for wrong in (5, SamplingParams(), [SamplingParams()]):
        with pytest.raises(InvalidRequestError, match=r"^pooling_params must be PoolingParams, .*; it is \[(5|Sam)"):
            llm.embed("a", pooling_params=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.embed(["a", []])
    with pytest.raises(InvalidRequestError, match="task='token_embed' is not supported: this model can embed texts"):
        llm.encode("a", pooling_task="token_embed")
    with pytest.raises(AttributeError, match="models here generate, embed and classify whole texts"):
        llm.reward  # noqa: B018
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_a_prompt_may_fill_the_context(alone: list[list[float]]) -> None:
    """As no token follows it: of an output's prompt one less is kept."""
    llm = LLM("demo", max_model_len=57, num_kv_blocks=4)
    filling, longer = PROMPTS[2], {"prompt_token_ids": [8, 9, *PROMPTS[2]]}
    (found,) = llm.embed([filling], use_tqdm=False)
    torch.testing.assert_close(found.outputs.embedding, alone[2], atol=1e-5, rtol=0)
    (kept,) = llm.embed([longer], use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert (kept.prompt_token_ids, kept.outputs.embedding) == (filling, found.outputs.embedding)
    text = "The old house stood at the edge of the wood. " * 9
    (cut,) = llm.embed([text], use_tqdm=False, tokenization_kwargs={"truncation": True})
    assert len(cut.prompt_token_ids) == 57
    with pytest.raises(InvalidRequestError, match="is 57 tokens, but the prompt has 59"):
        llm.embed([longer], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="output needs one, but the prompt has 57"):
        llm.generate([{"prompt_token_ids": filling}], use_tqdm=False)
    (told,) = llm.generate([longer], SamplingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert (len(told.prompt_token_ids), len(told.outputs[0].token_ids)) == (56, 1)
