"""The dialect of /v1/embeddings: texts, ids or messages in, vectors out; for Ollama's and llama.cpp's routes, too.

`EventService` calls it. A request that pools goes the way of all others, and brings one output.
"""

import asyncio
import base64
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from numpy import asarray

from quire.engine.terms import check_terms
from quire.entrypoints.scoring import cosines, pair_prompts, read_pairs
from quire.entrypoints.server.dialects.llama_cpp import tokens_of
from quire.entrypoints.server.dialects.through_chat import validated
from quire.entrypoints.server.embedding_request import EmbeddingRequest, PooledRequest, RerankRequest, ScoreRequest
from quire.entrypoints.server.event_service import Event, EventWriter
from quire.entrypoints.server.info_requests import is_chat
from quire.entrypoints.server.llama_requests import LlamaEmbeddingRequest, prompts_of
from quire.entrypoints.server.ollama_requests import OllamaEmbedRequest
from quire.entrypoints.server.prompts import conversation_text
from quire.entrypoints.server.requests_common import AnyRequest
from quire.entrypoints.server.responses import encode
from quire.entrypoints.server.sampling import client_name, named
from quire.entrypoints.server.service import Asked, TurnRequest
from quire.entrypoints.server.state import ServerState
from quire.entrypoints.server.turn import Delta, Rules, Turn
from quire.errors import NotYetSupportedError
from quire.pooling_params import PoolingParams
from quire.protocol.requests import Terms

_Form = Callable[["EmbeddingWriter"], Any]
_Asked = Asked["EmbeddingWriter"]
_RULES = Rules(no_tokens=True)
_TURNS = ("add_generation_prompt", "continue_final_message")  # here off by default


async def read_embedding(
    state: ServerState, body: EmbeddingRequest, request_id: str, form: _Form | None = None, task: str | None = "embed"
) -> _Asked:
    """See `Read`. `form`: of the answer, where it is not OpenAI's; `task`: what is done, if the body doesn't say."""
    state.admit(body)
    wanted = PoolingParams(
        body.truncate_prompt_tokens, body.dimensions, body.normalize, body.use_activation, body.task or task
    )
    of_chat, texts = is_chat(body, "input"), body.input
    special = not of_chat if body.add_special_tokens is None else body.add_special_tokens
    if of_chat:
        turns: dict[str, Any] = {name: bool(getattr(body, name)) for name in _TURNS}
        turns |= {"chat_template": body.chat_template, "chat_template_kwargs": body.chat_template_kwargs}
        texts = [await conversation_text(state, each, **turns) for each in body.messages]
    turn, form = Turn(len(texts), 1, _RULES), form or EmbeddingWriter.openai
    tells_classes = form is EmbeddingWriter.classes
    name = f"{'classify' if tells_classes else 'embd'}-{request_id}"
    writer = EmbeddingWriter(state, body, name, wanted, turn, form)
    if not tells_classes:
        writer.keep = partial(_shown, body.encoding_format == "base64")
    return await _asked(state, request_id, texts, writer, "messages" if of_chat else "input", special)


async def _asked(
    state: ServerState, request_id: str, texts: list[Any], writer: "EmbeddingWriter", name: str, special: bool = True
) -> _Asked:
    """What the engine is asked for; `name` is that of the texts in the body, `special` as `add_special_tokens`."""
    if (adapter := state.adapters.get(writer.model)) is not None and hasattr(adapter, "prompt_adapter_id"):
        raise NotYetSupportedError("vectors of prompt adapters are not supported: they are trained to write.")
    params, names = writer.wanted.sampling_params(state.llm.config.model), {"prompt": name}
    state.llm.check_room(len(texts))
    prompts = []
    for text in texts:
        with named(names):
            prompts.append(await state.llm.prepare(text, writer.wanted, special))
        await asyncio.sleep(0)  # many short texts take long together
    terms = Terms(writer.body.priority or 0, client_name(writer.body.user))
    check_terms(terms, state.llm.limits.policy)
    return TurnRequest(request_id, prompts, params, terms, adapter, names), writer


class EmbeddingWriter(EventWriter):
    """Writes one request's vectors, in some `form`. See `EventWriter`.

    Attributes:
        wanted: how a text becomes a vector.
        keep: what is kept of a vector when it comes: a thousand of them at the end would hold the event loop for long.
    """

    def __init__(
        self, state: ServerState, body: PooledRequest, name: str, wanted: PoolingParams, turn: Turn, form: _Form
    ) -> None:
        self.body, self.wanted, self.turn, self.form = body, wanted, turn, form
        self.model, self.config = state.check_model(body.model), state.llm.config.model
        self.keep: Callable[[list[float]], Any] = asarray
        self._name = name
        self._vectors: dict[int, Any] = {}

    def take(self, delta: Delta) -> list[Event]:
        self._vectors[delta.place] = self.keep(self.wanted.numbers(delta.output, self.config))
        return []

    @property
    def vectors(self) -> list[Any]:
        """What is kept of each text."""
        return [self._vectors[place] for place in sorted(self._vectors)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return self.turn.counts()[0]

    @property
    def usage(self) -> dict[str, int]:
        """The same, in OpenAI's form."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens, "completion_tokens": 0}

    def answer(self) -> Any:
        return self.form(self)

    def openai(self, kind: str = "embedding", key: str = "embedding") -> dict[str, Any]:
        """In OpenAI's form."""
        return self.listed([{"object": kind, "index": place, key: one} for place, one in enumerate(self.vectors)])

    def classes(self) -> dict[str, Any]:
        """Each text's probabilities, and the class that is the likeliest, as vLLM shows them."""
        labels, data = self.config.hf_config.get("id2label") or {}, []
        for place, probs in enumerate(self.vectors):
            label = labels.get(str(probs.argmax()), f"LABEL_{probs.argmax()}")
            data.append({"index": place, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
        return self.listed(data)

    def listed(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """Entries, with what goes around them."""
        head = {"id": self._name, "object": "list", "created": int(time.time()), "model": self.model}
        return {**head, "data": data, "usage": self.usage}


# /pooling's, as vLLM has it: the same vectors, each as an entry's data; and /classify's.
read_pooling = partial(read_embedding, form=partial(EmbeddingWriter.openai, kind="pooling", key="data"), task=None)
read_classes = partial(read_embedding, form=EmbeddingWriter.classes, task="classify")


async def read_scores(state: ServerState, body: ScoreRequest, request_id: str) -> _Asked:
    """/score's, as vLLM has it, and /rerank's: Jina's and Cohere's."""
    queries, documents = read_pairs(body.text_1, body.text_2)

    def form(writer: EmbeddingWriter) -> dict[str, Any]:
        rows = writer.vectors
        scores = enumerate([float(row[0]) for row in rows] if model.num_labels else cosines(rows, len(queries)))
        if not isinstance(body, RerankRequest):
            return writer.listed([{"index": place, "object": "score", "score": score} for place, score in scores])
        results = [
            {"index": place, "document": {"text": documents[place], "multi_modal": None}, "relevance_score": score}
            for place, score in sorted(scores, key=lambda pair: -pair[1])
        ]
        head = {"id": f"rerank-{request_id}", "model": writer.model, "usage": writer.usage}
        return {**head, "results": results[: max(body.top_n or 0, 0) or None]}

    state.admit(body)
    model, texts = state.llm.config.model, queries + documents
    if model.num_labels:
        template = state.args.chat_template
        texts = await asyncio.to_thread(pair_prompts, model, state.llm.tokenizer, queries, documents, template)
    wanted = PoolingParams(body.truncate_prompt_tokens, use_activation=body.use_activation)
    writer = EmbeddingWriter(state, body, f"score-{request_id}", wanted, Turn(len(texts), 1, _RULES), form)
    return await _asked(state, request_id, texts, writer, "text_2")


async def read_ollama_embed(state: ServerState, body: OllamaEmbedRequest, request_id: str) -> _Asked:
    """/api/embed's, and the older /api/embeddings'. What is too long loses its end, unless the body forbids that."""
    room, begin = state.llm.config.model.max_model_len, time.monotonic_ns()
    texts: list[Any] = [body.input] if isinstance(body.input, str) else body.input
    if body.truncate is not False:
        texts = [(await state.llm.token_ids(text))[:room] for text in texts]

    def form(writer: EmbeddingWriter) -> dict[str, Any]:
        if body.is_old:
            return {"embedding": writer.vectors[0]}
        spent = {"total_duration": time.monotonic_ns() - begin, "load_duration": 0}
        return {"model": writer.model, "embeddings": writer.vectors, **spent, "prompt_eval_count": writer.num_tokens}

    wanted = {"input": texts, "dimensions": body.dimensions, "normalize": not body.is_old}
    return await _read_as(state, body, request_id, wanted, form)


async def read_llama_embedding(state: ServerState, body: LlamaEmbeddingRequest, request_id: str) -> _Asked:
    """llama.cpp's /embedding's."""
    texts: list[Any] = [await tokens_of(state, text) for text in prompts_of(body.content)]

    def form(writer: EmbeddingWriter) -> list[dict[str, Any]]:
        return [{"index": place, "embedding": [vector]} for place, vector in enumerate(writer.vectors)]

    return await _read_as(state, body, request_id, {"input": texts, "normalize": body.embd_normalize != -1}, form)


async def _read_as(
    state: ServerState, body: AnyRequest, request_id: str, fields: dict[str, Any], form: _Form
) -> _Asked:
    state.unknown_fields.note(body)
    return await read_embedding(state, validated(EmbeddingRequest, fields | {"model": body.model}), request_id, form)


def _shown(packed: bool, vector: list[float]) -> msgspec.Raw:
    return msgspec.Raw(
        encode(base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if packed else vector)
    )
