"""What a user asks of one request: how many tokens, drawn how, stopped by what, reported how.

Users build `SamplingParams`; every room below reads it. Each field's rule is checked when it is built, decoded or
cloned, so that a SamplingParams in hand keeps them all. Knows no model: limits that depend on one are checked by
`verify_against_model`. Imports neither torch nor numpy.
"""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import msgspec

from quire.errors import InvalidRequestError, broken, require
from quire.structured_outputs import CONSTRAINTS
from quire.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from quire.utils.keywords import NamesUnknownKeywords
from quire.utils.values import decimal, items, number, plain, strings, token_ids

GREEDY_TEMPERATURE = 1e-5  # below this a request is greedy
MIN_TEMPERATURE = 1e-2  # the lowest that tokens are drawn at: below it, a request is as good as greedy
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 1e30  # and 1e-30 the least: as strong as any, and logits stay in the range of 32-bit floats
MAX_NUM_SEQUENCES = 16384

_ABOVE_0 = math.ulp(0.0)  # the least number there is
_INT_MAX = 2**63 - 1
_FLOAT_MAX = sys.float_info.max


class SamplingType(IntEnum):
    """How a request's tokens are chosen."""

    GREEDY = 0  # the most likely token
    RANDOM = 1  # drawn; the engine chooses the seed
    RANDOM_SEED = 2  # drawn; the user chose the seed


class RequestOutputKind(Enum):
    """What each RequestOutput of a request holds."""

    CUMULATIVE = 0  # all output so far
    DELTA = 1  # only what is new since the last one
    FINAL_ONLY = 2  # nothing until the request has finished


class _Range(NamedTuple):
    """A number's rule, beside its type: the lowest and the highest that are allowed."""

    low: float
    high: float

    def words(self, kind: type) -> str:
        """As for a user."""
        what, low = ("an integer", self.low) if kind is int else ("a number", 0 if self.low == _ABOVE_0 else self.low)
        if self.high in (_INT_MAX, _FLOAT_MAX):
            return f"{what} >= {low}" if kind is int else f"{what}, finite and > {low}"
        return f"{what} in {'[' if low == self.low else '('}{low}, {self.high}]"


_NO_DRAWS = "a beam search draws nothing, and ranks by the model's own log-probabilities"
# Why -> fields that are as they are by default (the temperature: 0) where use_beam_search is set.
_OF_BEAMS = {
    _NO_DRAWS: (
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias", "logits_processors"),
    ),
    "beams end by tokens, so use stop_token_ids": ("stop",),
    "send the prompt once more without, to have them": ("prompt_logprobs",),
}
# What is read of a model's generation_config.json, by its names there.
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


_Rule = tuple[type[int] | type[float], bool, _Range]  # of a number: its kind, whether None is allowed, its range


class _TakesGuided(NamesUnknownKeywords):
    """Takes the server's older names as well: guided_json=x is guided_decoding={"json": x}.

    A refusal names what the caller wrote, and not the field that it became.
    """

    def __call__(cls, *args, **kwargs):
        if given := {name: old for name in CONSTRAINTS if (old := kwargs.pop(f"guided_{name}", None)) is not None}:
            kwargs["guided_decoding"] = [given, other] if (other := kwargs.get("guided_decoding")) else given
        try:
            return super().__call__(*args, **kwargs)
        except InvalidRequestError as error:
            if kwargs.get("guided_decoding") is None or error.param != "structured_outputs":
                raise
            names = " and ".join(f"guided_{name}" for name in given) or "guided_decoding"
            prefix = "guided_" if given else "guided_decoding."
            message = str(error).replace("structured_outputs.", prefix).replace("structured_outputs", names)
            raise InvalidRequestError(message, names.partition(" ")[0]) from None


class SamplingParams(msgspec.Struct, metaclass=_TakesGuided, omit_defaults=True, repr_omit_defaults=True):
    """Parameters of one request. Fields, defaults and names are vLLM's.

    guided_json, guided_regex, guided_choice and guided_grammar are taken, too, for structured_outputs of that kind.
    Values are normalised on the way in: numpy scalars become Python's, ``stop="x"`` becomes ``["x"]``, None becomes
    ``[]`` for the three list fields, ``seed=-1`` becomes None, a greedy temperature (below 1e-5) becomes 0 and
    resets top_p, top_k and min_p, which it ignores; logit_bias and repetition_penalty are clamped.

    Raises:
        InvalidRequestError: (a ValueError) a field breaks its rule; names field, value and range.
        UnknownParameterError: (a ValueError and a TypeError) no such field; names the nearest.
    """

    n: Annotated[int, _Range(1, MAX_NUM_SEQUENCES)] = 1  # sequences returned
    # Sequences drawn, the n best by cumulative logprob are returned; >= n.
    best_of: Annotated[int | None, _Range(1, MAX_NUM_SEQUENCES)] = None
    presence_penalty: Annotated[float, _Range(-2, 2)] = 0.0  # taken once from the logit of every token in the output
    frequency_penalty: Annotated[float, _Range(-2, 2)] = 0.0  # taken per occurrence in the output
    # Divides (negative: multiplies) logits of tokens in prompt or output.
    repetition_penalty: Annotated[float, _Range(_ABOVE_0, _FLOAT_MAX)] = 1.0
    temperature: Annotated[float, _Range(0, 2)] = 1.0  # 0 is greedy
    top_p: Annotated[float, _Range(_ABOVE_0, 1)] = 1.0  # keep the fewest most likely tokens that have this mass
    top_k: Annotated[int, _Range(-1, _INT_MAX)] = 0  # keep the k most likely; 0 and -1: all
    min_p: Annotated[float, _Range(0, 1)] = 0.0  # keep tokens at least this likely relative to the most likely
    seed: Annotated[int | None, _Range(-(2**63), 2**64 - 1)] = None  # 64 bits, signed or unsigned
    stop: str | list[str] = []  # strings that end the text; a list once built
    stop_token_ids: list[int] = []  # tokens that end the sequence, besides end-of-sequence
    bad_words: list[str] = []  # never generated, with or without a leading space
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Annotated[int | None, _Range(1, _INT_MAX)] = 16  # output tokens at most; None: to the context's end
    min_tokens: Annotated[int, _Range(0, _INT_MAX)] = 0  # output tokens before end-of-sequence or a stop may come
    logprobs: Annotated[int | None, _Range(-1, _INT_MAX)] = None  # alternatives per output token; -1: the vocabulary
    prompt_logprobs: Annotated[int | None, _Range(-1, _INT_MAX)] = None  # likewise per prompt token
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, clamped to +-100
    allowed_token_ids: list[int] | None = None  # only these may be drawn
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Keep the prompt's last k tokens; -1: the context length.
    truncate_prompt_tokens: Annotated[int | None, _Range(-1, _INT_MAX)] = None
    # Called with (output_ids, logits) or (prompt_ids, output_ids, logits).
    logits_processors: list[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | None = None  # what the output must look like; a dict becomes one
    guided_decoding: GuidedDecodingParams | None = None  # vLLM's older name for it; None once built
    speculative: bool = True  # with drafts, where the engine makes any; not a field of vLLM's
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None  # data that a caller wants kept with them: nothing here reads it
    use_beam_search: bool = False  # keep the best_of (or n) likeliest beginnings, return the n best; temperature 0
    # Beams are ranked by cumulative logprob / output tokens ** length_penalty.
    length_penalty: Annotated[float, _Range(-10, 10)] = 1.0
    # When a beam search with best_of ended outputs ends: at once (True), when the beams at their present length are no
    # better (False), or when they can't get better ("never").
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        for field in ("logprobs", "prompt_logprobs"):  # vLLM's callers write True for one alternative
            if isinstance(getattr(self, field), bool):
                setattr(self, field, 1 if getattr(self, field) else None)
        for field, rule in _NUMBERS.items():
            if (given := getattr(self, field)) is not _DEFAULTS[field]:
                setattr(self, field, _checked(field, given, rule))
        for field in _BOOLS:
            if type(value := plain(getattr(self, field))) is not bool:
                raise broken(field, value, "True or False")
            setattr(self, field, value)
        self._check_lists()
        if self.logit_bias is not None:
            self.logit_bias = _logit_bias(self.logit_bias)
        if self.structured_outputs is not None or self.guided_decoding is not None:
            self._check_structure()
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind, "a RequestOutputKind")
        require(isinstance(self.extra_args, dict | None), "extra_args", self.extra_args, "a dict or None")
        self._check_beams()
        self._normalise()
        self._check_together()

    @property
    def sampling_type(self) -> SamplingType:
        """GREEDY, RANDOM or RANDOM_SEED."""
        if self.temperature < GREEDY_TEMPERATURE:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def clone(self) -> "SamplingParams":
        """A copy that shares no list with this one, all rules checked anew (fields may have been assigned since)."""
        return msgspec.structs.replace(self)

    @classmethod
    def from_generation_defaults(cls, defaults: Mapping[str, Any], **given: Any) -> "SamplingParams":
        """Parameters from a model's generation_config.json, overridden by the fields in `given`.

        Uses temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens (as max_tokens); None and all
        other keys are skipped.
        """
        fields = {key.replace("_new", ""): defaults[key] for key in GENERATION_KEYS if defaults.get(key) is not None}
        return cls(**{**fields, **given})

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """Parameters of which None is the default; but of max_tokens: it is the context's end, as ever."""
        return cls(**{name: given[name] for name in given if given[name] is not None or name == "max_tokens"})

    def verify_against_model(self, vocab_size: int, max_model_len: int, max_logprobs: int) -> None:
        """Check the rules that depend on the engine (`max_logprobs` -1 means no limit).

        Raises:
            InvalidRequestError: a token id outside the vocabulary, more logprobs than the engine gives, or a length
                beyond the context.
        """
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, field)
            num_wanted = vocab_size if wanted == -1 else wanted or 0
            if max_logprobs != -1 and num_wanted > max_logprobs:
                remedy = "ask for fewer, or raise the engine's max_logprobs"
                whole = f"-1 is the vocabulary, {vocab_size}"
                raise broken(field, wanted, f"at most max_logprobs = {max_logprobs} ({whole}); {remedy}")
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, field) or ():
                if token_id >= vocab_size:
                    raise broken(field, token_id, f"of token ids in [0, {vocab_size - 1}] (the vocabulary)")
        for field in ("truncate_prompt_tokens", "min_tokens"):
            if (length := getattr(self, field) or 0) > max_model_len:
                raise broken(field, length, f"at most the context length, {max_model_len}")

    def _check_lists(self) -> None:
        self.stop = strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.bad_words = strings("bad_words", self.bad_words)
        self.stop_token_ids = token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise broken("allowed_token_ids", [], "a non-empty list of token ids, or None for all tokens")
        if self.logits_processors is not None:
            self.logits_processors = processors = items("logits_processors", self.logits_processors, "callables")
            for processor in processors:
                require(callable(processor), "logits_processors", processor, "a list of callables")

    def _check_structure(self) -> None:
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise broken("guided_decoding", self.guided_decoding, "None where structured_outputs is given")
        field = "structured_outputs" if self.guided_decoding is None else "guided_decoding"
        given: Any = getattr(self, field)
        if isinstance(given, Mapping):
            given = StructuredOutputsParams(**given)
        if not isinstance(given, StructuredOutputsParams):
            raise broken(field, given, "StructuredOutputsParams, or a dict of its fields")
        fields = {name: getattr(given, name) for name in StructuredOutputsParams.__struct_fields__}
        self.structured_outputs, self.guided_decoding = StructuredOutputsParams(**fields), None

    def _check_beams(self) -> None:
        early, length = self.early_stopping, self.length_penalty
        require(early == "never" or type(early) is bool, "early_stopping", early, 'True, False or "never"')
        if not self.use_beam_search:
            for field, value, default in (("length_penalty", length, 1.0), ("early_stopping", early, False)):
                if value != default:
                    raise broken(field, value, f"{default} without use_beam_search; set that, or leave this out")
            return
        for reason, field in [(reason, field) for reason, fields in _OF_BEAMS.items() for field in fields]:
            value, default = getattr(self, field), 0.0 if field == "temperature" else _DEFAULTS[field]
            off = value == default or (field in ("top_k", "seed") and value == -1)
            off |= field in ("logit_bias", "logits_processors") and not value
            if not off and not (field == "temperature" and value < GREEDY_TEMPERATURE):
                raise broken(field, value, f"{default} with use_beam_search ({reason})")

    def _normalise(self) -> None:
        if self.seed == -1:
            self.seed = None
        most = MAX_REPETITION_PENALTY
        self.repetition_penalty = min(max(self.repetition_penalty, 1 / most), most)
        if self.temperature < GREEDY_TEMPERATURE:
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            raised = f"temperature {self.temperature} is raised to the lowest, {MIN_TEMPERATURE}"
            warnings.warn(f"{raised}; 0 is greedy sampling.", stacklevel=5)
            self.temperature = MIN_TEMPERATURE

    def _check_together(self) -> None:
        require(self.best_of is None or self.best_of >= self.n, "best_of", self.best_of, f"at least n = {self.n}")
        num_drawn = self.best_of or self.n
        if num_drawn > 1 and self.temperature == 0.0 and not self.use_beam_search:
            field = "n" if self.n > 1 else "best_of"
            why, remedy = "where every sequence would be the same", "raise temperature (or set use_beam_search)"
            raise broken(field, num_drawn, f"1 for greedy sampling (temperature 0), {why}; {remedy}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise broken("min_tokens", self.min_tokens, f"in [0, max_tokens = {self.max_tokens}]")
        if self.stop and not self.detokenize:
            raise broken("stop", self.stop, "empty when detokenize is False, as there is no text to find it in")


_FIELDS = msgspec.structs.fields(SamplingParams)
_NUMBERS: dict[str, _Rule] = {
    name: (float if hint.__origin__ is float else int, type(None) in get_args(hint.__origin__), hint.__metadata__[0])
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
_BOOLS = tuple(field.name for field in _FIELDS if field.type is bool)
_DEFAULTS = {field.name: [] if field.default is msgspec.NODEFAULT else field.default for field in _FIELDS}


class BeamSearchParams(msgspec.Struct, metaclass=NamesUnknownKeywords):
    """What `LLM.beam_search` is asked for. Fields, defaults and names are vLLM's, early_stopping is transformers'.

    Raises:
        InvalidRequestError: (a ValueError) a field breaks its rule; names field, value and range.
        UnknownParameterError: (a ValueError and a TypeError) no such field; names the nearest.
    """

    beam_width: int  # beams kept, and outputs returned
    max_tokens: int  # output tokens at most
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 is the only one there is
    length_penalty: float = 1.0  # as in SamplingParams
    include_stop_str_in_output: bool = False  # of an output's text: the token that ended it, too
    early_stopping: bool | str = False  # as in SamplingParams

    def __post_init__(self) -> None:
        self.beam_width = _checked("beam_width", self.beam_width, _NUMBERS["n"])
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same as parameters of a request."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "beam_width"}
        return SamplingParams(n=self.beam_width, use_beam_search=True, logprobs=0, **fields)


def _checked(field: str, given: Any, rule: _Rule) -> Any:
    kind, optional, allowed = rule
    if given is None and optional:
        return None
    if (value := number(given, kind)) is None or not allowed.low <= value <= allowed.high:  # both are false for NaN
        raise broken(field, given, allowed.words(kind) + (" or None" if optional else ""))
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    require(isinstance(value, Mapping), "logit_bias", value, "a dict of token id -> bias")
    biases: dict[int, float] = {}
    for key, given in value.items():
        token_id = decimal(key) if isinstance(key, str) else number(key, int)  # JSON's keys are texts
        if token_id is None or token_id < 0:
            raise broken("logit_bias", key, "keyed by token ids (integers >= 0)")
        if (bias := number(given, float)) is None or math.isnan(bias):
            raise broken("logit_bias", given, "of numbers (clamped to [-100, 100])")
        biases[token_id] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
    return biases
