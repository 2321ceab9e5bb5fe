"""Configuration of the scheduler: the limits of a step and the order in which requests get their turn.

Resolved by the engine from its arguments, read by `quire.scheduler`. It holds numbers and names only.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from quire.config.draft_tree import DraftTree
from quire.config.options import check_number, check_options, option
from quire.errors import ConfigError

PolicyName = Literal["fcfs", "priority", "fair", "shortest", "deadline"]


@dataclass(frozen=True)
class PolicyOptions:
    """What policies can be told, each by its own options; `quire.config.engine_args.EngineArgs` has the same ones.

    Raises:
        ConfigError: a number is out of its range.
    """

    fair_input_weight: float = option(1.0, 0, policy="fair")
    """Policy 'fair': what a prompt token counts that has to be computed."""
    fair_output_weight: float = option(2.0, over=0, policy="fair")
    """Policy 'fair': what an output token counts."""
    ageing_rate: float = option(100.0, over=0, policy="shortest")
    """Policy 'shortest': tokens that a request seems shorter by for each second that it has waited."""
    ttft_target: float | None = option(None, over=0, policy="deadline")
    """Policy 'deadline': seconds in which the first token is to come, for requests that don't say."""
    tpot_target: float | None = option(None, over=0, policy="deadline")
    """Policy 'deadline': most seconds between tokens, for requests that don't say."""

    def __post_init__(self) -> None:
        check_options(self)

    def of(self, policy: str) -> dict[str, Any]:
        """Those that a policy reads."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.metadata["policy"] == policy}


POLICY_OPTIONS = tuple(field.name for field in fields(PolicyOptions))
# Each policy's options, by the policy's name.
OPTIONS_OF = {policy: tuple(PolicyOptions().of(policy)) for policy in get_args(PolicyName)}


def check_policy_options(policy: str, options: PolicyOptions) -> None:
    """Refuse a policy that there is not, and an option that another policy reads (ConfigError)."""
    if policy not in tuple(OPTIONS_OF):
        raise ConfigError(f"policy must be one of {', '.join(map(repr, OPTIONS_OF))}, got {str(policy)[:80]!r}.")
    for field in fields(options):
        owner = field.metadata["policy"]
        if getattr(options, field.name) != field.default and owner != policy:
            raise ConfigError(
                f"{field.name}={getattr(options, field.name)!r} is for the policy {owner!r}, and the policy is "
                f"{policy!r}; leave it out, or choose that one."
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of the scheduler.

    Attributes:
        max_model_len: longest prompt plus output of a sequence, in tokens.
        max_num_batched_tokens: most tokens computed in one step.
        max_num_seqs: most sequences that run at once. As every running sequence may need one token a step, the
            scheduler runs no more than max_num_batched_tokens of them.
        policy: the name of one of `quire.scheduler.policies.registry.POLICIES`.
        policy_options: what the policy is told.
        enable_chunked_prefill: cut long prompts in chunks that ride along with decoding. Off: a step is either prefill
            (whole prompts, first) or decode.
        long_prefill_token_threshold: most tokens of one sequence in one step, so that prompts share it; 0: no limit.
        max_num_drafts: most draft tokens of a sequence in one step, where workers draft any.
        draft_tree: their shape, where they are no chain.
        num_stages: of the workers' pipeline: as many plans are in flight, each with its share of what runs.
        drafts_forced: tokens that a grammar forces are drafts, too, beside those of workers.

    Raises:
        ConfigError: a number is out of range, or two contradict each other.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    policy: str = "fcfs"
    policy_options: PolicyOptions = PolicyOptions()
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_drafts: int = 0
    draft_tree: DraftTree | None = None
    num_stages: int = 1
    drafts_forced: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:  # those that are 0 by default may be 0
                check_number(field.name, getattr(self, field.name), int, 0 if field.default == 0 else 1)
        check_policy_options(self.policy, self.policy_options)
        if self.enable_chunked_prefill:
            return
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_model_len={self.max_model_len}: "
                "without chunked prefill, a step must hold a whole prompt. Raise max_num_batched_tokens, lower "
                "max_model_len, or set enable_chunked_prefill=True."
            )
        if self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts in chunks, which "
                "enable_chunked_prefill=False forbids. Set one of the two to its default (0; True)."
            )
