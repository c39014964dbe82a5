"""Schedule: who of the waiting is considered next, and when requests join the batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from paxkv.policies.checks import is_number, refuse, with_fix
from paxkv.policies.view import QueuedRequest, QueueHead, RequestView
from paxkv.workload.checks import number_problem


class SchedulePolicy(Protocol):
    """Orders the waiting requests, and says when they may join; pure.

    Each tenant has its own queue, sorted by `key`; `choose` picks among the heads of the queues.
    """

    @property
    def may_displace(self) -> bool:
        """Whether `displaces` is ever true: else it is not asked."""
        ...

    def key(self, request: QueuedRequest) -> tuple[float, ...]:
        """Return the sort key: the smallest is considered first; ties go by submission."""
        ...

    def choose(self, heads: Sequence[QueueHead]) -> int:
        """Return the index of the head to consider next; there is at least one."""
        ...

    def joins(self, num_running: int) -> bool:
        """Return whether waiting requests may join this step.

        Args:
            num_running: Requests that hold a row as the step begins.
        """
        ...

    def charge(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return the service tokens that a tenant is charged for tokens computed for it."""
        ...

    def displaces(self, waiting: QueuedRequest, running: RequestView) -> bool:
        """Return whether the running request must make way for the waiting one."""
        ...


class Order(NamedTuple):
    """An order of the waiting requests.

    Attributes:
        level: What a request is sorted by; ties go by arrival.
        ageing_s: Seconds of waiting that are worth one of `level`, unless the configuration says;
            None where waiting already decides, so that nothing can starve.
        by_service: Whether the tenant that was served least comes first.
        displaces: Whether a waiting request may displace a running one at all.
    """

    level: Callable[[QueuedRequest], float]
    ageing_s: float | None = None
    by_service: bool = False
    displaces: bool = False


ORDERS: dict[str, Order] = {
    "fcfs": Order(lambda request: 0.0),
    "priority": Order(lambda request: request.priority, ageing_s=60.0, displaces=True),
    "sjf": Order(lambda request: request.prompt_len + request.max_tokens, ageing_s=0.02),
    "vtc": Order(lambda request: 0.0, by_service=True),
}


@dataclass(frozen=True, kw_only=True)
class _Ordered:
    """The order of the waiting requests, whatever the way they join.

    Attributes:
        policy: The order, by name.
        ageing_s: Seconds of waiting worth one level of priority, or one token of `sjf`; None takes
            60 s a level, 0.02 s a token; infinity never.
        input_weight: Service tokens a prompt token is charged under `vtc`.
        output_weight: Service tokens an output token is charged under `vtc`.
    """

    policy: str = "fcfs"
    ageing_s: float | None = None
    input_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> list[str]:
        if self.policy not in ORDERS:
            return [
                f"schedule.policy={self.policy}: not an order of the waiting queue. "
                f"Choose one of {', '.join(ORDERS)}."
            ]
        return [*self._ageing_problems(), *self._weight_problems()]

    def _ageing_problems(self) -> list[str]:
        if self.ageing_s is None:
            return []
        key = f"schedule.ageing_s={self.ageing_s}"
        if not is_number(self.ageing_s) or not self.ageing_s > 0:  # also refuses NaN
            return [f"{key}: must be seconds > 0, or inf for none. Try schedule.ageing_s=null."]
        if self._order.ageing_s is None:
            ages = " or ".join(name for name, order in ORDERS.items() if order.ageing_s)
            return [
                f"{key}: schedule.policy={self.policy} lets nothing starve, so nothing ages. "
                f"Try schedule.ageing_s=null, or schedule.policy={ages}."
            ]
        return []

    def _weight_problems(self) -> list[str]:
        default = {field.name: field.default for field in fields(self)}
        problems = []
        for name in ("input_weight", "output_weight"):
            key, value = f"schedule.{name}", getattr(self, name)
            if wrong := number_problem(key, value):
                problems += with_fix(wrong, f"{key}={default[name]}")
            elif value != default[name] and not self._order.by_service:
                problems.append(
                    f"{key}={value}: weighs the service of tenants, which schedule.policy="
                    f"{self.policy} does not look at. Try {key}={default[name]}, or "
                    "schedule.policy=vtc."
                )
        if self.input_weight == 0 and self.output_weight == 0:
            problems.append(
                "schedule.input_weight=0: with schedule.output_weight=0 no service is charged, so "
                "vtc could not tell tenants apart. Try schedule.output_weight=2.0."
            )
        return problems

    @property
    def _order(self) -> Order:
        return ORDERS[self.policy]

    def key(self, request: QueuedRequest) -> tuple[float, ...]:
        """Return the sort key of a waiting request within its tenant's queue."""
        return self._key(self._order.level(request), request.arrival_s)

    def _key(self, level: float, arrival_s: float) -> tuple[float, ...]:
        # Ageing is linear, so that two waiting requests never change places: what both gain by
        # waiting is equal, and the key can stay as it is.
        ageing_s = self._order.ageing_s if self.ageing_s is None else self.ageing_s
        return (level + arrival_s / (math.inf if ageing_s is None else ageing_s), arrival_s)

    def choose(self, heads: Sequence[QueueHead]) -> int:
        """Return the head with the smallest key, under `vtc` of the tenant served least."""

        def rank(index: int) -> tuple[float, ...]:
            head = heads[index]
            return (head.service_tokens, *head.key) if self._order.by_service else head.key

        return min(range(len(heads)), key=rank)

    def charge(self, prompt_tokens: int, output_tokens: int) -> float:
        """Return `input_weight` and `output_weight` times the tokens."""
        return self.input_weight * prompt_tokens + self.output_weight * output_tokens


@dataclass(frozen=True, kw_only=True)
class Continuous(_Ordered):
    """Continuous batching: a request joins the batch in the step in which it is admitted.

    A preempted request returns to the queue under its old key, ahead of later arrivals.

    Priority orders the waiting queue (`policy=priority`), and `victim=priority` heeds it when
    memory is short. An arrival displaces a running request only with `preempt_to_admit`: one of a
    strictly less urgent class, and only if ageing has not brought that one ahead of the arrival.
    Equals never displace each other.

    Source: Orca (OSDI 2022), iteration-level scheduling. `vtc` is the virtual token counter of
    Sheng et al. (OSDI 2024, arXiv 2401.00588), with weighted tenants.

    Assumes: `sjf`: requests use most of their output limit. `vtc`: charges reflect the work.
    Cost: O(log waiting) a request, O(tenants) a choice.

    Attributes:
        policy: `fcfs` (arrival), `priority` (lower value first), `sjf` (fewest prompt and output
            tokens first) or `vtc` (the tenant with the least service for its weight first).
        ageing_s: Seconds of waiting worth one level of `priority`, or one token of `sjf`, so that
            nothing starves; None takes 60 s a level, 0.02 s a token; infinity never.
        input_weight: Service tokens a prompt token is charged under `vtc`.
        output_weight: Service tokens an output token is charged under `vtc`.
        preempt_to_admit: Whether running requests make way for more urgent arrivals.
    """

    preempt_to_admit: bool = False

    def _problems(self) -> list[str]:
        problems = super()._problems()
        key = f"schedule.preempt_to_admit={self.preempt_to_admit}"
        if not isinstance(self.preempt_to_admit, bool):
            problems.append(f"{key}: must be true or false. Try schedule.preempt_to_admit=false.")
        elif self.preempt_to_admit and self.policy in ORDERS and not self._order.displaces:
            problems.append(
                f"{key}: schedule.policy={self.policy} knows no more urgent class. "
                "Try schedule.policy=priority, or schedule.preempt_to_admit=false."
            )
        return problems

    @property
    def may_displace(self) -> bool:
        """`preempt_to_admit`."""
        return self.preempt_to_admit

    def joins(self, num_running: int) -> bool:
        """Return True: rows that come free are filled at once."""
        del num_running
        return True

    def displaces(self, waiting: QueuedRequest, running: RequestView) -> bool:
        """Return whether the waiting one is more urgent, and ahead in the queue if both waited."""
        return (
            self.preempt_to_admit
            and waiting.priority < running.priority
            and self.key(waiting) < self._key(running.priority, running.arrival_s)
        )


@dataclass(frozen=True, kw_only=True)
class Static(_Ordered):
    """Static batching: a batch runs until its last request ends, and then the next one starts.

    A request that was preempted waits for the next batch too.

    Source: request-level scheduling, the baseline of Orca (OSDI 2022); here ended requests leave
    their blocks at once and are not padded, so only the idle rows are lost.

    Assumes: requests of a batch are about equally long.
    Cost: rows stay idle until the longest request of the batch has ended.

    Attributes:
        policy: Who goes into the next batch first, as in `Continuous`.
        ageing_s: As in `Continuous`.
        input_weight: Service tokens a prompt token is charged under `vtc`.
        output_weight: Service tokens an output token is charged under `vtc`.
    """

    @property
    def may_displace(self) -> bool:
        """False: a batch runs to its end."""
        return False

    def joins(self, num_running: int) -> bool:
        """Return whether the last batch has ended."""
        return num_running == 0

    def displaces(self, waiting: QueuedRequest, running: RequestView) -> bool:
        """Return False: a batch runs to its end."""
        del waiting, running
        return False
