"""The engine loop: arrivals in, plans out, results booked, everything told to an observer."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.blocks.runs import largest_free_run
from paxkv.engine import scheduler
from paxkv.engine.clock import Clock
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import Executor, StepPlan, StepResult
from paxkv.metrics.records import Event, RequestRecord, StepRecord
from paxkv.workload.request import Request

_NO_TOKENS = np.zeros(0, np.int32)
_EMPTY_RESULT = StepResult(prefill_tokens=_NO_TOKENS, decode_tokens=_NO_TOKENS, duration_s=0.0)


class Observer(Protocol):
    """Who is told what happens; the trackers are."""

    def step(self, record: StepRecord) -> None:
        """Take the record of a step."""
        ...

    def request(self, record: RequestRecord) -> None:
        """Take the record of a request that ended."""
        ...

    def event(self, event: Event) -> None:
        """Take an event."""
        ...


@dataclass(kw_only=True)
class Engine:
    """One engine: a scheduler's state, an executor and a clock.

    Attributes:
        detokenise: Output token ids to text, for the records; None leaves the text empty.
        after_step: Called with the state after each step, for checks; None does nothing.
    """

    state: SchedulerState
    executor: Executor
    clock: Clock
    observer: Observer
    detokenise: Callable[[tuple[int, ...]], str] | None = None
    after_step: Callable[[SchedulerState], None] | None = None

    def run(self, requests: Iterable[Request]) -> float:
        """Serve all requests; returns the time at which the last one ended.

        When it is interrupted or fails, the unfinished requests are recorded as they stand before
        the exception goes on.
        """
        pending = sorted(requests, key=lambda request: request.arrival_s)
        arrived = 0
        try:
            while arrived < len(pending) or self.state.has_work:
                now = self.clock.now()
                while arrived < len(pending) and pending[arrived].arrival_s <= now:
                    scheduler.submit(self.state, pending[arrived], now)
                    arrived += 1
                if self.state.has_work:
                    self.step()
                else:
                    self._drain()
                    if arrived < len(pending):
                        self.clock.wait_until(pending[arrived].arrival_s)
        except BaseException:
            self._record_unfinished()
            raise
        self._drain()
        return self.clock.now()

    def step(self) -> None:
        """Schedule, execute and commit one step."""
        start = self.clock.now()
        host = -time.perf_counter()
        plan = scheduler.schedule(self.state, start)
        host += time.perf_counter()
        peak = int(block_pool.counts(self.state.pool).live)
        result = self.executor.execute(plan) if not plan.is_empty else _EMPTY_RESULT
        self.clock.spend(result.duration_s, result.compile_s)
        host -= time.perf_counter()
        now = self.clock.now()
        recomputed = scheduler.commit(self.state, plan, result, now)
        host += time.perf_counter() + result.host_s
        self.observer.step(self._step_record(plan, result, start, now, host, recomputed, peak))
        self._drain()
        if self.after_step is not None:
            self.after_step(self.state)

    def _step_record(
        self,
        plan: StepPlan,
        result: StepResult,
        start: float,
        now: float,
        host_s: float,
        recomputed: int,
        blocks_peak: int,
    ) -> StepRecord:
        state = self.state
        blocks = block_pool.counts(state.pool)
        num_swapped = state.num_swapped
        return StepRecord(
            step=plan.step,
            start_s=start,
            duration_s=now - start,
            host_s=host_s,
            compile_s=result.compile_s,
            num_compiles=result.num_compiles,
            prefill_tokens=int(plan.prefills.query_lens.sum()),
            decode_rows=plan.decodes.num_rows,
            recomputed_tokens=recomputed,
            running=len(state.running),
            waiting=state.num_waiting - num_swapped,
            swapped=num_swapped,
            blocks_free=int(blocks.free),
            blocks_live=int(blocks.live),
            blocks_cached=int(blocks.cached),
            blocks_peak=blocks_peak,
            largest_free_run_blocks=largest_free_run(state.pool),
            tokens_held=scheduler.tokens_held(state),
            tenant_blocks=state.accounts.held_by_tenant(),
            cached_tokens=state.step_cached_tokens,
            preemptions=state.step_preemptions,
            swap_out_blocks=sum(len(move.block_ids) for move in plan.swap_outs),
            swap_in_blocks=sum(len(move.block_ids) for move in plan.swap_ins),
            swap_bytes=result.swap_bytes,
        )

    def _drain(self) -> None:
        """Hand over the records and events that have come up."""
        for event in self.state.events:
            self.observer.event(event)
        for record in self.state.records:
            self.observer.request(self._with_text(record))
        self.state.events.clear()
        self.state.records.clear()

    def _record_unfinished(self) -> None:
        self._drain()
        for sequence in scheduler.unfinished(self.state):
            self.observer.request(self._with_text(sequence.record(None, None)))

    def _with_text(self, record: RequestRecord) -> RequestRecord:
        if self.detokenise is None or not record.output_token_ids:
            return record
        return replace(record, output_text=self.detokenise(record.output_token_ids))
