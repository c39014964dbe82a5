"""The scheduler's hand on the device blocks: pool, prefix index and evictable set move together.

These functions change the state. They are the only code that does so with its pool.
"""

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.engine.request import Sequence
from paxkv.engine.state import SchedulerState
from paxkv.errors import InvariantError, OutOfBlocks


def take_blocks(state: SchedulerState, counts: np.ndarray, now: float) -> np.ndarray:
    """Allocate blocks for several entries at once, evicting cached blocks where none are free.

    Args:
        state: Changed.
        counts: int `[n]`, blocks for each entry; together at most `state.available_blocks`.
        now: Time for the events.

    Returns:
        int32 ids, those of entry 0 first.

    Raises:
        OutOfBlocks: The caller asked for more than there is; nothing has changed.
    """
    total = int(counts.sum())
    if total > state.available_blocks:
        raise OutOfBlocks(f"{total} blocks asked for, {state.available_blocks} available")
    missing = total - int(state.pool.num_free)
    if missing > 0:
        _evict(state, missing, now)
    state.pool, ids, _ = block_pool.allocate(state.pool, counts)
    return ids


def count_evictable(state: SchedulerState, ids: np.ndarray) -> int:
    """Return how many of the blocks are cached and held by nobody."""
    return int(block_pool.evictable(state.pool, ids).sum())


def share_blocks(state: SchedulerState, ids: np.ndarray) -> None:
    """Add a holder to cached or live blocks."""
    assert state.index is not None  # without an index nothing is found to share
    state.index.count_use(ids.tolist())
    state.evictable.remove(ids[block_pool.evictable(state.pool, ids)].tolist())
    state.pool = block_pool.share(state.pool, ids)


def drop_blocks(state: SchedulerState, ids: np.ndarray, now: float) -> None:
    """Give up one hold on each block, the last block of a request first.

    The prefix index keeps what it can find; so the start of a prompt outlives its end.
    """
    ids = ids[::-1].copy()  # the pool may keep the array; a row's table will change
    state.pool = block_pool.release(state.pool, ids)
    if state.index is not None:
        state.evictable.add(ids[block_pool.evictable(state.pool, ids)].tolist(), now)


def register_full_blocks(state: SchedulerState, sequences: list[Sequence]) -> None:
    """Make the blocks that running sequences have filled since the last call findable."""
    index, rows = state.index, state.rows
    if index is None or not sequences:
        return
    size = state.config.block_size
    found = []
    for sequence in sequences:
        row = sequence.row
        full = int(rows.context_len[row]) // size
        for place in range(sequence.num_registered, full):
            if place and sequence.prefix_chain is None:
                break  # its parent was dropped, so nothing after it could be found
            block_id = int(rows.block_table[row, place])
            tokens = rows.tokens[row, place * size : (place + 1) * size]
            sequence.prefix_chain = index.register(sequence.prefix_chain, tokens, block_id)
            if block_id in index:
                found.append(block_id)
        sequence.num_registered = full
    state.pool = block_pool.mark_cached(state.pool, np.array(found, np.int32))


def _evict(state: SchedulerState, num_blocks: int, now: float) -> None:
    assert state.index is not None  # without an index nothing is evictable
    policy = state.config.eviction
    ids = list(policy.choose(state.evictable.view(state.index), num_blocks))
    if len(set(ids)) != num_blocks or not all(block_id in state.evictable for block_id in ids):
        raise InvariantError(
            f"evict: {type(policy).__name__} was asked for {num_blocks} different blocks out of "
            f"the {len(state.evictable)} evictable ones and chose {ids[:20]}"
        )
    for block_id in ids:
        state.index.drop(block_id)
    state.evictable.remove(ids)
    state.pool = block_pool.evict(state.pool, np.array(ids, np.int32))
    state.emit(now, "evict", blocks=num_blocks)
