"""Routes of scores, over a core whose vectors are [number of tokens, 1]."""

import math
from typing import Any

import pytest
from fastapi.testclient import TestClient

QUERY, DOCUMENTS = "a", ["a b c d e f", "a", "a b c"]


@pytest.fixture(autouse=True)
def _vectors(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.core.pooled = lambda token_ids: [float(len(token_ids)), 1.0]


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-quire-warnings" not in answer.headers
    return answer.json()


def expected(server: Any) -> list[float]:
    count, *counts = (len(server.core.tokenizer.encode(text)) for text in (QUERY, *DOCUMENTS))
    return [(count * other + 1) / math.hypot(count, 1) / math.hypot(other, 1) for other in counts]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores_in_vllms_form(server: Any, client: TestClient, path: str, names: tuple[str, str]) -> None:
    answer = post(client, path, **{names[0]: QUERY, names[1]: DOCUMENTS}, model="alias", user="me")
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "alias", "score-")
    assert [entry.pop("score") for entry in answer["data"]] == pytest.approx(expected(server))
    assert answer["data"] == [{"index": place, "object": "score"} for place in range(3)]
    assert len(server.core.requests) == 4  # the query's is computed once
    num_tokens = sum(len(request.prompt_token_ids) for request in server.core.requests)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    assert {request.client for request in server.core.requests} == {"me"}


def test_one_to_one_and_each_to_each(server: Any, client: TestClient) -> None:
    each = post(client, "/score", text_1=[QUERY] * 3, text_2=[{"text": text} for text in DOCUMENTS])
    assert [entry["score"] for entry in each["data"]] == pytest.approx(expected(server))
    one = post(client, "/score", text_1={"text": QUERY}, text_2=DOCUMENTS[2], use_activation=False)
    assert [entry["score"] for entry in one["data"]] == pytest.approx(expected(server)[2:])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking_in_jinas_and_coheres_form(server: Any, client: TestClient, path: str) -> None:
    answer = post(client, path, model="demo", query=QUERY, documents=[DOCUMENTS[0], {"text": "a"}, DOCUMENTS[2]])
    scores = expected(server)
    assert [(one["index"], one["document"]) for one in answer["results"]] == [
        (place, {"text": DOCUMENTS[place], "multi_modal": None}) for place in (1, 2, 0)
    ]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([scores[i] for i in (1, 2, 0)])
    assert (answer["id"][:7], answer["model"]) == ("rerank-", "demo")
    assert set(answer["usage"]) >= {"prompt_tokens", "total_tokens"}
    for top_n, count in ((2, 2), (0, 3), (-1, 3), (9, 3)):
        assert len(post(client, path, query=QUERY, documents=DOCUMENTS, top_n=top_n)["results"]) == count


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "are no pairs: give 1 and 1, 1 and N, or N and N."),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": [[1, 2]]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "stream": True}, "come whole"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": "2"}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "truncate_prompt_tokens keeps"),
        ("/rerank", {"query": "a", "documents": ["b " * 200]}, "maximum context length is 128"),
    ],
)
def test_refusals(shared_client: TestClient, path: str, body: dict[str, Any], said: str) -> None:
    answer = shared_client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}


@pytest.fixture
def headed(make_server: Any) -> Any:
    """Makes a server whose model has a head; its logits are [number of tokens / 8, 0, ...]."""

    def make(num_labels: int, **options: Any) -> Any:
        overrides = CLASSIFIER | {"num_labels": num_labels}
        server = make_server({"hf_overrides": overrides}, **options)
        server.core.pooled = lambda token_ids: [len(token_ids) / 8, *[0.0] * (num_labels - 1)]
        return server

    return make


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_classes_in_vllms_form(headed: Any) -> None:
    server = headed(2)
    with TestClient(server.app) as client:
        answer = post(client, "/classify", input=["a", "b c d"], model="demo")
        counts = [len(request.prompt_token_ids) for request in server.core.requests]
        assert (answer["object"], answer["model"], answer["id"][:9]) == ("list", "demo", "classify-")
        for place, count in enumerate(counts):
            entry, prob = answer["data"][place], sigmoid(count / 8)
            assert entry == {"index": place, "label": "bad", "probs": pytest.approx([prob, 1 - prob]), "num_classes": 2}
        total = sum(counts)
        assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        raw = post(client, "/v1/classify", input=[[5, 6]], use_activation=False)
        assert raw["data"][0]["probs"] == [0.25, 0]
        assert post(client, "/classify", messages=[{"role": "user", "content": "Hi"}])["data"][0]["num_classes"] == 2
        for body in ({}, {"task": "classify"}):
            assert post(client, "/pooling", input=[[5, 6]], use_activation=False, **body)["data"][0]["data"] == [
                0.25,
                0,
            ]


def test_pairs_as_one_prompt(headed: Any) -> None:
    server = headed(1)
    tokenizer = server.core.tokenizer
    with TestClient(server.app) as client:
        answer = post(client, "/score", text_1=QUERY, text_2=DOCUMENTS)
        prompts = [request.prompt_token_ids for request in server.core.requests]
        assert prompts == [tokenizer.encode_pair(QUERY, text) for text in DOCUMENTS]
        scores = [sigmoid(len(prompt) / 8) for prompt in prompts]
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(scores)
        ranked = post(client, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=1)["results"]
        assert [(one["index"], one["relevance_score"]) for one in ranked] == [(0, pytest.approx(scores[0]))]


def test_pairs_by_the_operators_template(headed: Any) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    server = headed(1, chat_template=template)
    with TestClient(server.app) as client:
        post(client, "/score", text_1=QUERY, text_2="b")
    assert server.request.prompt_token_ids == server.core.tokenizer.encode("<query>a<document>b")


def test_what_a_head_is_not_for(headed: Any, shared_client: TestClient) -> None:
    with TestClient(headed(2).app) as client:
        for path, body, said in (
            ("/v1/completions", {"prompt": "a"}, "this model classifies, and writes no text: see LLM.classify"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "and writes no text"),
            ("/v1/embeddings", {"input": "a"}, "task='embed' is not supported: this model can classify texts"),
            (
                "/score",
                {"text_1": "a", "text_2": "b"},
                "head is for 2 classes, and scores are of one: take LLM.classify",
            ),
            ("/classify", {"input": "a", "dimensions": 2}, "dimensions = 2 is more than this model's vectors have, 0"),
        ):
            answer = client.post(path, json=body)
            assert (answer.status_code, said in answer.text) == (400, True), answer.text
        assert client.get("/v1/models").json()["data"][0]["id"] == "demo"
    for path in ("/classify", "/pooling"):
        answer = shared_client.post(path, json={"input": "a", "task": "classify"})
        assert (answer.status_code, "this model can embed texts" in answer.text) == (400, True)
