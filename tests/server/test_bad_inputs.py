"""Every row of RELIABILITY.md's table of bad inputs, over sockets: what each gets, and that nothing else changes."""

import contextlib
import io
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from serving import Answer, RunningServer

from tests.waiting import wait_until

KEY = "a-key-that-nobody-guesses"
TEMPLATE = (
    "{% if messages[0].content == 'never' %}{{ raise_exception('not this word') }}{% endif %}{{ messages[0].content }}"
)
SECONDS = "1"  # for headers, bodies, and idle connections
MAX_BODY = 4000
GUARDED = [
    *("--api-key", KEY, "--log-level", "debug", "--chat-template", TEMPLATE, "--max-body-bytes", str(MAX_BODY)),
    *("--timeout-headers", SECONDS, "--timeout-body", SECONDS, "--timeout-keep-alive", SECONDS),
]
DEEP, MEGABYTE = 100_000, 1 << 20
PATIENCE = 900.0  # seconds: who has waited so long waits for ever


@pytest.fixture(scope="module")
def guarded(server_of: Callable[..., RunningServer]) -> RunningServer:
    """A server with a key, a small limit on bodies, short timeouts, and a template that raises an error."""
    return server_of(*GUARDED)


@pytest.fixture(scope="module")
def expected(server: RunningServer, guarded: RunningServer) -> dict[int, Any]:
    """What the golden request gets before all else, by the server's port."""
    return {each.port: each.golden() for each in (server, guarded)}


@dataclass(frozen=True)
class Case:
    """One bad request, and what it gets."""

    row: str  # the row of the table
    name: str
    request: bytes
    status: int | tuple[int, ...] = 400
    param: str | None = None
    code: str | None = None
    message: str = ""  # is part of the error's message
    on_guarded: bool = False


def raw(method: str, path: str, body: bytes = b"", *headers: str, json_type: bool = True) -> bytes:
    """A request, on a connection that is closed after it."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if body and not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    if json_type and not any(header.startswith("Content-Type") for header in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


def post(path: str, fields: Any, *headers: str) -> bytes:
    return raw("POST", path, json.dumps(fields).encode(), *headers)


def completion(**fields: Any) -> bytes:
    return post("/v1/completions", {"prompt": "Once upon", "max_tokens": 2, **fields})


def chat(**fields: Any) -> bytes:
    return post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields})


def said(**message: Any) -> bytes:
    return chat(messages=[{"role": "user", **message}])


def sent(body: bytes, *headers: str) -> bytes:
    return raw("POST", "/v1/completions", body, *headers)


BODIES = "empty body; broken JSON; a list, number or null for a body"
SIZES = "wrong content type; body over the limit"
TEXTS = "JSON nested 100,000 deep; invalid UTF-8"
ROUTES = "unknown route; wrong method"
KEYS = "no key; wrong key"
NAMES = "unknown model; missing messages; messages empty or no list"
ROLES = "unknown role; a template's own error"
IMAGES = "image part sent to a text model"
PROMPTS = 'prompt missing, "" or []'
TOKENS = "token id -1, or ≥ the vocabulary, or a float or bool"
LENGTHS = "prompt longer than the context; prompt + max_tokens over it"
LIMITS = 'max_tokens 0 (without echo), -1, "x"; both max_tokens and max_completion_tokens'
SAMPLING = "temperature -1, 3, NaN, Infinity; top_p 0 or 1.1; top_k -2; min_p 2; penalties out of range"
CHOICES = "n 0 or over the cap; greedy with n > 1"
STOPS = "65 stop strings; an empty one; a 1 MB one"
LOGPROBS = "logprobs 21; top_logprobs without logprobs"
BIASES = 'logit_bias with key "abc", an id out of vocabulary, NaN'
TOGETHER = 'stream_options without stream; two structured constraints; cache_salt ""'
EXTRA = "unknown extra field"
LEAVES = "client closes before headers or in mid-stream"
SLOW = "slowloris, half-closed connection"

TOO_LONG = "context_length_exceeded"
IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost:9/cat.png"}}
STRUCTURE = "a structured output that can't be held"
STRUCTURES: list[tuple[str, str, Any, str]] = [
    ("an unsupported keyword", "guided_json", {"properties": {"a": {"uniqueItems": True}}}, "#/properties/a"),
    ("no end", "guided_json", {"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "without an end"),
    ("deep", "guided_json", json.loads('{"items":' * 250 + "true" + "}" * 250), "nested deeper"),
    ("5 MB", "guided_json", {"description": "x" * 5_000_000}, "is the most"),
    ("a bomb of patterns", "guided_json", {"allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(40)]}, "to compile"),
    ("a grammar's error", "guided_grammar", "start: a\na: b", "line 2, column 4"),
    ("a broken regex", "guided_regex", "[", "unclosed"),
    ("a response_format without schema", "response_format", {"type": "json_schema"}, "schema"),
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
UTF16 = '{"prompt": "x"}'.encode("utf-16")

CASES = [
    Case(BODIES, "empty", sent(b"", "Content-Length: 0"), message="empty"),
    Case(BODIES, "no length", sent(b""), message="empty"),
    Case(BODIES, "blank", sent(b" \n ")),
    Case(BODIES, "cut", sent(b'{"prompt": "x'), message="not valid JSON"),
    Case(BODIES, "single quotes", sent(b"{'prompt': 'x'}"), message="not valid JSON"),
    Case(BODIES, "trailing comma", sent(b'{"prompt": "x",}'), message="not valid JSON"),
    Case(BODIES, "two values", sent(b'{"prompt": "x"} {}'), message="not valid JSON"),
    Case(BODIES, "NUL in it", sent(b'{"prompt": "x\x00"}'), message="not valid JSON"),
    Case(BODIES, "number of 5,000 digits", sent(b'{"prompt": "x", "max_tokens": %b}' % (b"9" * 5000))),
    Case(BODIES, "list", sent(b"[]"), message="a list"),
    Case(BODIES, "number", sent(b"7"), message="a number"),
    Case(BODIES, "null", sent(b"null"), message="null"),
    Case(BODIES, "true", sent(b"true"), message="true or false"),
    Case(BODIES, "string", sent(b'"x"'), message="a string"),
    Case(BODIES, "empty for chat", raw("POST", "/v1/chat/completions", b"", "Content-Length: 0"), message="empty"),
    Case(BODIES, "list for tokenize", post("/tokenize", []), message="a list"),
    Case(BODIES, "null for detokenize", post("/detokenize", None), message="null"),
    Case(SIZES, "text", sent(b'{"prompt": "x"}', "Content-Type: text/plain"), 415, code="unsupported_media_type"),
    Case(SIZES, "form", sent(b"prompt=x", "Content-Type: application/x-www-form-urlencoded"), 415),
    Case(SIZES, "none", raw("POST", "/v1/completions", b'{"prompt": "x"}', json_type=False), 415),
    Case(SIZES, "nonsense", sent(b'{"prompt": "x"}', "Content-Type: ;;;"), 415),
    Case(SIZES, "16 MiB and a byte, announced", sent(b"", f"Content-Length: {(16 << 20) + 1}"), 413),
    Case(SIZES, "a length of 19 digits", sent(b"", f"Content-Length: {10**18}"), 413),
    Case(SIZES, "sent", completion(prompt="x" * MAX_BODY), 413, code="body_too_large", on_guarded=True),
    Case(
        SIZES,
        "chunked",
        sent(b"%x\r\n%b\r\n" % (MAX_BODY + 1, b" " * (MAX_BODY + 1)), "Transfer-Encoding: chunked"),
        413,
        on_guarded=True,
    ),
    Case(SIZES, "length that is no number", sent(b"{}", "Content-Length: two")),
    Case(SIZES, "negative length", sent(b"{}", "Content-Length: -2")),
    Case(SIZES, "two lengths", sent(b"{}", "Content-Length: 2", "Content-Length: 3")),
    Case(SIZES, "length too short", sent(b'{"prompt": "x"}', "Content-Length: 3"), message="not valid JSON"),
    Case(SIZES, "chunk size that is no number", sent(b"two\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked")),
    Case(SIZES, "unknown transfer encoding", sent(b"{}", "Transfer-Encoding: rot13"), (400, 501)),
    Case(TEXTS, "lists", sent(b"[" * DEEP + b"]" * DEEP), message="nested too deeply"),
    Case(TEXTS, "lists left open", sent(b"[" * DEEP), message="nested too deeply"),
    Case(TEXTS, "objects", sent(b'{"a":' * DEEP + b"1" + b"}" * DEEP), message="nested too deeply"),
    Case(TEXTS, "in a field", sent(b'{"prompt": %b}' % (b"[" * DEEP + b"]" * DEEP)), message="nested too deeply"),
    Case(TEXTS, "in an extra field", sent(b'{"prompt": "x", "y": %b}' % (b"[" * DEEP + b"]" * DEEP))),
    Case(TEXTS, "UTF-8 cut", sent(b'{"prompt": "\xc3"}')),
    Case(TEXTS, "UTF-8 overlong", sent(b'{"prompt": "\xc0\xaf"}')),
    Case(TEXTS, "UTF-8 of a surrogate", sent(b'{"prompt": "\xed\xa0\x80"}')),
    Case(TEXTS, "a key's UTF-8", sent(b'{"prompt\xff": "x"}')),
    Case(TEXTS, "escaped lone surrogate", sent(b'{"prompt": "\\ud800"}')),
    Case(TEXTS, "escaped lone surrogate in chat", said(content="\ud800")),
    Case(TEXTS, "UTF-16", sent(UTF16)),
    Case(ROUTES, "route", raw("GET", "/v1/nothing"), 404, code="not_found"),
    Case(ROUTES, "route posted to", post("/v1/moderations", {"input": "x"}), 404, code="not_found"),
    Case(ROUTES, "slash at the end", completion().replace(b"/v1/completions ", b"/v1/completion/ "), 404),
    Case(ROUTES, "two slashes", raw("GET", "//v1/nowhere"), 404),
    Case(ROUTES, "dots", raw("GET", "/v1/../../../etc/passwd"), 404),
    Case(ROUTES, "escaped dots", raw("GET", "/%2e%2e/%2e%2e/etc/passwd"), 404),
    Case(ROUTES, "NUL", raw("GET", "/v1/%00"), 404),
    Case(ROUTES, "broken escape", raw("GET", "/%zz%"), 404),
    Case(ROUTES, "4,000 characters", raw("GET", "/" + "x" * 4000), 404),
    Case(ROUTES, "GET", raw("GET", "/v1/completions"), 405, code="method_not_allowed"),
    Case(ROUTES, "POST", post("/v1/models", {}), 405, code="method_not_allowed"),
    Case(ROUTES, "DELETE", raw("DELETE", "/v1/models/demo"), 405),
    Case(ROUTES, "unknown method", raw("BREW", "/v1/completions"), 405),
    Case(ROUTES, "TRACE", raw("TRACE", "/v1/completions"), 405),
    Case(ROUTES, "no HTTP", b"What is this?\r\n\r\n"),
    Case(ROUTES, "TLS", bytes.fromhex("16030100c8010000c40303") + bytes(200)),
    Case(ROUTES, "no host", b"GET /v1/models HTTP/1.1\r\n\r\n"),
    Case(ROUTES, "HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 404, 505)),
    Case(ROUTES, "300 headers", raw("GET", "/v1/models", b"", *(f"X-{i}: x" for i in range(300))), 431),
    Case(ROUTES, "1 MB of headers", raw("GET", "/v1/models", b"", "X: " + "x" * MEGABYTE), (400, 431)),
    Case(KEYS, "none", completion(), 401, code="invalid_api_key", on_guarded=True),
    Case(KEYS, "wrong", completion().replace(b"Host:", b"Authorization: Bearer wrong\r\nHost:"), 401, on_guarded=True),
    Case(KEYS, "empty", completion().replace(b"Host:", b"Authorization: Bearer \r\nHost:"), 401, on_guarded=True),
    Case(KEYS, "a part", raw("GET", "/v1/models", b"", f"Authorization: Bearer {KEY[:-1]}"), 401, on_guarded=True),
    Case(KEYS, "more", raw("GET", "/v1/models", b"", f"Authorization: Bearer {KEY}x"), 401, on_guarded=True),
    Case(KEYS, "no scheme", raw("GET", "/v1/models", b"", f"Authorization: {KEY}"), 401, on_guarded=True),
    Case(KEYS, "wrong x-api-key", raw("GET", "/v1/models", b"", "X-Api-Key: wrong"), 401, on_guarded=True),
    Case(KEYS, "no text", raw("GET", "/v1/models", b"", "Authorization: Basic ////"), 401, on_guarded=True),
    Case(KEYS, "in the query", raw("GET", f"/v1/models?api_key={KEY}"), 401, on_guarded=True),
    Case(KEYS, "path of a route that needs none", raw("GET", "/health/../v1/models"), 401, on_guarded=True),
    Case(KEYS, "it, escaped", raw("GET", "/health%2f..%2fv1/models"), 401, on_guarded=True),
    Case(KEYS, "it, in the host", raw("GET", "/v1/models", b"", "X-Original-URL: /health"), 401, on_guarded=True),
    Case(KEYS, "whole URL", raw("GET", "http://localhost/v1/models"), 401, on_guarded=True),
    Case(KEYS, "unknown route", raw("GET", "/nothing"), 401, on_guarded=True),
    Case(NAMES, "model", completion(model="gpt-5"), 404, "model", "model_not_found", "gpt-5"),
    Case(NAMES, "model in chat", chat(model="gpt-5"), 404, "model", "model_not_found", "gpt-5"),
    Case(NAMES, "model to tokenize", post("/tokenize", {"model": "x", "prompt": "x"}), 404, "model", "model_not_found"),
    Case(NAMES, "model of a path", raw("GET", "/v1/models/etc/passwd"), 404, "model", "model_not_found"),
    Case(NAMES, "model a number", completion(model=7), 400, "model"),
    Case(NAMES, "no messages", post("/v1/chat/completions", {"max_tokens": 2}), 400, "messages"),
    Case(NAMES, "messages null", chat(messages=None), 400, "messages"),
    Case(NAMES, "messages empty", chat(messages=[]), 400, "messages"),
    Case(NAMES, "messages a text", chat(messages="Hi"), 400, "messages"),
    Case(NAMES, "messages an object", chat(messages={"role": "user", "content": "Hi"}), 400, "messages"),
    Case(NAMES, "a message is a text", chat(messages=["Hi"]), 400, "messages[0]"),
    Case(NAMES, "a message is null", chat(messages=[None]), 400, "messages[0]"),
    Case(NAMES, "messages twice", chat(messages=[[{"role": "user", "content": "Hi"}]]), 400, "messages[0]"),
    Case(NAMES, "16,385 messages", chat(messages=[{"role": "user", "content": "Hi"}] * 16385), 400, "messages"),
    Case(ROLES, "16,385 parts", said(content=["Hi"] * 16385), 400, "messages[0].content"),
    Case(ROLES, "4,097 tools", chat(tools=[{}] * 4097), 400, "tools", message="4096"),
    Case(ROLES, "role of 65 characters", said(role="w" * 65, content="Hi"), 400, "messages[0].role", message="64"),
    Case(ROLES, "no role", chat(messages=[{"content": "Hi"}]), 400, "messages[0].role"),
    Case(ROLES, "role a number", said(role=7, content="Hi"), 400, "messages[0].role"),
    Case(ROLES, "role null", said(role=None, content="Hi"), 400, "messages[0].role"),
    Case(ROLES, "no content", said(), 400, "messages"),
    Case(ROLES, "content null", said(content=None), 400, "messages"),
    Case(ROLES, "content a number", said(content=7), 400, "messages[0].content"),
    Case(
        ROLES,
        "the template's error",
        said(content="never"),
        400,
        "messages",
        message="not this word",
        on_guarded=True,
    ),
    Case(ROLES, "a template", chat(chat_template="{{ messages }}"), 400, "chat_template"),
    Case(ROLES, "a template smuggled", chat(chat_template_kwargs={"chat_template": "x"}), 400, "chat_template_kwargs"),
    Case(ROLES, "messages smuggled", chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    Case(ROLES, "both ways to go on", chat(add_generation_prompt=True, continue_final_message=True)),
    Case(IMAGES, "image_url", said(content=[IMAGE]), 400, "messages", message="image"),
    Case(IMAGES, "beside a text", said(content=[{"type": "text", "text": "See"}, IMAGE]), 400, "messages"),
    Case(IMAGES, "input_image", said(content=[{"type": "input_image", "image_url": "data:,"}]), 400, "messages"),
    Case(IMAGES, "audio", said(content=[{"type": "input_audio", "input_audio": {"data": ""}}]), 400, "messages"),
    Case(IMAGES, "a part without a type", said(content=[{}]), 400, "messages"),
    Case(IMAGES, "a type that nobody knows", said(content=[{"type": "smell"}]), 400, "messages"),
    Case(IMAGES, "a text that is none", said(content=[{"type": "text", "text": 7}]), 400, "messages"),
    Case(PROMPTS, "missing", post("/v1/completions", {"max_tokens": 2}), 400, "prompt"),
    Case(PROMPTS, "null", completion(prompt=None), 400, "prompt"),
    Case(PROMPTS, "empty text", completion(prompt=""), 400, "prompt"),
    Case(PROMPTS, "empty list", completion(prompt=[]), 400, "prompt"),
    Case(PROMPTS, "list of an empty text", completion(prompt=[""]), 400, "prompt"),
    Case(PROMPTS, "list of an empty list", completion(prompt=[[]]), 400, "prompt"),
    Case(PROMPTS, "one of several is empty", completion(prompt=["x", ""]), 400, "prompt", message="prompt 1"),
    Case(PROMPTS, "text and tokens", completion(prompt=["x", [5]]), 400, "prompt"),
    Case(PROMPTS, "an object", completion(prompt={"text": "x"}), 400, "prompt"),
    Case(PROMPTS, "a number", completion(prompt=7), 400, "prompt"),
    Case(PROMPTS, "1,025 prompts", completion(prompt=["x"] * 1025), 400, "prompt", message="1024"),
    Case(PROMPTS, "nothing to tokenize", post("/tokenize", {}), 400, "prompt"),
    Case(TOKENS, "-1", completion(prompt=[5, -1]), 400, "prompt", message="-1"),
    Case(TOKENS, "the vocabulary's size", completion(prompt=[4096]), 400, "prompt", message="4096"),
    Case(TOKENS, "2**31", completion(prompt=[2**31]), 400, "prompt"),
    Case(TOKENS, "2**64", completion(prompt=[2**64]), 400, "prompt"),
    Case(TOKENS, "a float", completion(prompt=[5.0]), 400, "prompt"),
    Case(TOKENS, "a bool", completion(prompt=[5, True]), 400, "prompt"),
    Case(TOKENS, "a null", completion(prompt=[5, None]), 400, "prompt"),
    Case(TOKENS, "in a list of lists", completion(prompt=[[5], [5, 9999]]), 400, "prompt"),
    Case(TOKENS, "to detokenize", post("/detokenize", {"tokens": [-1]}), 400, "tokens[0]"),
    Case(TOKENS, "a float to detokenize", post("/detokenize", {"tokens": [1.5]}), 400, "tokens[0]"),
    Case(TOKENS, "beyond the vocabulary to detokenize", post("/detokenize", {"tokens": [4096]}), 400, "tokens"),
    Case(LENGTHS, "512 tokens", completion(prompt=[5] * 512), 400, "prompt", TOO_LONG, "maximum context length"),
    Case(LENGTHS, "a long text", completion(prompt="word " * 4000), 400, "prompt", TOO_LONG, "512"),
    Case(LENGTHS, "one of two", completion(prompt=[[5], [5] * 600]), 400, "prompt", TOO_LONG),
    Case(LENGTHS, "512 with the output", completion(prompt=[5] * 500, max_tokens=13), 400, "max_tokens", TOO_LONG),
    Case(LENGTHS, "max_tokens 10**18", completion(max_tokens=10**18), 400, "max_tokens", TOO_LONG),
    Case(LENGTHS, "a long chat", said(content="word " * 4000), 400, "messages", TOO_LONG, "maximum context length"),
    Case(LENGTHS, "a chat's output", chat(max_completion_tokens=512), 400, "max_completion_tokens", TOO_LONG),
    Case(LENGTHS, "a chat's max_tokens", chat(max_tokens=512), 400, "max_tokens", TOO_LONG),
    Case(LIMITS, "0", completion(max_tokens=0), 400, "max_tokens"),
    Case(LIMITS, "-1", completion(max_tokens=-1), 400, "max_tokens"),
    Case(LIMITS, "text", completion(max_tokens="x"), 400, "max_tokens"),
    Case(LIMITS, "number as a text", completion(max_tokens="5"), 400, "max_tokens"),
    Case(LIMITS, "float", completion(max_tokens=1.5), 400, "max_tokens"),
    Case(LIMITS, "bool", completion(max_tokens=True), 400, "max_tokens"),
    Case(LIMITS, "2**63", completion(max_tokens=2**63), 400, "max_tokens"),
    Case(LIMITS, "0 in chat", chat(max_tokens=0), 400, "max_tokens"),
    Case(LIMITS, "max_completion_tokens -1", chat(max_completion_tokens=-1), 400, "max_completion_tokens"),
    Case(LIMITS, "more at least than at most", completion(min_tokens=3), 400, "min_tokens"),
    Case(LIMITS, "min_tokens -1", completion(min_tokens=-1), 400, "min_tokens"),
    Case(SAMPLING, "temperature -1", completion(temperature=-1), 400, "temperature"),
    Case(SAMPLING, "temperature 3", completion(temperature=3), 400, "temperature", message="3"),
    Case(SAMPLING, "temperature NaN", completion(temperature=float("nan")), message="not valid JSON"),
    Case(SAMPLING, "temperature Infinity", completion(temperature=float("inf")), message="not valid JSON"),
    Case(SAMPLING, "temperature 1e999", sent(b'{"prompt": "x", "temperature": 1e999}')),
    Case(SAMPLING, 'temperature "NaN"', completion(temperature="NaN"), 400, "temperature"),
    Case(SAMPLING, "temperature true", completion(temperature=True), 400, "temperature"),
    Case(SAMPLING, "temperature a list", completion(temperature=[1]), 400, "temperature"),
    Case(SAMPLING, "temperature 2**70", completion(temperature=2**70), 400, "temperature"),
    Case(SAMPLING, "top_p 0", completion(top_p=0), 400, "top_p"),
    Case(SAMPLING, "top_p 1.1", completion(top_p=1.1), 400, "top_p"),
    Case(SAMPLING, "top_k -2", completion(top_k=-2), 400, "top_k"),
    Case(SAMPLING, "top_k a float", completion(top_k=1.5), 400, "top_k"),
    Case(SAMPLING, "min_p 2", completion(min_p=2), 400, "min_p"),
    Case(SAMPLING, "min_p -0.1", completion(min_p=-0.1), 400, "min_p"),
    Case(SAMPLING, "presence_penalty 2.1", completion(presence_penalty=2.1), 400, "presence_penalty"),
    Case(SAMPLING, "presence_penalty -2.1", chat(presence_penalty=-2.1), 400, "presence_penalty"),
    Case(SAMPLING, "frequency_penalty -2.1", completion(frequency_penalty=-2.1), 400, "frequency_penalty"),
    Case(SAMPLING, "frequency_penalty 3", chat(frequency_penalty=3), 400, "frequency_penalty"),
    Case(SAMPLING, "repetition_penalty 0", completion(repetition_penalty=0), 400, "repetition_penalty"),
    Case(SAMPLING, "repetition_penalty -1", chat(repetition_penalty=-1), 400, "repetition_penalty"),
    Case(SAMPLING, "seed a text", completion(seed="x"), 400, "seed"),
    Case(SAMPLING, "seed 2**64", completion(seed=2**64), 400, "seed"),
    Case(SAMPLING, "no token allowed", completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    Case(SAMPLING, "a foreign token allowed", completion(allowed_token_ids=[9999]), 400, "allowed_token_ids"),
    Case(SAMPLING, "a foreign token stops", completion(stop_token_ids=[9999]), 400, "stop_token_ids"),
    Case(SAMPLING, "129 bad words", completion(bad_words=["x"] * 129), 400, "bad_words"),
    Case(SAMPLING, "an empty bad word", completion(bad_words=[""]), 400, "bad_words[0]"),
    Case(SAMPLING, "a chat's temperature 3", chat(temperature=3), 400, "temperature"),
    Case(CHOICES, "n 0", completion(n=0), 400, "n"),
    Case(CHOICES, "n -1", chat(n=-1), 400, "n"),
    Case(CHOICES, "n 129", completion(n=129), 400, "n", message="128"),
    Case(CHOICES, "n true", completion(n=True), 400, "n"),
    Case(CHOICES, "greedy", completion(n=2, temperature=0), 400, "n", message="greedy"),
    Case(CHOICES, "greedy chat", chat(n=2, temperature=0), 400, "n", message="greedy"),
    Case(CHOICES, "best_of below n", completion(n=3, best_of=2), 400, "best_of"),
    Case(CHOICES, "best_of 129", completion(best_of=129), 400, "best_of"),
    Case(CHOICES, "best_of streamed", completion(best_of=2, stream=True), 400, "best_of"),
    Case(STOPS, "65", completion(stop=["a"] * 65), 400, "stop", message="64"),
    Case(STOPS, "empty in a list", completion(stop=["a", ""]), 400, "stop"),
    Case(STOPS, "empty", completion(stop=""), 400, "stop"),
    Case(STOPS, "1 MB", completion(stop="x" * MEGABYTE), 400, "stop"),
    Case(STOPS, "a number", chat(stop=7), 400, "stop"),
    Case(STOPS, "a list in a list", chat(stop=[["a"]]), 400, "stop"),
    Case(LOGPROBS, "21", completion(logprobs=21), 400, "logprobs", message="20"),
    Case(LOGPROBS, "top 21", chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", message="20"),
    Case(LOGPROBS, "top without", chat(top_logprobs=2), 400, "top_logprobs"),
    Case(LOGPROBS, "top with false", chat(logprobs=False, top_logprobs=2), 400, "top_logprobs"),
    Case(LOGPROBS, "-2", completion(logprobs=-2), 400, "logprobs"),
    Case(LOGPROBS, "the whole vocabulary", completion(logprobs=-1), 400, "logprobs"),
    Case(LOGPROBS, "a number in chat", chat(logprobs=3), 400, "logprobs"),
    Case(LOGPROBS, "prompt_logprobs 21", completion(prompt_logprobs=21), 400, "prompt_logprobs"),
    Case(LOGPROBS, "prompt_logprobs streamed", chat(prompt_logprobs=1, stream=True), 400, "prompt_logprobs"),
    Case(BIASES, "abc", completion(logit_bias={"abc": 1}), 400, "logit_bias", message="abc"),
    Case(BIASES, "id", completion(logit_bias={"4096": 1}), 400, "logit_bias", message="4096"),
    Case(BIASES, "negative id", completion(logit_bias={"-1": 1}), 400, "logit_bias"),
    Case(BIASES, "NaN", completion(logit_bias={"5": float("nan")}), message="not valid JSON"),
    Case(BIASES, "a text for a bias", completion(logit_bias={"5": "NaN"}), 400, "logit_bias"),
    Case(BIASES, "a null for a bias", chat(logit_bias={"5": None}), 400, "logit_bias"),
    Case(BIASES, "a list", completion(logit_bias=[1]), 400, "logit_bias"),
    Case(BIASES, "an id of 5,000 digits", completion(logit_bias={"1" * 5000: 1}), 400, "logit_bias"),
    Case(TOGETHER, "stream_options", completion(stream_options={"include_usage": True}), 400, "stream_options"),
    Case(TOGETHER, "stream_options in chat", chat(stream_options={}, stream=False), 400, "stream_options"),
    Case(TOGETHER, "constraints", chat(response_format=SCHEMA, guided_regex="x"), 400, "guided_regex"),
    Case(STRUCTURE, "a regex bomb", completion(guided_regex="(((a{100}){100}){100}){100}"), 400, "guided_regex"),
    Case(TOGETHER, "two in one", chat(structured_outputs={"regex": "x", "json": {}}), 400, "structured_outputs"),
    *(
        Case(STRUCTURE, name, ask(**{field: given}), 400, field, message=message)
        for name, field, given, message in STRUCTURES
        for ask in (completion, chat)
    ),
    *(
        Case(STRUCTURE, f"{name}, streamed", chat(stream=True, **{field: given}), 400, field, message=message)
        for name, field, given, message in STRUCTURES
    ),
    Case(TOGETHER, "cache_salt", completion(cache_salt=""), 400, "cache_salt"),
    Case(TOGETHER, "cache_salt in chat", chat(cache_salt=""), 400, "cache_salt"),
    Case(TOGETHER, "request_id of two lines", completion(request_id="a\nb"), 400, "request_id"),
    Case(TOGETHER, "stream a text", completion(stream="yes"), 400, "stream"),
    Case(TOGETHER, "suffix", completion(suffix="the end"), 400, "suffix"),
    Case(TOGETHER, "beams drawn", completion(use_beam_search=True, temperature=1), 400, "temperature"),
    Case(TOGETHER, "beams streamed", completion(use_beam_search=True, stream=True), 400, "use_beam_search"),
    Case(TOGETHER, "tool_choice", chat(tool_choice="required"), 400, "tool_choice"),
    Case(
        TOGETHER,
        "tools",
        chat(tools=[{"type": "function", "function": {"name": "f"}}]),
        400,
        "tools",
        message="required",
    ),
]


def test_every_row_has_a_line() -> None:
    page = Path(__file__).resolve().parents[3] / "shared" / "RELIABILITY.md"
    if not page.is_file():
        pytest.skip("needs ../shared beside the repository")
    table = page.read_text().partition("| input | answer |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()]
    known = dict.fromkeys([*(case.row for case in CASES), EXTRA, LEAVES, SLOW])
    del known[STRUCTURE]  # which that page has not
    assert rows == list(known)


def _marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    """A bomb takes the seconds that it is given, in a chat as in a completion."""
    is_bomb = "bomb" in case.name
    return (pytest.mark.slow,) * is_bomb + (pytest.mark.nightly,) * (is_bomb and b"/chat/" in case.request)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{c.row.split(';')[0]}: {c.name}", marks=_marks(c)) for c in CASES]
)
def test_refused(case: Case, server: RunningServer, guarded: RunningServer, expected: dict[int, Any]) -> None:
    where = guarded if case.on_guarded else server
    answer = exchange(where, with_key(case.request) if case.on_guarded and case.row != KEYS else case.request)
    statuses = (case.status,) if isinstance(case.status, int) else case.status
    assert answer.status in statuses, answer.body
    error = check_error(answer)
    if case.param is not None or case.code is not None:
        assert (error["param"], error["code"]) == (case.param, case.code)
    assert case.message in error["message"]
    assert where.golden() == expected[where.port]


def exchange(server: RunningServer, request: bytes) -> Answer:
    """Send these bytes, and read the response, however long a busy machine takes for it."""
    with server.connect(timeout=PATIENCE) as connection:
        sender = threading.Thread(target=_send, args=(connection, request))  # it may be answered before it is sent
        sender.start()
        try:
            return read_response(connection)
        finally:
            with contextlib.suppress(OSError):  # the server has closed it already
                connection.shutdown(socket.SHUT_RDWR)
            sender.join()


def _send(connection: socket.socket, request: bytes) -> None:
    with contextlib.suppress(OSError):  # the server has refused it and closed the connection
        connection.sendall(request)


class Answers(io.BufferedReader):
    """Of one connection, for `HTTPResponse`: what was received beyond one answer is the next one's beginning."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(socket.SocketIO(connection, "r"))

    def makefile(self, mode: str) -> "Answers":
        return self

    def close(self) -> None:
        """Each answer closes it at its end."""


def read_response(connection: socket.socket | Answers) -> Answer:
    response: HTTPResponse = HTTPResponse(connection)  # type: ignore[arg-type]
    response.begin()
    return Answer(response.status, response.headers, response.read())


def check_error(answer: Answer) -> dict[str, Any]:
    """The error of OpenAI's form, which tells nothing that is none of the client's business."""
    content = answer.json()
    assert content.keys() == {"error"}
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 10 <= len(error["message"]) <= 1000
    assert error["type"] == ("authentication_error" if answer.status == 401 else "invalid_request_error")
    assert all(isinstance(error[name], str | None) for name in ("param", "code"))
    for secret in (r"Traceback", r"\.py\b", r"/(work|usr|home|tmp|root)\b", r"0x[0-9a-f]{5}", r"127\.0\.0\.1", KEY):
        assert not re.search(secret, error["message"]), error
    return error


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [7] * MEGABYTE}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [7] * MEGABYTE}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "tools": [7] * MEGABYTE}),
        ("/v1/completions", {"prompt": "x", "bad_words": [7] * MEGABYTE}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): "x" for i in range(MEGABYTE // 8)}}),
        ("/detokenize", {"tokens": ["x"] * MEGABYTE}),
    ],
    ids=["messages", "parts", "tools", "bad_words", "logit_bias", "tokens"],
)
def test_a_million_wrong_items_are_one_error(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    """An error for each would hold up everybody for half a minute."""
    body = json.dumps(fields).encode()
    answer = server.request("POST", path, body, {"Content-Type": "application/json"}, timeout=10.0)
    assert answer.status == 400
    assert len(check_error(answer)["message"]) < 200


# What is answered.


def test_unknown_fields_are_noted(guarded: RunningServer) -> None:
    answer = guarded.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "nobody_knows": 1, "s\u2028o": {}})
    assert answer.status == 200
    wait_until(lambda: "nobody_knows" in guarded.log(), 5.0)
    assert KEY not in guarded.log()


def test_no_client_writes_lines_of_the_log(guarded: RunningServer) -> None:
    assert exchange(guarded, raw("GET", "/x%0a%0dforged%1b[31m")).status == 401
    wait_until(lambda: "/x%0A%0Dforged%1B%5B31m" in guarded.log(), 5.0)
    assert not re.search("^forged", guarded.log(), re.MULTILINE)


def test_max_completion_tokens_wins(server: RunningServer) -> None:
    usage = server.chat("Hi", max_tokens=2, max_completion_tokens=5, ignore_eos=True)["usage"]
    assert usage["completion_tokens"] == 5


def test_every_route_wants_the_key_but_for_those_that_watch_a_server(guarded: RunningServer) -> None:
    paths = guarded.get("/openapi.json").json()["paths"]
    routes = [(method.upper(), path) for path, item in paths.items() for method in item]
    assert {("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/metrics")} <= set(routes)
    for method, path in [*routes, ("GET", "/"), ("GET", "/live"), ("GET", "/docs"), ("GET", "/openapi.json")]:
        answer = exchange(guarded, raw(method, path))
        is_open = path in ("/health", "/ping", "/load", "/metrics", "/version")
        assert answer.status == (200 if is_open else 401), (method, path)


@pytest.mark.parametrize(
    "header", [f"Authorization: Bearer {KEY}", f"authorization: bearer  {KEY}", f"X-Api-Key: {KEY}"]
)
def test_right_key(guarded: RunningServer, header: str) -> None:
    assert exchange(guarded, raw("GET", "/v1/models", b"", header)).status == 200


def test_chunked_body_is_read(server: RunningServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert exchange(server, sent(chunks, "Transfer-Encoding: chunked")).status == 200


def test_pipelined_requests_are_answered_in_turn(server: RunningServer) -> None:
    first, second = (completion(max_tokens=count).replace(b"Connection: close\r\n", b"") for count in (3, 4))
    with server.connect() as connection:
        connection.sendall(first + second)
        received = Answers(connection)
        answers = [read_response(received).json() for _ in range(2)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [3, 4]


# Clients that go away.

LONG = {"prompt": "Once upon", "max_tokens": 500, "ignore_eos": True}
ENDINGS = ["at once", "in the headers", "in the body", "before the answer", "in mid-stream", "by a reset"]


@pytest.mark.parametrize("when", ENDINGS)
def test_client_leaves(server: RunningServer, expected: dict[int, Any], when: str) -> None:
    # 500 tokens take a sixth of a second: on a busy machine all may be there before the server sees that nobody waits.
    assert any(is_aborted_by_leaving(server, when) for _ in range(20))
    assert server.golden() == expected[server.port]


def is_aborted_by_leaving(server: RunningServer, when: str) -> bool:
    """Leave once; False where the request had ended by itself before that was seen."""
    request = post("/v1/completions", {**LONG, "stream": when in ("in mid-stream", "by a reset")})
    before = [num_finished(server, reason) for reason in ("abort", "length")]

    def num_ended() -> float:
        return num_finished(server, "abort") + num_finished(server, "length")

    size = {"at once": 0, "in the headers": 40, "in the body": len(request) - 9}.get(when, len(request))
    connection = server.connect()
    connection.sendall(request[:size])
    if when in ("in mid-stream", "by a reset"):
        seen = b""
        while seen.count(b"data: ") < 3:
            seen += connection.recv(1000)
    if when == "by a reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if when == "before the answer":
        wait_until(lambda: not server.is_idle() or num_ended() > sum(before), 5.0, "the request did not start")
    connection.close()
    server.wait_idle()
    if size < len(request):
        assert num_ended() == sum(before)
        return True
    wait_until(lambda: num_ended() > sum(before), 5.0, "it is not counted")
    return num_finished(server, "abort") == before[0] + 1


def num_finished(server: RunningServer, reason: str) -> float:
    text = server.get("/metrics").body.decode()
    found = re.search(rf'^vllm:request_success_total\{{.*finished_reason="{reason}".*\}} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])


# Clients that take their time.


def trickle(connection: socket.socket, data: bytes) -> None:
    """A byte now and then, until the server has enough."""
    for byte in data:
        time.sleep(0.05)
        connection.sendall(bytes([byte]))


SLOW_CLIENTS = {
    "says nothing": lambda connection: None,
    "headers by the byte": lambda connection: trickle(connection, raw("GET", "/health") * 9),
    "headers without end": lambda connection: connection.sendall(raw("GET", "/health")[:-2]),
    "body by the byte": lambda connection: trickle(connection, with_key(completion(prompt="x" * 200))),
    "body without end": lambda connection: connection.sendall(with_key(completion())[:-1]),
    "chunks without end": lambda connection: connection.sendall(
        with_key(sent(b"2\r\n{}\r\n", "Transfer-Encoding: chunked"))
    ),
    "half closed in the headers": lambda connection: half_close(connection, raw("GET", "/health")[:-2]),
    "half closed in the body": lambda connection: half_close(connection, with_key(completion())[:-1]),
    "half closed after a request": lambda connection: half_close(connection, with_key(completion())),
    "idle after a request": lambda connection: connection.sendall(with_key(completion(), keep=True)),
}


def half_close(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def with_key(request: bytes, keep: bool = False) -> bytes:
    request = request.replace(b"Connection: close\r\n", b"") if keep else request
    return request.replace(b"Host:", f"Authorization: Bearer {KEY}\r\nHost:".encode(), 1)


@pytest.mark.slow
def test_slow_clients_are_closed_by_timeout(guarded: RunningServer, expected: dict[int, Any]) -> None:
    open_for: dict[str, float] = {}

    def run(name: str, behave: Callable[[socket.socket], None]) -> None:
        start = time.monotonic()
        with guarded.connect(timeout=20.0) as connection:
            try:
                behave(connection)
                while connection.recv(1000):
                    pass
            except ConnectionError:
                pass
            open_for[name] = time.monotonic() - start

    threads = [threading.Thread(target=run, args=item) for item in SLOW_CLIENTS.items()]
    for thread in threads:
        thread.start()
    assert guarded.golden() == expected[guarded.port]  # nobody else waits
    for thread in threads:
        thread.join()
    assert {name: seconds for name, seconds in open_for.items() if seconds > 5.0} == {}
    assert open_for.keys() == SLOW_CLIENTS.keys()
    guarded.wait_idle()
    assert guarded.golden() == expected[guarded.port]
