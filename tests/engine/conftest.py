"""A scripted executor and a harness, so that scheduling is tested without a model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from paxkv.blocks import pool as block_pool
from paxkv.blocks.invariants import check_pool
from paxkv.cache.groups import LayerGroup
from paxkv.engine import scheduler
from paxkv.engine.clock import VirtualClock
from paxkv.engine.engine import Engine
from paxkv.engine.scheduler import tokens_held
from paxkv.engine.state import SchedulerConfig, init_state
from paxkv.engine.step import Executor, RowBatch, StepPlan, StepResult
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.request import Request

ONE_GROUP = (LayerGroup((0,)),)
ANYBODY = -1


def next_token(history) -> int:
    """The scripted model: the next token depends on every token before it."""
    value = 7
    for token in history:
        value = (value * 31 + int(token) + 1) % 997
    return value % 89 + 10


def visible(span, num_tokens):
    """Positions that the last of `num_tokens` tokens sees."""
    positions = np.arange(num_tokens)
    if span.window is None:
        return positions
    return positions[(positions >= num_tokens - span.window) | (positions < span.num_sink_tokens)]


@dataclass
class ScriptedExecutor:
    """Keeps what was written to each slot of a fake pool and computes tokens from it.

    A token that was never written, or whose block went to somebody else, changes the output, so
    equal outputs prove that every plan read and wrote the right blocks.
    """

    block_size: int
    num_blocks: int
    host_blocks: int = 0
    groups: tuple[LayerGroup, ...] = ONE_GROUP
    open_block_in_row: bool = False
    step_s: float = 1.0
    plans: list[StepPlan] = field(default_factory=list)
    on_plan: Callable[[StepPlan], None] = lambda plan: None

    def __post_init__(self):
        self.pool = np.full((self.num_blocks, self.block_size), -1, np.int64)
        self.host = np.full((self.host_blocks, self.block_size), -1, np.int64)
        self.owner = np.full(self.pool.shape, ANYBODY)  # the only row that can read a slot

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.on_plan(plan)
        for move in plan.swap_outs:
            self._check_readable(move.block_ids, ANYBODY)
            self.host[move.host_block_ids] = self.pool[move.block_ids]
        for move in plan.swap_ins:
            self.pool[move.block_ids] = self.host[move.host_block_ids]
            self.owner[move.block_ids] = ANYBODY
        for copy in plan.copies:
            self._check_readable(copy.src, ANYBODY)
            self.pool[copy.dst] = self.pool[copy.src]
            self.owner[copy.dst] = ANYBODY
        moved = sum(len(move.block_ids) for move in (*plan.swap_outs, *plan.swap_ins))
        return StepResult(
            prefill_tokens=self._run(plan.prefills),
            decode_tokens=self._run(plan.decodes),
            duration_s=self.step_s,
            swap_bytes=1000 * moved,
            swap_s=0.01 * moved,
        )

    def _run(self, batch: RowBatch) -> np.ndarray:
        tokens, at = [], 0
        written = set()
        for row in range(batch.num_rows):
            count, end = int(batch.query_lens[row]), int(batch.context_lens[row])
            positions = np.arange(end - count, end)
            histories = []
            for table, group in zip(batch.block_tables[row], self.groups, strict=True):
                blocks = table[positions // self.block_size]
                offsets = (positions % self.block_size).tolist()
                slots = list(zip(blocks.tolist(), offsets, strict=True))
                assert not written & set(slots), "two rows write to one slot"
                written |= set(slots)
                for slot, token in zip(slots, batch.tokens[at : at + count], strict=True):
                    self.pool[slot] = token
                self._bind(blocks, offsets, int(batch.rows[row]))
                seen = visible(group.span, end)
                self._check_readable(
                    (table[seen // self.block_size], seen % self.block_size), int(batch.rows[row])
                )
                histories += self.pool[
                    table[seen // self.block_size], seen % self.block_size
                ].tolist()
            at += count
            tokens.append(next_token(histories))
        return np.array(tokens, np.int32)

    def _bind(self, blocks, offsets, row):
        """Give written slots to a row where blocks that are not full are bound to one."""
        if not self.open_block_in_row:
            return
        for block, offset in zip(blocks.tolist(), offsets, strict=True):
            self.owner[block, offset] = row
            if offset == self.block_size - 1:
                self.owner[block] = ANYBODY

    def _check_readable(self, slots, row):
        owners = set(self.owner[slots].ravel().tolist())
        assert owners <= {ANYBODY, row}, f"open block of rows {owners} read for {row}"


class Log(MemoryTracker):
    """An observer that keeps everything."""

    def by_id(self):
        return {record.request_id: record for record in self.requests}


def check_state(state):
    """Every invariant of the blocks, and the counts that steps report."""
    tables = [state.rows.blocks(sequence.row) for sequence in state.running]
    check_pool(state.pool, tables, index=state.index, evictable=state.evictable)
    counts = block_pool.counts(state.pool)
    assert counts.free + counts.live + counts.cached == state.config.num_blocks
    assert 0 <= tokens_held(state) <= counts.live * state.config.block_size
    check_accounts(state)


def check_accounts(state):
    """What each tenant pays, counted afresh; limits are kept."""
    for account in state.accounts.all():
        if not state.accounts.enabled:
            continue
        held = [state.rows.blocks(s.row) for s in state.running if s.request.tenant == account.name]
        distinct = len(np.unique(np.concatenate(held))) if held else 0
        assert account.held_blocks == distinct, account.name
        cached = sum(state.evictable.holder_of(b).tenant == account.name for b in state.evictable)
        assert account.cached_blocks == cached
        limit = account.terms.limit_blocks
        assert limit is None or account.held_blocks <= limit, account.name


@dataclass
class Harness:
    """Runs requests through the scripted model, or another executor; every step is checked."""

    config: SchedulerConfig
    executor: Executor | None = None

    def __post_init__(self):
        self.state = init_state(self.config)
        self.log = Log()
        if self.executor is None:
            self.executor = ScriptedExecutor(
                self.config.block_size,
                self.config.num_blocks,
                self.state.host_pool.num_blocks,
                self.config.groups,
                self.config.open_block_in_row,
            )
        self.engine = Engine(
            state=self.state,
            executor=self.executor,
            clock=VirtualClock(),
            observer=self.log,
            after_step=check_state,
        )

    def run(self, requests):
        self.engine.run(requests)
        self.check_idle()
        return self.log.by_id()

    def submit(self, *requests):
        """Queue requests now; returns whether each was."""
        now = self.engine.clock.now()
        return [scheduler.submit(self.state, request, now) for request in requests]

    def abort(self, request_id):
        scheduler.abort(self.state, request_id, self.engine.clock.now())

    def step(self, count=1):
        """Take steps; returns the last plan."""
        for _ in range(count):
            self.engine.step()
        return self.executor.plans[-1]

    def finish(self, most_steps=1000):
        """Step until nothing is left; returns the records by id."""
        for _ in range(most_steps):
            if not self.state.has_work:
                break
            self.step()
        self.engine._drain()
        self.check_idle()
        return self.log.by_id()

    @property
    def running(self):
        """Ids of the running requests, in the order in which they were admitted."""
        return [sequence.request.request_id for sequence in self.state.running]

    def check_idle(self):
        check_state(self.state)
        assert not self.state.has_work
        assert not self.state.waiting
        assert block_pool.counts(self.state.pool).live == 0
        assert int(self.state.host_pool.num_free) == self.state.host_pool.num_blocks
        for account in self.state.accounts.all():
            assert account.guaranteed_blocks == account.unfinished == 0, account.name


def expected_tokens(request: Request, max_model_len=48, groups=ONE_GROUP) -> tuple[int, ...]:
    """What the scripted model says without any cache, its end tokens aside."""
    tokens = list(request.prompt_token_ids)
    for _ in range(min(request.max_tokens, max_model_len - len(tokens))):
        seen = [tokens[i] for group in groups for i in visible(group.span, len(tokens))]
        tokens.append(next_token(seen))
    return tuple(tokens[len(request.prompt_token_ids) :])


@pytest.fixture(scope="session")
def make_config():
    def build(**changes) -> SchedulerConfig:
        values = {
            "block_size": 4,
            "num_blocks": 16,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 48,
            "vocab_size": 100,
        }
        return SchedulerConfig(**(values | changes))

    return build


@pytest.fixture(scope="session")
def make_harness(make_config):
    return lambda executor=None, **changes: Harness(make_config(**changes), executor)


@pytest.fixture(scope="session")
def make_request():
    def build(request_id, prompt_len=6, max_tokens=10, first=1, **changes) -> Request:
        prompt = tuple((first + i) % 100 for i in range(prompt_len))
        values = {"request_id": request_id, "prompt_token_ids": prompt, "max_tokens": max_tokens}
        return Request(**(values | changes))

    return build


@pytest.fixture(scope="session")
def expect():
    return expected_tokens
