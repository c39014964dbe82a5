"""Schedule: the order in which waiting requests are considered; batches are continuous."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paxkv.errors import ConfigError
from paxkv.workload.request import Request

# A key ends in the order of submission, so that no two requests compare equal.
ORDERS: dict[str, Callable[[Request], tuple[float, ...]]] = {
    "fcfs": lambda request: (request.arrival_s,),
    "priority": lambda request: (request.priority, request.arrival_s),
}


class SchedulePolicy(Protocol):
    """Orders the waiting queue; pure."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key: the smallest is considered first; ties go by submission."""
        ...


@dataclass(frozen=True, kw_only=True)
class Continuous:
    """Continuous batching: a request joins the batch in the step in which it is admitted.

    A preempted request returns to the queue under its old key, ahead of later arrivals. Priority
    orders the waiting queue only: an arrival never displaces a running request.

    Source: Orca (OSDI 2022), iteration-level scheduling.

    Attributes:
        policy: `fcfs` (arrival) or `priority` (lower value first, then arrival).
    """

    policy: str = "fcfs"

    def __post_init__(self):
        if self.policy not in ORDERS:
            raise ConfigError(
                f"schedule.policy={self.policy}: not an order of the waiting queue. "
                f"Choose one of {', '.join(ORDERS)}."
            )

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key of a waiting request."""
        return ORDERS[self.policy](request)
