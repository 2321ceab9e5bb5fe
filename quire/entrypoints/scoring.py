"""Scores of pairs of texts: which of them go together, and what is made of the model's vectors.

`LLM.score` and the server's /score and /rerank call it. Knows no engine.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import InvalidRequestError, require


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


def cosines(vectors: Sequence[Any], num_queries: int) -> list[float]:
    """The cosine similarity of each document's vector and its query's; `vectors` are those of queries, and then theirs.

    Each is summed up by itself: it is the same whatever others are asked for with it.
    """
    unit = [row / (np.sqrt(np.square(row).sum()) or 1.0) for row in map(np.array, vectors)]
    queries, documents = unit[:num_queries], unit[num_queries:]
    queries = queries if num_queries > 1 else queries * len(documents)
    return [float((one * other).sum()) for one, other in zip(queries, documents, strict=True)]
