"""Routes of vectors: OpenAI's, Ollama's and llama.cpp's forms, over a core whose hidden state is [3, 4, 12]."""

import base64
import struct
from typing import Any

import pytest
from fastapi.testclient import TestClient

UNIT = [3 / 13, 4 / 13, 12 / 13]


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_openais_form(server: Any, client: TestClient) -> None:
    answer = post(client, "/v1/embeddings", input=["a", "b c"], model="demo", user="me")
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("list", "demo", "embd-")
    assert [(entry["object"], entry["index"]) for entry in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert answer["data"][1]["embedding"] == pytest.approx(UNIT)
    num_tokens = sum(len(request.prompt_token_ids) for request in server.core.requests)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    assert {request.client for request in server.core.requests} == {"me"}
    plain = post(client, "/v1/embeddings", input=[[5, 6]], normalize=False, dimensions=2, encoding_format="base64")
    assert struct.unpack("<2f", base64.b64decode(plain["data"][0]["embedding"])) == (3, 4)
    assert server.core.requests[-1].prompt_token_ids == [5, 6]
    assert post(client, "/v1/embeddings", input="a", use_activation=False)["data"][0]["embedding"] == [3, 4, 12]
    bare = post(client, "/embeddings", input="a", dimensions=2)  # a base URL without /v1
    assert bare["data"][0]["embedding"] == pytest.approx([0.6, 0.8])


def test_a_conversation_as_a_vector(server: Any, client: TestClient) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    encode = server.core.tokenizer.encode

    def prompt(**body: Any) -> list[int]:
        assert len(post(client, "/v1/embeddings", messages=messages, **body)["data"]) == 1
        return server.core.requests[-1].prompt_token_ids

    def rendered(opens: bool) -> str:
        return server.core.tokenizer.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False)

    assert prompt() == encode(rendered(False), False)
    assert prompt(add_generation_prompt=True) == encode(rendered(True), False)
    assert prompt(add_special_tokens=True) == encode(rendered(False))
    assert prompt(continue_final_message=True) == encode(rendered(False).removesuffix("<|end|>"), False)
    for body in ({"messages": messages, "input": "a"}, {}):
        answer = client.post("/v1/embeddings", json=body)
        assert answer.json()["error"] | {"code": None} == {
            "message": "give either input or messages.", "type": "invalid_request_error", "param": "input", "code": None
        }  # fmt: skip


def test_several_conversations_as_vectors(server: Any, client: TestClient) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hi", "Ho there")]
    answer = post(client, "/v1/embeddings", messages=chats)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    together = [request.prompt_token_ids for request in server.core.requests[-2:]]
    alone = []
    for chat in chats:
        post(client, "/v1/embeddings", messages=chat)
        alone.append(server.core.requests[-1].prompt_token_ids)
    assert together == alone


def test_vllms_pooling_and_its_fields(client: TestClient) -> None:
    neutral = {"task": "embed", "embed_dtype": "float32", "endianness": "native", "truncation_side": "left"}
    answer = client.post("/pooling", json={"input": ["a", "b"], "mm_processor_kwargs": None, **neutral})
    assert "x-quire-warnings" not in answer.headers
    told = [(entry["object"], entry["index"], entry["data"]) for entry in answer.json()["data"]]
    assert told == [("pooling", place, pytest.approx(UNIT)) for place in range(2)]
    assert post(client, "/invocations", input="a")["data"][0]["embedding"] == pytest.approx(UNIT)
    for route, asked in (
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/score", {"queries": "a", "documents": ["b", "c"]}),
        ("/score", {"data_1": "a", "data_2": ["b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ):
        keys = ("data", "results")
        invoked, asked_for = (post(client, path, **asked) for path in ("/invocations", route))
        assert [invoked.get(key) for key in keys] == [asked_for.get(key) for key in keys]


def test_cuts(server: Any, client: TestClient) -> None:
    post(client, "/v1/embeddings", input=[[*range(1, 9)]], truncate_prompt_tokens=3)
    assert server.core.requests[-1].prompt_token_ids == [6, 7, 8]
    post(client, "/v1/embeddings", input=[[*range(1, 131)]], truncate_prompt_tokens=-1)
    assert server.core.requests[-1].prompt_token_ids == [*range(3, 131)]
    post(client, "/api/embed", model="demo", input="word " * 500)
    whole = server.core.tokenizer.encode("word " * 500)
    assert server.core.requests[-1].prompt_token_ids == whole[:128]  # of Ollama's, the end goes


def test_ollamas_forms(client: TestClient) -> None:
    answer = post(client, "/api/embed", model="demo:latest", input=["a", "b"])
    assert [answer["model"], *map(pytest.approx, answer["embeddings"])] == ["demo", UNIT, UNIT]
    assert answer["total_duration"] > 0 == answer["load_duration"] < answer["prompt_eval_count"]
    assert post(client, "/api/embed", model="demo", input="a", dimensions=1)["embeddings"] == [[1]]
    assert post(client, "/api/embeddings", model="demo", prompt="a") == {"embedding": [3, 4, 12]}


def test_llama_cpps_form(server: Any, client: TestClient) -> None:
    assert post(client, "/embedding", content="a", embd_normalize=-1) == [{"index": 0, "embedding": [[3, 4, 12]]}]
    answer = post(client, "/embedding", input=["a", [7, "b"]])
    assert [entry["index"] for entry in answer] == [0, 1]
    assert answer[1]["embedding"] == [pytest.approx(UNIT)]
    assert server.core.requests[-1].prompt_token_ids[0] == 7


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/v1/embeddings", {"messages": []}, "messages: List should have at least 1 item"),
        ("/v1/embeddings", {"messages": [{"role": "user"}], "chat_template": "x"}, "takes no chat_template from"),
        ("/v1/embeddings", {"input": []}, "input: must be a text, a list of texts"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input: prompt 1 is of another kind"),
        ("/v1/embeddings", {"input": [99999999]}, "is out of the vocabulary"),
        ("/v1/embeddings", {"input": [1] * 129}, "maximum context length is 128"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "vectors come whole"),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "fp8"}, 'embed_dtype has one value here, "float32".'),
        ("/v1/embeddings", {"messages": [[]]}, "messages[0]: List should have at least 1 item"),
        ("/embedding", {"content": ""}, "content"),
    ],
)
def test_refusals(client: TestClient, path: str, body: dict[str, Any], shown: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert shown in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] != "prompt"


def test_a_request_that_is_ended(server: Any, client: TestClient) -> None:
    server.core.ending, server.core.ends_at = "abort", 0
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 503
