"""Admission as the scheduler applies it: who starts, what it shares, what it gets."""

import numpy as np

from paxkv.cache.layout import blocks_needed
from paxkv.engine import memory
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import BlockMove
from paxkv.errors import InvariantError
from paxkv.policies.admission import AdmissionNeed


def admit_waiting(
    state: SchedulerState, take: np.ndarray, budget: int, now: float
) -> tuple[BlockMove, ...]:
    """Admit from the head of the queue while rows, budget and blocks last.

    Args:
        state: Changed: admitted sequences enter rows and hold the blocks of their whole context.
        take: int32 `[row of the batch]`, tokens to compute in this step; filled in for new rows.
        budget: Tokens left for this step.
        now: Time of the step.

    Returns:
        The swap-ins that admitted sequences need.
    """
    moves = []
    while state.waiting and state.free_rows and budget > 0:
        _, sequence = state.waiting[0]
        hits = _prefix_hits(state, sequence)
        if not _fits(state, sequence, hits):
            break
        state.waiting.pop(0)
        move = _start(state, sequence, hits, now)
        if move is not None:
            moves.append(move)
        row = sequence.row
        remaining = int(state.rows.num_tokens[row] - state.rows.context_len[row])
        take[row] = min(remaining, budget)
        budget -= int(take[row])
    return tuple(moves)


def _prefix_hits(state: SchedulerState, sequence: Sequence) -> np.ndarray:
    """Return the cached blocks a sequence can share; the last token is always left to compute."""
    if state.index is None or sequence.status is Status.SWAPPED:
        return np.zeros(0, np.int32)
    hits = state.index.match(sequence.tokens, limit_tokens=len(sequence.tokens) - 1)
    return np.array(hits, np.int32)


def _fits(state: SchedulerState, sequence: Sequence, hits: np.ndarray) -> bool:
    """Ask the admission policy, and check its answer against the pool."""
    need = AdmissionNeed(
        context_tokens=len(sequence.tokens),
        new_blocks=blocks_needed(len(sequence.tokens), state.config.block_size) - len(hits),
        revived_blocks=memory.count_evictable(state, hits),
    )
    policy = state.config.admission
    answer = policy.choose(state.pool_view(), need)
    if answer not in (True, False):
        raise InvariantError(
            f"admit: {type(policy).__name__} answered {answer!r} for request "
            f"{sequence.request.request_id}; an admission policy answers True or False"
        )
    if answer and need.new_blocks + need.revived_blocks > state.available_blocks:
        raise InvariantError(
            f"admit: {type(policy).__name__} admitted request {sequence.request.request_id}, which "
            f"needs {need.new_blocks + need.revived_blocks} blocks, with "
            f"{state.available_blocks} available"
        )
    return bool(answer)


def _start(
    state: SchedulerState, sequence: Sequence, hits: np.ndarray, now: float
) -> BlockMove | None:
    """Give a sequence a row and the blocks of its whole context; returns the swap-in it needs."""
    size = state.config.block_size
    swapped = sequence.status is Status.SWAPPED
    context_len = sequence.context_len if swapped else len(hits) * size
    state.enter_row(sequence, context_len)
    rows, row = state.rows, np.array([sequence.row])
    if len(hits):
        memory.share_blocks(state, hits)
        rows.append_blocks(row, np.array([len(hits)]), hits)
    counts = np.array([blocks_needed(len(sequence.tokens), size) - len(hits)])
    rows.append_blocks(row, counts, memory.take_blocks(state, counts, now))
    if sequence.first_scheduled_s is None:
        sequence.first_scheduled_s = now
        prompt_len = len(sequence.request.prompt_token_ids)
        sequence.cached_prompt_tokens = min(context_len, prompt_len)
        state.step_cached_tokens += sequence.cached_prompt_tokens
    if not swapped:
        sequence.num_registered = len(hits)
        sequence.prefix_chain = (
            state.index.entry_of(int(hits[-1])) if state.index is not None and len(hits) else None
        )
        return None
    # Its blocks are new ones, so what it registered before the swap is no longer under its hold;
    # it registers from there on only if its last registered block is still known.
    host_ids = sequence.host_block_ids
    assert host_ids is not None
    sequence.host_block_ids = None
    state.host_release.append(host_ids)
    move = BlockMove(
        request_id=sequence.request.request_id,
        block_ids=rows.blocks(sequence.row)[: len(host_ids)].copy(),
        host_block_ids=host_ids,
    )
    state.emit(now, "swap_in", move.request_id, blocks=len(host_ids))
    return move
