"""Scores of pairs of texts: which go together, as what prompts they are read, and what is made of a model's vectors;
and what scoring and classifying give back.

A model without a head reads each text by itself; one with a head for one class reads both together. `LLM.score` and
the server's /score and /rerank call it. Knows no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.config.model import ModelConfig
from quire.errors import InvalidRequestError, require
from quire.inputs import PromptType
from quire.outputs import PoolingRequestOutput
from quire.text.conversation import Conversation
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ClassificationOutput:
    """How likely a text is of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


class ClassificationRequestOutput(PoolingRequestOutput):
    """The same; `outputs` is a ClassificationOutput."""


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


class ScoringRequestOutput(PoolingRequestOutput):
    """The same; `outputs` is a ScoringOutput, and the prompt that of both texts."""


def read_pairs(data_1: Any, data_2: Any) -> tuple[list[str], list[str]]:
    """The texts on both sides: on the first one for all of the second, or one each.

    Args:
        data_1, data_2: a text, or a list of them; {"text": ...} is a text, too.

    Raises:
        InvalidRequestError: they are of other kinds, or there are not as many as belong together.
    """
    sides: list[list[str]] = []
    for name, data in (("data_1", data_1), ("data_2", data_2)):
        many = data if isinstance(data, list | tuple) else [data]
        texts: list[Any] = [one.get("text") if isinstance(one, dict) else getattr(one, "text", one) for one in many]
        fits = texts != [] and all(isinstance(one, str) for one in texts)
        require(fits, name, data, 'a text, or a list of at least one; {"text": ...} is a text, too')
        sides.append(texts)
    queries, documents = sides
    if len(queries) not in (1, len(documents)):
        what = f"{len(queries)} and {len(documents)} texts are no pairs"
        raise InvalidRequestError(f"{what}: give 1 and 1, 1 and N, or N and N.", "data_1")
    return queries, documents


def pair_prompts(
    model: ModelConfig, tokenizer: Tokenizer | None, queries: list[str], documents: list[str], template: str | None
) -> list[PromptType]:
    """Pairs as prompts of a model with a head: as the template (of the roles query and document) writes them.

    Without one they are what the tokenizer makes of two texts; or, as for vLLM, one text where the head is made of a
    model's that generates.

    Raises:
        InvalidRequestError: the head is for several classes, there is no tokenizer, or the template refuses them.
    """
    if model.num_labels > 1:
        what = f"this model's head is for {model.num_labels} classes, and scores are of one"
        raise InvalidRequestError(f"{what}: take LLM.classify, or /classify.", "data_1")
    if tokenizer is None:
        raise InvalidRequestError("scores need a tokenizer, but skip_tokenizer_init=True.", "data_1")
    pairs = zip(queries * (len(documents) // len(queries)), documents, strict=True)
    if template is not None:
        turns = ([{"role": "query", "content": a}, {"role": "document", "content": b}] for a, b in pairs)
        told: Any = {"chat_template": template, "add_generation_prompt": False}
        return [tokenizer.render(Conversation(messages=messages, **told)) for messages in turns]
    if model.hf_config.get("use_sep_token", "classifier_from_token" not in model.hf_config):
        return [tokenizer.encode_pair(query, document) for query, document in pairs]
    return [query + document for query, document in pairs]


def cosines(vectors: Sequence[Any], num_queries: int) -> list[float]:
    """The cosine similarity of each document's vector and its query's; `vectors` are those of queries, and then theirs.

    Each is summed up by itself: it is the same whatever others are asked for with it.
    """
    unit = [row / (np.sqrt(np.square(row).sum()) or 1.0) for row in map(np.array, vectors)]
    queries, documents = unit[:num_queries], unit[num_queries:]
    queries = queries if num_queries > 1 else queries * len(documents)
    return [float(np.clip((one * other).sum(), -1.0, 1.0)) for one, other in zip(queries, documents, strict=True)]
