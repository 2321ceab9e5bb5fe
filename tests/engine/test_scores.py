"""Scores of pairs of texts, and classes of texts: transformers' numbers, whatever else runs."""

import math
from typing import Any

import pytest

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import InvalidRequestError

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
