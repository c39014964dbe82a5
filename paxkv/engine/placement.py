"""Where a waiting sequence would start: which blocks it shares, takes over, and still needs."""

from dataclasses import dataclass, replace

import numpy as np

from paxkv.blocks.pool import INVALID
from paxkv.cache.layout import blocks_needed
from paxkv.engine import memory
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.policies.admission import AdmissionNeed

_NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A sequence's start, if it were admitted now. All arrays are int32.

    Attributes:
        context_len: Tokens in the cache from the start: swapped in, shared or forked.
        live_from: `[group]`, the first block of each group that its window has not left behind.
        shared: `[group, block]`, blocks it shares, the same number in each group; INVALID where a
            window has left them behind.
        tails: Blocks whose content it continues: the partly filled last block of the request it
            forks from, in each group; empty without a fork.
        starts: `[group]`, the place of the first new block.
        chunk_ends: `[group]`, the end of the table for the first step that computes it.
        context_ends: `[group]`, the end for its whole context; where a window will let blocks go,
            as `chunk_ends`.
        run_blocks: Blocks to take side by side instead; None where they may lie anywhere.
        forked: Whether what it shares is that of the request it forks from.
        need: What the admission policy is asked about.
    """

    context_len: int
    live_from: np.ndarray
    shared: np.ndarray
    tails: np.ndarray
    starts: np.ndarray
    chunk_ends: np.ndarray
    context_ends: np.ndarray
    run_blocks: int | None
    forked: bool
    need: AdmissionNeed

    @property
    def shared_ids(self) -> np.ndarray:
        """The blocks it shares, group after group."""
        return self.shared[self.shared != INVALID]

    def new_blocks(self, ends: np.ndarray, sink_blocks: np.ndarray) -> np.ndarray:
        """Return how many blocks tables up to `ends` take, `[group]`."""
        dead = np.clip(self.live_from, sink_blocks, None) - sink_blocks
        dead = np.where(self.starts >= self.live_from, 0, dead)
        return ends - self.starts - dead


def place(state: SchedulerState, sequence: Sequence, budget: int) -> Placement:
    """Work out a waiting sequence's start; changes nothing.

    Args:
        state: Only read.
        sequence: Waiting or swapped out.
        budget: Tokens left to compute in this step.
    """
    config, size = state.config, state.config.block_size
    num_groups = len(config.groups)
    fork, tails, shared = None, _NO_IDS, np.zeros((num_groups, 0), np.int32)
    live_from = np.zeros(num_groups, np.int32)
    if sequence.status is Status.SWAPPED:
        assert sequence.live_from is not None
        context_len, live_from = sequence.context_len, sequence.live_from
    else:
        fork = _fork(state, sequence)
        if fork is not None:
            shared, tails = fork
            context_len = config.movable_tokens(len(sequence.tokens) - 1)
        else:
            shared = _prefix_hits(state, sequence)
            context_len = shared.shape[1] * size
        live_from = np.array(
            [group.first_live_block(context_len, size) for group in config.groups], np.int32
        )
    starts = np.full(num_groups, shared.shape[1], np.int32)
    num_tokens = len(sequence.tokens)
    chunk = min(num_tokens - context_len, budget)
    chunk_ends = np.maximum(starts, blocks_needed(context_len + chunk, size))
    whole = blocks_needed(num_tokens, size)
    full = np.array([group.span.window is None for group in config.groups])
    context_ends = np.where(full, np.maximum(chunk_ends, whole), chunk_ends)
    run_blocks = config.reserved_blocks(
        len(sequence.request.prompt_token_ids), sequence.max_total_tokens
    )
    placement = Placement(
        context_len=context_len,
        live_from=live_from,
        shared=shared,
        tails=tails,
        starts=starts,
        chunk_ends=chunk_ends,
        context_ends=context_ends,
        run_blocks=run_blocks,
        forked=fork is not None,
        need=AdmissionNeed(
            context_tokens=num_tokens,
            open_tokens=0 if run_blocks is not None else sequence.max_total_tokens - num_tokens,
            chunk_blocks=0,
            context_blocks=0,
            max_blocks=sequence.most_blocks,
            revived_blocks=0,
        ),
    )
    return _with_need(state, sequence, placement)


def _with_need(state: SchedulerState, sequence: Sequence, placement: Placement) -> Placement:
    """Fill in the counts of blocks."""
    config, given = state.config, placement.need
    if placement.run_blocks is not None:
        chunk = context = placement.run_blocks
    else:
        sinks = state.rows.sink_blocks
        chunk_blocks = placement.new_blocks(placement.chunk_ends, sinks)
        context_blocks = placement.new_blocks(placement.context_ends, sinks)
        # A window's blocks are taken chunk by chunk, but count as much as they will come to.
        held = (placement.shared != INVALID).sum(axis=1)
        for number, group in enumerate(config.groups):
            if group.span.window is not None:
                most = group.most_blocks(
                    given.context_tokens, config.block_size, config.live_chunk_tokens
                )
                context_blocks[number] = max(context_blocks[number], most - held[number])
        chunk, context = int(chunk_blocks.sum()), int(context_blocks.sum())
    need = replace(
        given,
        chunk_blocks=chunk,
        context_blocks=context,
        revived_blocks=memory.count_evictable(state, placement.shared_ids),
    )
    return replace(placement, need=need)


def _prefix_hits(state: SchedulerState, sequence: Sequence) -> np.ndarray:
    """Return the cached blocks `[group, block]` it can share; the last token is left to compute."""
    if state.index is None:
        return np.zeros((len(state.config.groups), 0), np.int32)
    return state.index.match(
        sequence.tokens,
        salt=memory.salt_of(state, sequence),
        limit_tokens=len(sequence.tokens) - 1,
    )


def _fork(state: SchedulerState, sequence: Sequence) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the blocks to share and those to continue from the request it forks from.

    None where that request is not running (one under its id that came later is another), has left
    blocks behind that this one needs, or this one has tokens of its own already.
    """
    leader = state.sequences.get(sequence.request.fork_of or "")
    prompt_len = len(sequence.request.prompt_token_ids)
    if leader is None or leader.status is not Status.RUNNING or leader.order > sequence.order:
        return None
    if len(sequence.tokens) > prompt_len:
        return None
    rows, row, size = state.rows, leader.row, state.config.block_size
    context_len = state.config.movable_tokens(prompt_len - 1)
    if rows.context_len[row] < prompt_len or state.config.allocator.contiguous:
        return None
    full, partial = divmod(context_len, size)
    shared = rows.block_table[row, :, :full].copy()
    for number, group in enumerate(state.config.groups):
        sinks, first = group.sink_blocks(size), int(group.first_live_block(context_len, size))
        if int(rows.live_from[row, number]) > max(first, sinks):
            return None
        shared[number, sinks:first] = INVALID
    return shared, rows.block_table[row, :, full].copy() if partial else _NO_IDS
