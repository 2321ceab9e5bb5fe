"""Grammars compiled by llguidance, for one vocabulary.

`quire.structured` calls it, in a thread of its own: it takes milliseconds as a rule, and the first grammar brings the
tokenizer's table with it. llguidance is imported here and beside, when it is needed.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.source import GrammarError, source_of
from quire.text.grammars.trial import Trial

_RISKY = re.compile(r'"(pattern|patternProperties|allOf)')  # schemas that may take for ever: regexes are intersected
_LONGEST_ERROR = 400  # characters; llguidance quotes whole regexes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """What grammars are compiled for.

    Attributes:
        load: reads the tokenizer; returns its tokenizer.json as text, and the ids of special tokens by name.
        size: width of the logits.
        eos_token_ids: tokens that end an output.
    """

    load: Callable[[], tuple[str, Mapping[str, int]]]
    size: int
    eos_token_ids: tuple[int, ...]


class Compiler:
    """Makes matchers that stand before the first token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._table: Any = None  # llguidance's tokenizer, once read
        self._special_tokens: Mapping[str, int] = {}
        self._trial = Trial()

    def compile(self, params: StructuredOutputsParams) -> Any:
        """llguidance's matcher of a constraint.

        Raises:
            InvalidRequestError: the constraint can't be held, and why.
        """
        import llguidance

        if self._table is None:
            self._read_table()
        source = source_of(params, self._special_tokens)
        if params.kind not in ("choice", "json_object") and (params.kind != "json" or _RISKY.search(source)):
            self._trial.check(source)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        table: Any = self._table
        matcher = llguidance.LLMatcher(table, source, log_level=0, limits=limits)
        trial = matcher.deep_copy()  # which works out here what is worked out once for all
        if not trial.is_error():
            trial.compute_ff_tokens()
            trial.compute_bitmask()
        if trial.is_error():
            raise GrammarError(_shown(trial.get_error()))
        return matcher

    def _read_table(self) -> None:
        import llguidance

        start, vocabulary = time.perf_counter(), self._vocabulary
        eos_token_ids = list(vocabulary.eos_token_ids) or None
        text, self._special_tokens = vocabulary.load()
        self._table = llguidance.LLTokenizer(text, n_vocab=vocabulary.size, eos_token=eos_token_ids)
        logger.info("grammars: read the vocabulary in %.2f s", time.perf_counter() - start)


def _shown(error: str) -> str:
    """llguidance's words in one line; it writes lines and columns as 1(8)."""
    error = " ".join(error.replace("<non-verbose/>", "").split())
    error = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", error)
    return error if len(error) <= _LONGEST_ERROR else error[: _LONGEST_ERROR - 3] + "..."
