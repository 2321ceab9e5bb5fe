"""Our own /openapi.json fuzzed by schemathesis, with data that follow it and data that don't.

No answer is a 5xx, each is one that the description names, in its form, and nothing is left behind. QUIRE_NIGHTLY=1
makes it long.
"""

import os
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies
import pytest
import schemathesis
from schemathesis import GenerationMode, checks
from serving import RunningServer

pytestmark = pytest.mark.slow

NUM_EXAMPLES = 1000 if os.environ.get("QUIRE_NIGHTLY") else 16  # for each operation and mode
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
FLAGS = ["--max-model-len", "64", "--max-num-seqs", "16"]  # few tokens, so that no example takes long
MOST_CHOICES = 3
VOCAB_SIZE = 4096
# Fields of responses and messages, or without a form there, that are seldom right by chance.
OTHERS = (
    *("previous_response_id", "background", "tools", "tool_choice", "text", "reasoning", "n", "best_of", "echo"),
    *("use_beam_search", "prompt_logprobs", "return_token_ids", "timings", "stop_sequences", "thinking", "system"),
    *("output_config", "metadata", "max_output_tokens", "chat_template_kwargs"),
)
LONG_LIST = 200
POSTS = [
    *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/admin/limits"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/completions/render", "/v1/chat/completions/render", "/apply-template"),
    *("/completion", "/api/chat", "/api/generate", "/api/show", "/v1/embeddings"),
    *(
        "/v1/score",
        "/v1/rerank",
        "/classify",
        "/embedding",
        "/api/embed",
        "/api/embeddings",
        "/v1/chat/completions/batch",
    ),
]
# Bodies that others have, too, or that are read as theirs.
_READ_SO = ("/render", "_tokens", "-template", "/embedding", "/batch", "/score", "/rerank", "/classify")
ALIKE = [path for path in POSTS if path.endswith(_READ_SO) or path.startswith("/api/")]
GETS = [
    *(
        "/v1/models",
        "/v1/models/{model}",
        "/tokenizer_info",
        "/is_sleeping",
        "/is_paused",
        "/health",
        "/version",
        "/load",
        "/metrics",
    ),
    *(
        "/admin/limits",
        "/admin/prefixes",
        "/admin/engines",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
    ),
    *("/props", "/slots", "/api/tags", "/api/ps", "/api/version"),
]
# A server without a key refuses to be changed, whatever it is sent.
CHANGES = [
    *(("POST", "/admin/prefixes"), ("POST", "/reset_prefix_cache"), ("DELETE", "/admin/prefixes/{name}")),
    ("POST", "/admin/engines/{rank}/restart"),
    *(("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/update_weights"), ("POST", "/pause"), ("POST", "/resume")),
    *(("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")),  # nor is there a folder of adapters
    *(("DELETE", "/v1/responses/{response_id}"), ("POST", "/v1/responses/{response_id}/cancel")),  # there is none
]


@pytest.fixture(scope="module")
def fuzzed(server_of: Callable[..., RunningServer]) -> RunningServer:
    return server_of(*FLAGS)


@pytest.fixture(scope="module")
def description(fuzzed: RunningServer) -> Any:
    schema = schemathesis.openapi.from_dict(without_long_lists(fuzzed.get("/openapi.json").json()))
    schema.config.update(base_url=fuzzed.url)
    return schema


def without_long_lists(schema: Any) -> Any:
    """Without bounds that only megabytes break: they would be most of the time, and are tested elsewhere."""
    if isinstance(schema, list):
        return [without_long_lists(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: without_long_lists(value) for key, value in schema.items()}
    return kept if kept.get("maxItems", 0) <= LONG_LIST else {k: v for k, v in kept.items() if k != "maxItems"}


def test_every_operation_is_fuzzed(description: Any) -> None:
    operations = {(each.ok().method.upper(), each.ok().path) for each in description.get_all_operations()}
    assert operations == {*(("POST", path) for path in POSTS), *(("GET", path) for path in GETS), *CHANGES}


@pytest.mark.parametrize("kind", ["sensible", "positive", "negative"])
@pytest.mark.parametrize("path", POSTS)
def test_answers_are_as_described(fuzzed: RunningServer, description: Any, path: str, kind: str) -> None:
    before = fuzzed.golden()
    settings = hypothesis.settings(
        max_examples=NUM_EXAMPLES // (8 if path in ALIKE else 1),
        suppress_health_check=list(hypothesis.HealthCheck),
        deadline=None,
    )
    mode = GenerationMode.NEGATIVE if kind == "negative" else GenerationMode.POSITIVE

    @hypothesis.given(case=description[path]["POST"].as_strategy(generation_mode=mode))
    @settings
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            for name in ("n", "best_of"):
                if type(value := case.body.get(name)) is int:
                    case.body[name] = min(value, MOST_CHOICES)
            if kind == "sensible":
                make_sensible(path, case.body)
        case.call_and_validate(checks=CHECKS)

    run()
    fuzzed.wait_idle()
    assert fuzzed.golden() == before


def make_sensible(path: str, body: dict[str, Any]) -> None:
    """Mend what no schema can say, so that most requests are served."""
    for name in ("model", "priority", "ttft_target", "tpot_target", "chat_template", "reasoning_effort", "verbosity"):
        body.pop(name, None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
        body["best_of"] = body.get("n")
    else:
        body.pop("stream_options", None)
    if "input" in body:
        body["input"] = repr(body["input"])[:40]
    if path.startswith(("/v1/responses", "/v1/messages")):
        for name in OTHERS:
            body.pop(name, None)
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": repr(body["messages"])[:40]}]
        if path.endswith("/batch"):
            body |= {"messages": [body["messages"]] * 2, "echo": None, "prompt_logprobs": None}
        body["logprobs"] = body.get("logprobs") or bool(body.get("top_logprobs"))
        if body.get("continue_final_message"):
            body["add_generation_prompt"] = False
    for name in ("prompt", "tokens", "allowed_token_ids", "stop_token_ids"):
        if name in body:
            body[name] = _bounded(body[name])
    for name, most in (("logprobs", 20), ("prompt_logprobs", 20), ("top_logprobs", 20), ("max_tokens", 9)):
        if type(value := body.get(name)) is int:
            body[name] = max(0, min(value, most))
    body |= {"max_tokens": body.get("max_tokens") or 9, "max_completion_tokens": None}
    if path == "/completion" or path.startswith("/api/"):
        body |= {"n_predict": 9, "options": {"num_predict": 9}}
    body["min_tokens"] = min(body.get("min_tokens") or 0, body["max_tokens"])
    body["truncate_prompt_tokens"] = min(body.get("truncate_prompt_tokens") or -1, 40)
    body["temperature"] = max(0.5, body.get("temperature") or 0.0)
    if body.get("best_of"):
        body["best_of"] = max(body["best_of"], body.get("n") or 1)
    if isinstance(biases := body.get("logit_bias"), dict):
        body["logit_bias"] = {str(i): bias for i, bias in enumerate(biases.values())}


def _bounded(value: Any) -> Any:
    """Token ids of the vocabulary, in a list or lists; to JSON's schema, 5.0 is an integer."""
    if isinstance(value, list):
        return [_bounded(item) for item in value]
    return abs(int(value)) % VOCAB_SIZE if isinstance(value, int | float) else value


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_nobody_without_a_key_changes_anything(description: Any, method: str, path: str) -> None:
    modes = [GenerationMode.NEGATIVE, GenerationMode.POSITIVE]
    parameters = {"path_parameters": {path.partition("{")[2].partition("}")[0]: "x"}} if "{" in path else {}
    strategies = [description[path][method].as_strategy(generation_mode=mode, **parameters) for mode in modes]

    @hypothesis.given(case=hypothesis.strategies.one_of(strategies))
    @hypothesis.settings(max_examples=20, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
    def run(case: schemathesis.Case) -> None:
        answer = case.call_and_validate(checks=CHECKS)
        assert answer.status_code >= 400

    run()


@pytest.mark.parametrize("path", GETS)
def test_plain_answers_are_as_described(description: Any, path: str) -> None:
    parameters = {"model": "demo"} if path.endswith("{model}") else {"response_id": "x"} if "{" in path else {}
    case = description[path]["GET"].Case(path_parameters=parameters)
    case.call_and_validate(checks=[*CHECKS, checks.unsupported_method])
