"""Speculative decoding's options: what `speculative_config` may say, checked by name.

`EngineArgs` reads it, workers and schedulers get it as it is. It holds numbers and names; what they mean is for
`quire.speculative` to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from quire.config.draft_tree import DraftTree
from quire.config.model import ModelConfig
from quire.config.options import check_options, option, read_options
from quire.errors import ConfigError

MAX_DRAFTS = 32  # of one sequence in one step
OPTION = "speculative_config"

HEAD_METHODS = ("medusa",)  # those whose `model` is heads that were trained for the model
EAGLE_METHODS = ("eagle", "eagle3")  # likewise, with layers of their own
CACHED_METHODS = ("draft_model", *EAGLE_METHODS)  # what drafts has keys and values in the KV cache
_WITH_MODEL = ("draft_model", *HEAD_METHODS, *EAGLE_METHODS)
# An option, some of its values, and other options that are of use only where it has one of them.
_OF_OTHERS = (
    ("method", _WITH_MODEL, ("model", "revision", "draft_tensor_parallel_size", "quantization", "num_threads")),
    ("method", ("ngram",), ("prompt_lookup_min", "prompt_lookup_max")),
    ("method", ("suffix",), ("suffix_decoding_max_spec_factor", "suffix_decoding_max_cached_requests")),
    ("method", (*HEAD_METHODS, *EAGLE_METHODS), ("speculative_token_tree",)),
    ("acceptance", ("typical",), ("posterior_threshold", "posterior_alpha")),
)
# Under the acceptance 'typical' what is drafted makes a difference, and so has to follow from the request alone.
# Option -> what answers would depend on.
_NOT_TYPICAL = {
    "speculative_token_tree": "how much of the tree there is room for",
    "adaptive": "what steps cost",
    "disable_by_batch_size": "who else is there",
    "suffix_decoding_max_cached_requests": "who else was there",
}
_LOOKUPS = ("ngram", "[ngram]")  # as vLLM takes them for a model


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted ahead of the model; names are vLLM's where it has them.

    Raises:
        ConfigError: a value is out of its range, or of no use to the method.
    """

    method: Literal["ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3"] = option("ngram")
    """'ngram' copies what followed the same tokens earlier in prompt or output, 'suffix' what followed the longest such
    tokens, in past outputs too where asked, 'draft_model' asks a smaller model, 'medusa' heads that were trained for
    the model, 'eagle' and 'eagle3' a layer that goes on from its hidden states. Left out: what suits the files of
    `model`."""
    model: str | None = option(None)
    """The draft model, of the same vocabulary, or the heads, trained for the model: a directory, a hub id, or
    'demo-draft', 'demo-medusa', 'demo-eagle', 'demo-eagle3'."""
    draft_tensor_parallel_size: int = option(1, 1, 1)
    """As vLLM has it; 1 is all there is."""
    revision: str | None = option(None)
    """Branch, tag or commit of the draft model or heads on the hub."""
    quantization: Literal["int8", "int4"] | None = option(None)
    """The draft model's or heads' weights, as the option of the model."""
    num_threads: int | None = option(None, 1, 256)
    """Threads that compute the draft model or heads, where not as many as the model's."""
    num_speculative_tokens: int = option(4, 1, MAX_DRAFTS)
    """Most drafts of a sequence in one step."""
    speculative_token_tree: str | None = option(None)
    """Heads draft a tree: its nodes by their choices, the best one 0, as '[(0,), (1,), (0, 0)]'."""
    acceptance: Literal["exact", "rejection", "typical"] = option("exact")
    """'exact' takes a draft when the sampler draws it: tokens are those of a run without drafts. 'rejection' takes it
    with min(1, p/q), which keeps the model's distribution; 'typical' when it is likely enough, as in Medusa. Greedy
    requests are exact under all of them."""
    posterior_threshold: float | None = option(None, most=1, over=0)
    """Of 'typical': a draft of this probability is always taken (default 0.09)."""
    posterior_alpha: float | None = option(None, most=1, over=0)
    """Of 'typical': so is one of this times exp(-entropy) (default the square root of the threshold)."""
    adaptive: bool = option(True)
    """Draft as much as pays, by what was accepted and what steps cost; else, and with the acceptance 'typical', always
    num_speculative_tokens."""
    prompt_lookup_min: int | None = option(None, 1, 32)
    """Fewest tokens that must agree."""
    prompt_lookup_max: int | None = option(None, 1, 32)
    """Most tokens that are compared."""
    suffix_decoding_max_spec_factor: float = option(1.0, most=100, over=0)
    """Drafts per token that agrees."""
    suffix_decoding_max_cached_requests: int = option(0, 0, 1_000_000)
    """Past outputs that are searched, too; the oldest go first."""
    disable_by_batch_size: int | None = option(None, 1)
    """No drafts in steps of so many sequences or more."""
    disable_logprobs: bool = option(False)
    """Refuse requests that ask for logprobs and don't say speculative=False."""

    def __post_init__(self) -> None:
        check_options(self)
        least, most = self.lookup_min, self.lookup_max
        if least > most:
            raise ConfigError(f"prompt_lookup_min={least} is above prompt_lookup_max={most}; swap them.")
        if self.acceptance == "typical" and self.method in EAGLE_METHODS:
            raise ConfigError(
                f"the acceptance 'typical' is refused with the method {self.method!r}, whose drafts depend on what is "
                "cached; take 'exact' or 'rejection', or draft by 'medusa' or 'draft_model'."
            )
        _ = self.tree  # refuses what is none

    def check_stages(self, num_stages: int) -> None:
        """Refuse what a pipeline's last stage can't draft, or verify, by itself (ConfigError)."""
        for name, given, why in (
            (f"method={self.method!r}", self.method in EAGLE_METHODS, "its head reads what other stages have"),
            ("speculative_token_tree", self.tree, "other stages would have to move the accepted path"),
            ("acceptance='typical'", self.acceptance == "typical", "other stages can't keep unjudged drafts"),
        ):
            if given:
                raise ConfigError(
                    f"{OPTION}: {name} is refused with pipeline_parallel_size={num_stages}, as {why}; draft chains by "
                    "'ngram', 'suffix', 'draft_model' or 'medusa', accepted as 'exact' or by 'rejection'."
                )

    @cached_property
    def tree(self) -> DraftTree | None:
        """The shape of the drafts, where they are no chain."""
        return None if self.speculative_token_tree is None else DraftTree.read(self.speculative_token_tree)

    @property
    def max_drafts(self) -> int:
        """Most drafts of a sequence in one step."""
        return self.num_speculative_tokens if self.tree is None else len(self.tree)

    @property
    def threshold(self) -> float | None:
        """The probability that is enough for any draft; None unless acceptance is typical."""
        return (self.posterior_threshold or 0.09) if self.acceptance == "typical" else None

    @property
    def alpha(self) -> float:
        """What is multiplied with exp(-entropy), where acceptance is typical."""
        return (self.threshold or 0.0) ** 0.5 if self.posterior_alpha is None else self.posterior_alpha

    @property
    def lookup_min(self) -> int:
        """Fewest tokens that n-grams have: 2, or fewer where that is asked of the longest."""
        return min(2, self.lookup_max) if self.prompt_lookup_min is None else self.prompt_lookup_min

    @property
    def lookup_max(self) -> int:
        """Most tokens that n-grams have: 4, or more where that is asked of the shortest."""
        return max(4, self.prompt_lookup_min or 0) if self.prompt_lookup_max is None else self.prompt_lookup_max

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "SpeculativeConfig":
        """The options of an object of JSON.

        Where no method is named and `model` is, the options are held against the method 'medusa', which takes all that
        any of those with a model take: which it is, the model's files say.

        Raises:
            ConfigError: an unknown name, or a bad value; the message begins with the option that it came by.
        """
        if given.get("method") is None:
            if not (model := given.get("model")):
                raise ConfigError(f"{OPTION} needs 'method', as in {{'method': 'ngram'}}, or 'model'.")
            method = "ngram" if model in _LOOKUPS else "medusa"
            given = {**given, "method": method, "model": None if method == "ngram" else model}
        config = read_options(cls, given, OPTION)
        for other, values, names in _OF_OTHERS:
            name = next((name for name in names if given.get(name) is not None), None)
            if name is not None and (value := getattr(config, other)) not in values:
                for_them = f"{other}{'s' if len(values) > 1 else ''} {', '.join(map(repr, values))}"
                raise ConfigError(f"{OPTION}: {name} is for the {for_them}, not {value!r}; leave it out.")
        for name, cause in _NOT_TYPICAL.items():
            if config.acceptance == "typical" and (value := given.get(name)):
                raise ConfigError(
                    f"{OPTION}: {name}={value!r} is refused with the acceptance 'typical', as answers would depend on "
                    f"{cause}; leave it out."
                )
        if given.get("num_speculative_tokens", config.max_drafts) != config.max_drafts:
            raise ConfigError(
                f"{OPTION}: num_speculative_tokens={config.num_speculative_tokens} are not the {config.max_drafts} "
                "nodes of speculative_token_tree; leave it out."
            )
        if config.method in _WITH_MODEL and not config.model:
            raise ConfigError(f"{OPTION}: the method {config.method!r} needs 'model', the name of what drafts.")
        return config


def check_draft_model(draft: ModelConfig, model: ModelConfig) -> None:
    """Refuse a draft model that can't draft for the model (ConfigError)."""
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{OPTION}: the draft model {draft.model!r} has a vocabulary of {draft.vocab_size} tokens, and the model "
            f"{model.model!r} one of {model.vocab_size}; they must have the same tokenizer."
        )
    if draft.max_model_len < model.max_model_len:
        raise ConfigError(
            f"{OPTION}: the draft model {draft.model!r} has a context of {draft.max_model_len} tokens, shorter than "
            f"max_model_len={model.max_model_len}; lower that."
        )
    windows = [window for window in draft.layer_windows if window is not None and window < model.max_model_len]
    if windows:
        # It reads a sequence when that pays, maybe long after the model: what windows left behind has no blocks then.
        raise ConfigError(
            f"{OPTION}: the draft model {draft.model!r} has a sliding window of {min(windows)} tokens; only windows of "
            f"max_model_len={model.max_model_len} or more can draft. Lower that, or use one without windows."
        )
