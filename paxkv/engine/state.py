"""The scheduler's state: plain data that pickles, so a run can be snapshotted and branched.

What is read every step for every running request lives in arrays, one entry a row, so that a step
with hundreds of rows costs a few vector operations.
"""

import bisect
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from paxkv.blocks.evictable import EvictableBlocks
from paxkv.blocks.pool import BlockPool, init_pool
from paxkv.blocks.prefix import PrefixIndex
from paxkv.cache.layout import blocks_needed
from paxkv.engine.request import Sequence, Status
from paxkv.errors import ConfigError
from paxkv.metrics.records import Event, EventKind, RequestRecord
from paxkv.policies.admission import AdmissionPolicy, FullPrompt
from paxkv.policies.eviction import EvictionPolicy, Lru
from paxkv.policies.preemption import PreemptionPolicy, Recompute
from paxkv.policies.schedule import Continuous, SchedulePolicy
from paxkv.policies.victim import Lifo, VictimPolicy
from paxkv.policies.view import PoolView


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The sizes and policies of one engine.

    Attributes:
        max_num_seqs: Most rows in a step.
        max_num_batched_tokens: Most tokens computed in a step.
        max_model_len: Most tokens of a request, prompt and output together.
        eos_token_ids: Tokens that end a request, unless it says `ignore_eos`.
        vocab_size: Prompt tokens must be below it.
        prefix_caching: Whether full blocks outlive their request and are found again.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    admission: AdmissionPolicy = field(default_factory=FullPrompt)
    schedule: SchedulePolicy = field(default_factory=Continuous)
    preemption: PreemptionPolicy = field(default_factory=Recompute)
    victim: VictimPolicy = field(default_factory=Lifo)
    eviction: EvictionPolicy = field(default_factory=Lru)

    def __post_init__(self):
        problems = [
            f"{key}={value}: must be 1 or more. Try {key}={default}."
            for key, value, default in (
                ("cache.block_size", self.block_size, 16),
                ("cache.num_blocks", self.num_blocks, 1024),
                ("engine.max_num_seqs", self.max_num_seqs, 64),
                ("engine.max_num_batched_tokens", self.max_num_batched_tokens, 512),
                ("engine.max_model_len", self.max_model_len, 2048),
            )
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def max_blocks(self) -> int:
        """Blocks of a request of the longest allowed length."""
        return blocks_needed(self.max_model_len, self.block_size)


class Rows:
    """The running batch: one entry a row, valid where a sequence sits in the row."""

    def __init__(self, config: SchedulerConfig):
        rows = config.max_num_seqs
        self.tokens = np.zeros((rows, config.max_model_len), np.int32)
        self.block_table = np.zeros((rows, config.max_blocks), np.int32)
        self.num_tokens = np.zeros(rows, np.int32)
        self.context_len = np.zeros(rows, np.int32)
        self.num_computed = np.zeros(rows, np.int32)
        self.num_blocks = np.zeros(rows, np.int32)
        self.prompt_len = np.zeros(rows, np.int32)
        self.max_total_tokens = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.seed = np.zeros(rows, np.uint32)
        self.ignore_eos = np.zeros(rows, bool)

    def blocks(self, row: int) -> np.ndarray:
        """Return the block ids of a row (a view)."""
        return self.block_table[row, : self.num_blocks[row]]

    def append_blocks(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Append newly allocated blocks to tables: `counts[i]` of them, in order, to `rows[i]`."""
        place = np.arange(len(block_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.block_table[
            np.repeat(rows, counts), np.repeat(self.num_blocks[rows], counts) + place
        ] = block_ids
        self.num_blocks[rows] += counts


@dataclass(kw_only=True)
class SchedulerState:
    """Everything the scheduler knows. Changed by `submit`, `abort`, `schedule` and `commit` only.

    Attributes:
        at_row: The sequence in each row.
        running: Sequences that hold a row, in the order in which they were admitted.
        waiting: Sort key and sequence of each that waits, swapped ones included; sorted.
        in_flight: Whether a plan is being executed.
        step_cached_tokens: Prompt tokens taken from the prefix cache in the current step.
        step_preemptions: Requests preempted in the current step.
        host_release: Host blocks whose swap-in is in flight; free once it is done.
        records: Records of requests that ended since the engine last took them.
        events: Likewise the events.
    """

    config: SchedulerConfig
    pool: BlockPool
    host_pool: BlockPool
    index: PrefixIndex | None
    evictable: EvictableBlocks
    rows: Rows
    free_rows: list[int]
    at_row: list[Sequence | None]
    running: list[Sequence] = field(default_factory=list)
    waiting: list[tuple[tuple[float, ...], Sequence]] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    step: int = 0
    num_submitted: int = 0
    step_cached_tokens: int = 0
    step_preemptions: int = 0
    in_flight: bool = False
    host_release: list[np.ndarray] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _running_rows: np.ndarray | None = None

    @property
    def available_blocks(self) -> int:
        """Blocks an allocation can have: free ones, and cached ones that nobody holds."""
        return int(self.pool.num_free) + len(self.evictable)

    @property
    def has_work(self) -> bool:
        """Whether any submitted request is unfinished."""
        return bool(self.sequences)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks lie in host memory."""
        return sum(sequence.status is Status.SWAPPED for _, sequence in self.waiting)

    def pool_view(self) -> PoolView:
        """Return what a policy may see of the pool."""
        return PoolView(
            num_blocks=self.config.num_blocks,
            available_blocks=self.available_blocks,
            num_running=len(self.running),
            block_size=self.config.block_size,
        )

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting queue, where its key belongs."""
        key = (*self.config.schedule.key(sequence.request), sequence.order)
        bisect.insort(self.waiting, (key, sequence), key=lambda entry: entry[0])

    def enter_row(self, sequence: Sequence, context_len: int) -> None:
        """Give a sequence a row, with no blocks yet."""
        request, rows = sequence.request, self.rows
        row = sequence.row = self.free_rows.pop()
        count = len(sequence.tokens)
        rows.tokens[row, :count] = sequence.tokens
        rows.num_tokens[row] = count
        rows.context_len[row] = context_len
        rows.num_computed[row] = sequence.num_computed
        rows.num_blocks[row] = 0
        rows.prompt_len[row] = len(request.prompt_token_ids)
        rows.max_total_tokens[row] = sequence.max_total_tokens
        rows.temperature[row] = request.temperature
        rows.top_p[row] = request.top_p
        rows.seed[row] = request.seed
        rows.ignore_eos[row] = request.ignore_eos
        sequence.status = Status.RUNNING
        self.at_row[row] = sequence
        self.running.append(sequence)
        self._running_rows = None

    def leave_row(self, sequence: Sequence) -> np.ndarray:
        """Take a sequence out of its row; returns the block ids it held there, still held."""
        rows, row = self.rows, sequence.row
        block_ids = rows.blocks(row).copy()
        self.save(sequence)
        rows.num_blocks[row] = 0
        self.free_rows.append(row)
        self.at_row[row] = None
        self.running.remove(sequence)
        self._running_rows = None
        sequence.row = -1
        return block_ids

    def save(self, sequence: Sequence) -> None:
        """Bring a running sequence's own fields up to date with its row."""
        rows, row = self.rows, sequence.row
        sequence.tokens = rows.tokens[row, : rows.num_tokens[row]].copy()
        sequence.context_len = int(rows.context_len[row])
        sequence.num_computed = int(rows.num_computed[row])

    def sequences_at(self, rows: np.ndarray) -> list[Sequence]:
        """Return the sequences in occupied rows."""
        at_row = cast(list[Sequence], self.at_row)
        return [at_row[row] for row in rows.tolist()]

    @property
    def running_rows(self) -> np.ndarray:
        """Rows of the running sequences, in their order; int32, not to be changed."""
        if self._running_rows is None:
            rows = (sequence.row for sequence in self.running)
            self._running_rows = np.fromiter(rows, np.int32, len(self.running))
        return self._running_rows

    def emit(
        self, now: float, kind: EventKind, request_id: str | None = None, **data: object
    ) -> None:
        """Note an event of the current step."""
        self.events.append(
            Event(time_s=now, step=self.step, kind=kind, request_id=request_id, data=data)
        )


def init_state(config: SchedulerConfig) -> SchedulerState:
    """Return the state of an idle engine."""
    return SchedulerState(
        config=config,
        pool=init_pool(config.num_blocks),
        host_pool=init_pool(config.preemption.host_capacity(config.num_blocks)),
        index=PrefixIndex(config.block_size) if config.prefix_caching else None,
        evictable=EvictableBlocks(),
        rows=Rows(config),
        free_rows=list(range(config.max_num_seqs - 1, -1, -1)),
        at_row=[None] * config.max_num_seqs,
    )
