"""Which limits may be changed while the engine runs, and to what.

The scheduler asks before it keeps to other limits, and the front end how they began. It changes nothing itself.
"""

from dataclasses import replace
from typing import Any

from quire.config.scheduler import OPTIONS_OF, POLICY_OPTIONS, PolicyOptions, SchedulerConfig
from quire.errors import ConfigError, InvalidRequestError
from quire.protocol.stats import Limits
from quire.utils.suggest import hint

_COUNTS = ("max_num_seqs", "max_num_batched_tokens")
_LIMITS = (*_COUNTS, "policy", *POLICY_OPTIONS)


def limits_of(config: SchedulerConfig, most: SchedulerConfig) -> Limits:
    """The limits of a scheduler that began with those of `most`."""
    options, reserved = config.policy_options.of(config.policy), (most.max_num_seqs, most.max_num_batched_tokens)
    return Limits(config.max_num_seqs, config.max_num_batched_tokens, config.policy, options, *reserved)


def changed(config: SchedulerConfig, most: SchedulerConfig, changes: dict[str, Any]) -> SchedulerConfig:
    """The configuration with other limits. Another policy begins with its own options' defaults.

    Args:
        most: that of the start, for which memory and rows were reserved.
        changes: limit -> value.

    Raises:
        InvalidRequestError: no such limit, a value of the wrong kind or out of its range.
    """
    for name in changes:
        if name not in _LIMITS:
            remedy = hint(name, _LIMITS, f"There are {', '.join(_LIMITS)}.")
            raise InvalidRequestError(f"unknown limit {name[:80]!r}. {remedy}", name[:80])
    policy = changes.get("policy", config.policy)
    options = config.policy_options.of(policy) if policy == config.policy else {}
    for name in changes:
        if name in POLICY_OPTIONS and name not in OPTIONS_OF.get(str(policy), POLICY_OPTIONS):
            raise InvalidRequestError(f"{name} is of no use to the policy {policy!r}; leave it out.", name)
    options |= {name: value for name, value in changes.items() if name in POLICY_OPTIONS}
    counts = {name: changes[name] for name in _COUNTS if name in changes}
    try:
        found = replace(config, policy=policy, policy_options=PolicyOptions(**options), **counts)
    except ConfigError as error:
        blamed = next((name for name in changes if str(error).startswith(name)), None)
        raise InvalidRequestError(str(error), blamed) from None
    for name, value in counts.items():
        if value > (limit := getattr(most, name)):
            raise InvalidRequestError(
                f"{name}={value} is above {limit}, for which memory was reserved at the start; start with a higher "
                f"{name}.",
                name,
            )
    return found
