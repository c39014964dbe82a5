"""Serve requests on the real engine in virtual time, and sum up what happened."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from paxkv.engine.clock import VirtualClock
from paxkv.engine.engine import Engine
from paxkv.engine.state import SchedulerConfig, SchedulerState, init_state
from paxkv.engine.step import Executor
from paxkv.metrics.records import RequestRecord, StepRecord
from paxkv.metrics.stats import weighted_mean
from paxkv.metrics.summary import summarize
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.request import Request


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a run left.

    Attributes:
        summary: Of the whole run, as in `summary.json`.
        full_cache: Its part about the cache, over the steps that left a request waiting: while
            memory, or rows, were the bottleneck. None where no request ever waited.
        steps: Records of all steps.
        requests: Records of all requests.
        block_size: Tokens a block.
    """

    summary: dict[str, Any]
    full_cache: dict[str, Any] | None
    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]
    block_size: int

    @property
    def full_steps(self) -> list[StepRecord]:
        """Steps that left a request waiting."""
        return [step for step in self.steps if step.waiting]

    def mean_running(self) -> float | None:
        """Return the mean number of running requests while others waited."""
        steps = self.full_steps
        return weighted_mean([s.running for s in steps], [s.duration_s for s in steps])

    def mean_written(self) -> float | None:
        """Return the mean share of the pool's places that held tokens while requests waited."""
        steps = self.full_steps
        shares = [
            s.tokens_held / (self.block_size * (s.blocks_free + s.blocks_live + s.blocks_cached))
            for s in steps
        ]
        return weighted_mean(shares, [s.duration_s for s in steps])


def serve(
    config: SchedulerConfig,
    requests: Iterable[Request],
    executor: Executor,
    after_step: Callable[[SchedulerState], None] | None = None,
) -> Served:
    """Serve requests to the end.

    Args:
        config: Sizes and policies.
        requests: With their arrivals.
        executor: Its durations are the run's time.
        after_step: Called with the state after each step.

    Raises:
        RuntimeError: A request was refused or failed, so that runs would not compare.
    """
    tracker = MemoryTracker()
    engine = Engine(
        state=init_state(config),
        executor=executor,
        clock=VirtualClock(),
        observer=tracker,
        after_step=after_step,
    )
    duration_s = engine.run(requests)
    for record in tracker.requests:
        if record.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"request {record.request_id}: {record.message}")
    size, waited = config.block_size, [step for step in tracker.steps if step.waiting]
    return Served(
        summary=summarize(
            tracker.requests, tracker.steps, tracker.events, duration_s, block_size=size
        ),
        full_cache=summarize(tracker.requests, waited, (), duration_s, block_size=size)["cache"]
        if waited
        else None,
        steps=tuple(tracker.steps),
        requests=tuple(tracker.requests),
        block_size=size,
    )
