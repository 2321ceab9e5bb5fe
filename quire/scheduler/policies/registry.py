"""Scheduling policies by name. A new policy is one module like `fcfs` and one line here."""

from quire.errors import ConfigError
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.fcfs import FirstComeFirstServed
from quire.scheduler.policies.priority import Priority

POLICIES: dict[str, type[Policy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}


def make_policy(name: str) -> Policy:
    """A policy of this name (ConfigError where there is none)."""
    if name not in POLICIES:
        known = ", ".join(map(repr, POLICIES))
        raise ConfigError(f"scheduling policy must be one of {known}, got {name!r}.")
    return POLICIES[name]()
