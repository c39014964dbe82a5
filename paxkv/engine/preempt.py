"""Preemption as the scheduler applies it: victims give their blocks back until the rest fits."""

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.cache.layout import blocks_needed
from paxkv.engine import memory
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import BlockMove
from paxkv.errors import InvariantError
from paxkv.policies.view import RequestView


def make_room(
    state: SchedulerState, take: np.ndarray, now: float
) -> tuple[int, tuple[BlockMove, ...]]:
    """Give running rows their blocks in order, preempting victims where the pool is short.

    Every preemption takes one request out of the batch, so there are at most as many as rows.

    Args:
        state: Changed.
        take: int32 `[row of the batch]`, tokens to compute in this step; set to 0 where preempted.
        now: Time of the step.

    Returns:
        How many requests were preempted, and the swap-outs they need.
    """
    rows, size = state.rows, state.config.block_size
    moves: list[BlockMove] = []
    num_preempted = 0
    for sequence in tuple(state.running):
        row = sequence.row
        if row < 0 or take[row] == 0:
            continue
        after = int(rows.context_len[row] + take[row])
        need = blocks_needed(after, size) - int(rows.num_blocks[row])
        while need > state.available_blocks:
            victim = _choose_victim(state, need - state.available_blocks)
            take[victim.row] = 0
            moves += _preempt(state, victim, now)
            num_preempted += 1
            if victim is sequence:
                break
        else:
            if need > 0:
                counts = np.array([need])
                rows.append_blocks(np.array([row]), counts, memory.take_blocks(state, counts, now))
    return num_preempted, tuple(moves)


def _choose_victim(state: SchedulerState, need_blocks: int) -> Sequence:
    """Ask the victim policy, and check that it names a running request."""
    candidates = [_view(state, sequence) for sequence in state.running]
    policy = state.config.victim
    chosen = policy.choose(candidates, need_blocks)
    for view, sequence in zip(candidates, state.running, strict=True):
        if view is chosen or view == chosen:
            return sequence
    raise InvariantError(
        f"victim: {type(policy).__name__} chose {chosen!r}, which is none of the "
        f"{len(candidates)} running requests it was offered"
    )


def _view(state: SchedulerState, sequence: Sequence) -> RequestView:
    rows, row = state.rows, sequence.row
    blocks = rows.blocks(row)
    return sequence.view(
        num_tokens=int(rows.num_tokens[row]),
        context_len=int(rows.context_len[row]),
        num_blocks=len(blocks),
        exclusive_blocks=int((state.pool.ref_counts[blocks] == 1).sum()),
    )


def _preempt(state: SchedulerState, victim: Sequence, now: float) -> list[BlockMove]:
    """Take the victim's blocks; it waits again, swapped to host memory or to be recomputed."""
    policy = state.config.preemption
    view = _view(state, victim)
    host_free = int(state.host_pool.num_free)
    mode = policy.choose(view, host_free)
    filled = blocks_needed(view.context_len, state.config.block_size)
    if mode not in ("swap", "recompute") or (mode == "swap" and filled > host_free):
        raise InvariantError(
            f"preempt: {type(policy).__name__} answered {mode!r} for request {view.request_id} "
            f"with {filled} blocks to keep and {host_free} host blocks free; it answers 'swap' if "
            "they fit, or 'recompute'"
        )
    block_ids = state.leave_row(victim)
    victim.num_preemptions += 1
    state.emit(
        now,
        "preempt",
        view.request_id,
        mode=mode,
        blocks=view.num_blocks,
        context_tokens=view.context_len,
        num_preemptions=victim.num_preemptions,
    )
    moves = []
    if mode == "swap" and filled:
        state.host_pool, host_ids, _ = block_pool.allocate(state.host_pool, np.array([filled]))
        victim.status, victim.host_block_ids = Status.SWAPPED, host_ids
        victim.num_swaps += 1
        moves.append(
            BlockMove(
                request_id=view.request_id,
                block_ids=block_ids[:filled],
                host_block_ids=host_ids,
            )
        )
        state.emit(now, "swap_out", view.request_id, blocks=filled)
    else:
        victim.status, victim.context_len = Status.WAITING, 0
        victim.num_registered, victim.prefix_chain = 0, None
    memory.drop_blocks(state, block_ids, now)
    state.enqueue(victim)
    return moves
