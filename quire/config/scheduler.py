"""Configuration of the scheduler: the limits of a step and the order in which requests get their turn.

Resolved by the engine from its arguments, read by `quire.scheduler`. It holds numbers and names only.
"""

from dataclasses import dataclass

from quire.config.options import check_number
from quire.errors import ConfigError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of the scheduler.

    Attributes:
        max_model_len: longest prompt plus output of a sequence, in tokens.
        max_num_batched_tokens: most tokens computed in one step.
        max_num_seqs: most sequences that run at once. As every running sequence may need one token a step, the
            scheduler runs no more than max_num_batched_tokens of them.
        policy: the name of one of `quire.scheduler.policies.registry.POLICIES` (checked there).
        enable_chunked_prefill: cut long prompts in chunks that ride along with decoding. Off: a step is either prefill
            (whole prompts, first) or decode.
        long_prefill_token_threshold: most tokens of one sequence in one step, so that prompts share it; 0: no limit.

    Raises:
        ConfigError: a number is out of range, or two contradict each other.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0

    def __post_init__(self) -> None:
        minima = {
            "max_model_len": 1,
            "max_num_batched_tokens": 1,
            "max_num_seqs": 1,
            "long_prefill_token_threshold": 0,
        }
        for name, minimum in minima.items():
            check_number(name, getattr(self, name), int, minimum)
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
