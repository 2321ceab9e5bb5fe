"""What a request for a vector asks for. Fields, defaults and names are vLLM's.

`LLM.embed` and the server's routes of embeddings read it; the engine gives the last token's hidden state, and knows
nothing of this.
"""

import math

import msgspec

from quire.errors import InvalidRequestError, NotYetSupportedError, RequestFailedError, require
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.utils.keywords import NamesUnknownKeywords


class PoolingParams(msgspec.Struct, metaclass=NamesUnknownKeywords):
    """How a text becomes a vector: the hidden state of its last token, cut, and brought to length 1.

    Raises:
        InvalidRequestError: a field breaks its rule.
        NotYetSupportedError: another task than to embed.
    """

    truncate_prompt_tokens: int | None = None  # keep the last k tokens; -1: what the context holds
    dimensions: int | None = None  # keep the first k numbers: of models that were trained for it (Matryoshka)
    normalize: bool | None = None  # to length 1, by default
    use_activation: bool | None = None  # vLLM's newer name of the same
    task: str | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, "embed"):
            raise NotYetSupportedError(f"task={self.task!r} is not supported: models here generate and embed.")
        for name in ("normalize", "use_activation"):
            require(isinstance(getattr(self, name), bool | None), name, getattr(self, name), "True, False or None")
        fits = self.dimensions is None or (type(self.dimensions) is int and self.dimensions > 0)
        require(fits, "dimensions", self.dimensions, "an integer of at least 1, or None")

    def clone(self) -> "PoolingParams":
        """A copy."""
        return msgspec.structs.replace(self)

    def sampling_params(self, hidden_size: int) -> SamplingParams:
        """What a prompt is prepared with; InvalidRequestError where vectors of `hidden_size` are too short."""
        if (self.dimensions or 1) > hidden_size:
            message = f"dimensions = {self.dimensions} is more than this model's vectors have, {hidden_size}."
            raise InvalidRequestError(message, "dimensions")
        truncate = self.truncate_prompt_tokens
        return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, truncate_prompt_tokens=truncate)

    def vector(self, output: RequestOutput) -> list[float]:
        """What a request that pools has brought; RequestFailedError where that is no number."""
        assert output.pooled is not None, "it was aborted, or asked for tokens"
        kept = output.pooled[: self.dimensions]
        length = math.hypot(*kept) or 1.0
        if not math.isfinite(length):
            raise RequestFailedError("the model's hidden state is not finite.")
        if self.normalize is False or self.use_activation is False:
            return kept
        return [value / length for value in kept]
