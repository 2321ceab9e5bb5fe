"""Scheduling policies by name. A new policy is one module like `priority` and one line here."""

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
