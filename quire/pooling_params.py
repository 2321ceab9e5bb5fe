"""What a request for a vector asks for. Fields, defaults and names are vLLM's.

`LLM.embed`, `LLM.classify`, `LLM.score` and the server's routes of them read it; the engine gives the last token's
hidden state, or what a head for classes says of that, and knows nothing of this.
"""

import math

import msgspec

from quire.config.model import ModelConfig
from quire.errors import InvalidRequestError, RequestFailedError, require
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.utils.keywords import NamesUnknownKeywords


class PoolingParams(msgspec.Struct, metaclass=NamesUnknownKeywords):
    """How a text becomes a vector: the hidden state of its last token, cut, and brought to length 1.

    Of models with a head for classes: how it becomes their probabilities.

    Raises:
        InvalidRequestError: a field breaks its rule.
    """

    truncate_prompt_tokens: int | None = None  # keep the last k tokens; -1: what the context holds
    dimensions: int | None = None  # keep the first k numbers: of models that were trained for it (Matryoshka)
    normalize: bool | None = None  # to length 1, by default
    use_activation: bool | None = None  # vLLM's newer name of the same
    task: str | None = None  # "embed", or with a head for classes "classify"; that which the model can

    def __post_init__(self) -> None:
        for name in ("normalize", "use_activation"):
            require(isinstance(getattr(self, name), bool | None), name, getattr(self, name), "True, False or None")
        fits = self.dimensions is None or (type(self.dimensions) is int and self.dimensions > 0)
        require(fits, "dimensions", self.dimensions, "an integer of at least 1, or None")

    def sampling_params(self, model: ModelConfig) -> SamplingParams:
        """What a prompt is prepared with; InvalidRequestError where the model has none of that."""
        does = "classify" if model.num_labels else "embed"
        if self.task not in (None, does):
            raise InvalidRequestError(f"task={self.task!r} is not supported: this model can {does} texts.", "task")
        size = 0 if model.num_labels else model.hidden_size
        if (self.dimensions or 0) > size:
            message = f"dimensions = {self.dimensions} is more than this model's vectors have, {size}."
            raise InvalidRequestError(message, "dimensions")
        truncate = self.truncate_prompt_tokens
        return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, truncate_prompt_tokens=truncate)

    def numbers(self, output: RequestOutput, model: ModelConfig) -> list[float]:
        """What a request that pools has brought: a vector, or probabilities of classes; RequestFailedError for NaNs."""
        assert output.pooled is not None, "it was aborted, or asked for tokens"
        kept = output.pooled[: self.dimensions]
        length = math.hypot(*kept) or 1.0
        if not math.isfinite(length):
            raise RequestFailedError("the model's hidden state is not finite.")
        problem = model.hf_config.get("problem_type") if model.num_labels else None
        if self.normalize is False or self.use_activation is False or problem == "regression":
            return kept
        if not model.num_labels:
            return [value / length for value in kept]
        if model.num_labels == 1 or problem == "multi_label_classification":
            return [0.5 + 0.5 * math.tanh(0.5 * value) for value in kept]  # the sigmoid, which overflows nowhere
        weights = [math.exp(value - max(kept)) for value in kept]
        return [weight / sum(weights) for weight in weights]
