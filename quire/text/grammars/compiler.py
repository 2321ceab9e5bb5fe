"""Grammars compiled by llguidance, for one vocabulary.

`lanes` calls it, in threads of its own: it takes milliseconds as a rule, and the first grammar brings the tokenizer's
table with it. llguidance is imported here and beside, when it is needed.
"""

import contextlib
import ctypes
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequestError, QuireError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammars.meter import STEP_ITEMS
from quire.text.grammars.reasons import reason_of
from quire.text.grammars.source import source_of
from quire.text.grammars.trial import Trial

# Schemas that may take for ever: regexes are intersected, and have as many states as a divisor says.
_RISKY = re.compile(r'"(pattern|patternProperties|allOf|multipleOf)')
_LARGE = 2**15  # tokens: to read fewer takes some hundredths of a second
_LONG = 2**15  # characters of a source: some grammars take time by the square of their length
_MANY = 200  # minItems, maximum and the like, in however short a source: time goes by the square of their number
_SECONDS = (0.0, 0.25, 1.0, 4.0)  # of processor time that a grammar may take at each pace before it is compiled here
NUM_PACES = len(_SECONDS)

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


class TooLongError(QuireError):
    """A grammar that is to be compiled at the next pace."""


class Compiler:
    """Makes matchers that stand before the first token; each pace is for one thread.

    Attributes:
        trials: by pace, what tries out grammars before they are compiled.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._table: Any = None  # llguidance's tokenizer, once read
        self._special_tokens: Mapping[str, int] = {}
        self.trials = [Trial() for _ in _SECONDS]

    def prepare(self) -> None:
        """Read the vocabulary, if it is so large that this keeps the GIL for long."""
        if self._vocabulary.size >= _LARGE:
            with contextlib.suppress(Exception):
                self._read_table()

    def compile(self, params: StructuredOutputsParams, pace: int = NUM_PACES - 1) -> Any:
        """llguidance's matcher of a constraint, which has been through all paces before this.

        Raises:
            TooLongError: it may take longer than this pace allows, and is no worse for the next.
            InvalidRequestError: the constraint can't be held, and why.
        """
        import llguidance

        table = self._table or self._read_table()
        source = source_of(params, self._special_tokens)
        if _may_take_long(params, source) and not self.trials[pace].passes(source, _SECONDS[pace]):
            if pace < NUM_PACES - 1:
                raise TooLongError
            much = f"it takes more than {_SECONDS[pace]:g} s, or too much memory, to compile"
            raise InvalidRequestError(f"{much}; use simpler regexes, and fewer of them at one place.")
        limits = llguidance.LLParserLimits(verbose_errors=False, step_max_items=STEP_ITEMS)
        matcher = llguidance.LLMatcher(table, source, log_level=0, limits=limits)
        trial = matcher.deep_copy()  # which works out here what is worked out once for all
        if not trial.is_error():
            trial.compute_ff_tokens()
            mask = (ctypes.c_uint32 * -(-self._vocabulary.size // 32))()
            trial.unsafe_compute_mask_ptr(ctypes.addressof(mask), ctypes.sizeof(mask))  # without the GIL, unlike others
        if trial.is_error():
            raise InvalidRequestError(reason_of(trial.get_error(), params) + ".")
        return matcher

    def _read_table(self) -> Any:
        import llguidance

        start, vocabulary = time.perf_counter(), self._vocabulary
        eos_token_ids = list(vocabulary.eos_token_ids) or None
        text, self._special_tokens = vocabulary.load()
        if max(self._special_tokens.values(), default=0) >= vocabulary.size:  # as Gemma 3's that stands for an image
            parts = json.loads(text)
            parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < vocabulary.size]
            text = json.dumps(parts)
        # Both calls keep the GIL for as long as they take, a second for 150,000 tokens: see `prepare`. Who streams all
        # the same has a turn between.
        table = llguidance.LLTokenizer(text, n_vocab=vocabulary.size, eos_token=eos_token_ids, slices=[])
        time.sleep(0.02)
        self._table = table.with_slices(llguidance.LLTokenizer.general_slices())
        logger.info("grammars: read the vocabulary in %.2f s", time.perf_counter() - start)
        return self._table


def _may_take_long(params: StructuredOutputsParams, source: str) -> bool:
    risky = params.kind not in ("choice", "json_object") and (params.kind != "json" or _RISKY.search(source))
    return bool(risky) or len(source) > _LONG or source.count('"min') + source.count('"max') > _MANY
