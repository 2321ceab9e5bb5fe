"""Scheduling policies by name. A new policy is one module like `priority` and one line here."""

from quire.config.scheduler import PolicyOptions
from quire.errors import ConfigError
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.deadline import EarliestDeadline
from quire.scheduler.policies.fair import FairShare
from quire.scheduler.policies.priority import Priority
from quire.scheduler.policies.shortest import ShortestFirst

POLICIES: dict[str, type[Policy]] = {
    "fcfs": Policy,
    "priority": Priority,
    "fair": FairShare,
    "shortest": ShortestFirst,
    "deadline": EarliestDeadline,
}


def make_policy(name: str, options: PolicyOptions) -> Policy:
    """A policy of this name (ConfigError where there is none)."""
    if name not in POLICIES:
        known = ", ".join(map(repr, POLICIES))
        raise ConfigError(f"scheduling policy must be one of {known}, got {name!r}.")
    return POLICIES[name](options)
