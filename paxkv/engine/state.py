"""The scheduler's state: plain data that pickles, so a run can be snapshotted and branched.

What is read every step for every running request lives in arrays, one entry a row, so that a step
with hundreds of rows costs a few vector operations.
"""

from dataclasses import dataclass, field
from typing import cast, overload

import numpy as np

from paxkv.blocks.evictable import EvictableBlocks
from paxkv.blocks.pool import BlockPool, init_pool
from paxkv.blocks.prefix import PrefixIndex
from paxkv.cache.groups import LayerGroup, live_chunk_tokens, most_blocks_of
from paxkv.cache.layout import blocks_needed
from paxkv.engine.accounts import Accounts
from paxkv.engine.queues import WaitingQueues
from paxkv.engine.rates import Rates
from paxkv.engine.request import Sequence, Status
from paxkv.engine.rows import Rows
from paxkv.engine.step import BlockCopy
from paxkv.errors import ConfigError
from paxkv.metrics.records import Event, EventKind, RequestRecord
from paxkv.policies.admission import AdmissionPolicy, FullPrompt
from paxkv.policies.allocator import AllocatorPolicy, Paged
from paxkv.policies.eviction import EvictionPolicy, Lru
from paxkv.policies.preemption import PreemptionPolicy, Recompute
from paxkv.policies.schedule import Continuous, SchedulePolicy
from paxkv.policies.tenancy import NO_TENANTS, TenantTable
from paxkv.policies.victim import Lifo, VictimPolicy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The sizes and policies of one engine.

    Attributes:
        max_num_seqs: Most rows in a step.
        max_num_batched_tokens: Most tokens computed in a step.
        max_model_len: Most tokens of a request, prompt and output together.
        eos_token_ids: Tokens that end a request, unless it says `ignore_eos`.
        vocab_size: Prompt tokens must be below it.
        groups: The model's layers by what their tokens see; each group has blocks of its own.
        bytes_per_block: What a block moves when it is swapped.
        prefix_caching: Whether full blocks outlive their request and are found again.
        open_block_in_row: Whether the cache of a block that is not full yet is bound to the row
            that fills it: then only full blocks outlive a row or are shared; the rest is computed
            again.
        max_preemptions: After so many, a request comes back only with all the blocks it can ever
            need promised to it, and is not preempted again.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    groups: tuple[LayerGroup, ...] = (LayerGroup((0,)),)
    bytes_per_block: int = 0
    prefix_caching: bool = True
    open_block_in_row: bool = False
    max_preemptions: int = 8
    allocator: AllocatorPolicy = field(default_factory=Paged)
    admission: AdmissionPolicy = field(default_factory=FullPrompt)
    schedule: SchedulePolicy = field(default_factory=Continuous)
    preemption: PreemptionPolicy = field(default_factory=Recompute)
    victim: VictimPolicy = field(default_factory=Lifo)
    eviction: EvictionPolicy = field(default_factory=Lru)
    tenants: TenantTable = NO_TENANTS

    def __post_init__(self):
        problems = [
            f"{key}={value}: must be 1 or more. Try {key}={default}."
            for key, value, default in (
                ("cache.block_size", self.block_size, 16),
                ("cache.num_blocks", self.num_blocks, 1024),
                ("engine.max_num_seqs", self.max_num_seqs, 64),
                ("engine.max_num_batched_tokens", self.max_num_batched_tokens, 512),
                ("engine.max_model_len", self.max_model_len, 2048),
                ("engine.max_preemptions", self.max_preemptions, 8),
            )
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def max_blocks(self) -> int:
        """Places in the block table of a request of the longest allowed length."""
        return blocks_needed(self.max_model_len, self.block_size)

    @overload
    def movable_tokens(self, context_len: int) -> int: ...
    @overload
    def movable_tokens(self, context_len: np.ndarray) -> np.ndarray: ...
    def movable_tokens(self, context_len: int | np.ndarray) -> int | np.ndarray:
        """Return how many of the first tokens in the cache can be used outside their row."""
        if not self.open_block_in_row:
            return context_len
        return context_len // self.block_size * self.block_size

    @property
    def live_chunk_tokens(self) -> int:
        """See `paxkv.cache.groups.live_chunk_tokens`."""
        return live_chunk_tokens(
            self.max_num_batched_tokens, self.block_size, open_block_in_row=self.open_block_in_row
        )

    def reserved_blocks(self, prompt_len: int, max_total_tokens: int) -> int | None:
        """Return the blocks side by side that a request takes on entry; None: one at a time."""
        tokens = self.allocator.reserve_tokens(prompt_len, max_total_tokens, self.max_model_len)
        return None if tokens is None else blocks_needed(tokens, self.block_size)

    def most_blocks(self, prompt_len: int, max_total_tokens: int) -> int:
        """Return the most blocks that a request can ever hold."""
        reserved = self.reserved_blocks(prompt_len, max_total_tokens)
        if reserved is not None:
            return reserved
        return most_blocks_of(
            self.groups, max_total_tokens, self.block_size, self.live_chunk_tokens
        )


@dataclass(kw_only=True)
class SchedulerState:
    """Everything the scheduler knows. Changed by `submit`, `abort`, `schedule` and `commit` only.

    Attributes:
        at_row: The sequence in each row.
        running: Sequences that hold a row, in the order in which they were admitted.
        waiting: Those that wait, swapped ones included.
        held_forks: Samples that wait for the prompt of the request they fork from, by its id.
        unscheduled: Admitted sequences of which no token was computed yet.
        accounts: What each tenant holds and has been served.
        rates: Measured speeds.
        in_flight: Whether a plan is being executed.
        entered: Rows filled in the current step: what they swap in or copy is not there yet.
        step_cached_tokens: Prompt tokens taken from the prefix cache in the current step.
        step_preemptions: Requests preempted in the current step.
        step_copies: Blocks to copy within the pool in the current step.
        host_release: Host blocks whose swap-in is in flight; free once it is done.
        ended_output_tokens: Tokens generated by requests that ended by themselves.
        ended_limit_tokens: Their limits.
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
    accounts: Accounts
    running: list[Sequence] = field(default_factory=list)
    waiting: WaitingQueues = field(default_factory=WaitingQueues)
    held_forks: dict[str, list[Sequence]] = field(default_factory=dict)
    unscheduled: list[Sequence] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    step: int = 0
    num_submitted: int = 0
    entered: set[int] = field(default_factory=set)
    step_cached_tokens: int = 0
    step_preemptions: int = 0
    step_copies: list[BlockCopy] = field(default_factory=list)
    in_flight: bool = False
    host_release: list[np.ndarray] = field(default_factory=list)
    ended_output_tokens: int = 0
    ended_limit_tokens: int = 0
    records: list[RequestRecord] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _running_rows: np.ndarray | None = None

    @property
    def spare_blocks(self) -> int:
        """Blocks that nobody holds: free ones and evictable ones."""
        return int(self.pool.num_free) + len(self.evictable)

    @property
    def has_work(self) -> bool:
        """Whether any submitted request is unfinished."""
        return bool(self.sequences)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, swapped ones and held forks included."""
        return len(self.waiting) + sum(len(forks) for forks in self.held_forks.values())

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks lie in host memory."""
        if int(self.host_pool.num_free) == self.host_pool.num_blocks:
            return 0
        return sum(sequence.status is Status.SWAPPED for sequence in self.waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into its tenant's queue, where its key belongs."""
        key = (*self.config.schedule.key(sequence.queued()), sequence.order)
        self.waiting.add(sequence, key)

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count what a tenant was served."""
        account = self.accounts.of(tenant)
        service = self.config.schedule.charge(prompt_tokens, output_tokens)
        account.service_tokens += service / account.terms.weight

    def enter_row(self, sequence: Sequence, context_len: int) -> None:
        """Give a sequence a row, with no blocks yet."""
        request, rows = sequence.request, self.rows
        row = sequence.row = self.free_rows.pop()
        count = len(sequence.tokens)
        rows.tokens[row, :count] = sequence.tokens
        rows.num_tokens[row] = count
        rows.context_len[row] = context_len
        rows.num_computed[row] = sequence.num_computed
        rows.clear_blocks(row)
        rows.prompt_len[row] = len(request.prompt_token_ids)
        rows.max_total_tokens[row] = sequence.max_total_tokens
        rows.temperature[row] = request.temperature
        rows.top_p[row] = request.top_p
        rows.seed[row] = request.seed
        rows.ignore_eos[row] = request.ignore_eos
        sequence.status = Status.RUNNING
        self.at_row[row] = sequence
        self.entered.add(row)
        self.running.append(sequence)
        self._running_rows = None

    def leave_row(self, sequence: Sequence) -> np.ndarray:
        """Take a sequence out of its row; returns the block ids it held there, still held."""
        rows, row = self.rows, sequence.row
        block_ids = rows.blocks(row).copy()
        self.save(sequence)
        sequence.live_from = rows.live_from[row].copy()
        rows.clear_blocks(row)
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
        index=PrefixIndex(config.block_size, config.groups) if config.prefix_caching else None,
        evictable=EvictableBlocks(),
        rows=Rows(
            num_rows=config.max_num_seqs,
            max_tokens=config.max_model_len,
            max_blocks=config.max_blocks,
            groups=config.groups,
            block_size=config.block_size,
        ),
        accounts=Accounts(config.tenants, config.num_blocks),
        free_rows=list(range(config.max_num_seqs - 1, -1, -1)),
        at_row=[None] * config.max_num_seqs,
    )
