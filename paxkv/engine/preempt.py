"""Preemption as the scheduler applies it: victims give their blocks back until the rest fits."""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.cache.layout import blocks_needed
from paxkv.engine import memory
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import BlockMove
from paxkv.errors import InvariantError
from paxkv.policies.view import HostView, RequestView

Cause = Literal["growth", "limit", "reclaim", "displace"]
"""Why a request was preempted: a running one needs blocks, or its tenant's limit is reached; a
tenant claims its reservation; a more urgent request waits."""


@dataclass(slots=True)
class Preemptions:
    """What was preempted in a step.

    Attributes:
        count: Requests.
        moves: The swap-outs they need.
    """

    count: int = 0
    moves: list[BlockMove] = field(default_factory=list)


def grow_one_by_one(
    state: SchedulerState, rows: np.ndarray, need: np.ndarray, take: np.ndarray, now: float
) -> Preemptions:
    """Give running rows their blocks in order, preempting victims where the pool is short.

    Every preemption takes one request out of the batch, so there are at most as many as rows.

    Args:
        state: Changed.
        rows: int [n], the rows that need blocks.
        need: int [n, group], how many.
        take: int32 `[row of the batch]`, tokens to compute in this step; set to 0 where preempted.
        now: Time of the step.
    """
    done = Preemptions()
    for sequence, counts in zip(state.sequences_at(rows), need, strict=True):
        total = int(counts.sum())
        while sequence.row >= 0:
            short, cause = _shortage(state, sequence, total)
            if short <= 0:
                memory.grow_rows(state, np.array([sequence.row]), counts[None], now)
                break
            victim = choose_victim(state, _candidates(state, sequence, cause), short)
            preempt(state, victim, take, done, cause, now)
    return done


def blocks_to_grow(state: SchedulerState, rows: np.ndarray, take: np.ndarray) -> np.ndarray:
    """Return the blocks `[row, group]` that rows need for the tokens they compute in this step."""
    batch = state.rows
    ends = blocks_needed(batch.context_len[rows] + take[rows], state.config.block_size)
    need = np.maximum(ends[:, None] - batch.num_blocks[rows], 0)
    return np.where(take[rows, None] > 0, need, 0)


def choose_victim(
    state: SchedulerState, candidates: Several[Sequence], need_blocks: int
) -> Sequence:
    """Ask the victim policy, and check that it names one of the requests it was offered."""
    views = [view_of(state, sequence) for sequence in candidates]
    policy = state.config.victim
    chosen = policy.choose(views, need_blocks) if views else None
    for view, sequence in zip(views, candidates, strict=True):
        if view is chosen or view == chosen:
            return sequence
    raise InvariantError(
        f"victim: {type(policy).__name__} chose {chosen!r}, which is none of the "
        f"{len(views)} running requests it was offered"
    )


def view_of(state: SchedulerState, sequence: Sequence) -> RequestView:
    """Return a running sequence as policies see it."""
    rows, row = state.rows, sequence.row
    blocks, context_len = rows.blocks(row), int(rows.context_len[row])
    return sequence.view(
        num_tokens=int(rows.num_tokens[row]),
        context_len=context_len,
        num_blocks=len(blocks),
        filled_blocks=len(_filled(state, row)),
        exclusive_blocks=int((state.pool.ref_counts[blocks] == 1).sum()),
    )


def may_be_preempted(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a running sequence may be: it is promised nothing and did not enter in this step.

    What a row swaps in or copies in a step is not there before the step runs, so it cannot be
    swapped out in it.
    """
    return (
        state.config.preemption.preempts
        and not sequence.promised_blocks
        and sequence.row not in state.entered
    )


def may_yield_to(state: SchedulerState, sequence: Sequence, tenant: str) -> bool:
    """Whether a running sequence may be preempted for a tenant's sake.

    Another tenant's may not while that one is within its reservation.
    """
    accounts, own = state.accounts, sequence.request.tenant
    return may_be_preempted(state, sequence) and (
        not accounts.enabled or own == tenant or accounts.of(own).is_borrowing
    )


def preempt(
    state: SchedulerState,
    victim: Sequence,
    take: np.ndarray,
    done: Preemptions,
    cause: Cause,
    now: float,
) -> None:
    """Take a victim's blocks; it waits again, swapped to host memory or to be recomputed."""
    policy = state.config.preemption
    view = view_of(state, victim)
    host = _host_view(state)
    decision = policy.choose(view, host)
    kept = _filled(state, victim.row).copy()
    mode = getattr(decision, "mode", decision)
    if mode not in ("swap", "recompute") or (mode == "swap" and len(kept) > host.free_blocks):
        raise InvariantError(
            f"preempt: {type(policy).__name__} answered {mode!r} for request {view.request_id} "
            f"with {len(kept)} blocks to keep and {host.free_blocks} host blocks free; it answers "
            "'swap' if they fit, or 'recompute'"
        )
    take[victim.row] = 0
    victim.num_preemptions += 1
    done.count += 1
    state.emit(
        now,
        "preempt",
        view.request_id,
        mode=mode,
        cause=cause,
        blocks=view.num_blocks,
        context_tokens=view.context_len,
        num_preemptions=victim.num_preemptions,
        recompute_s=decision.recompute_s,
        swap_s=decision.swap_s,
    )
    memory.drop_row(state, victim, now)
    if mode == "swap" and len(kept):
        state.host_pool, host_ids, _ = block_pool.allocate(state.host_pool, np.array([len(kept)]))
        victim.status, victim.host_block_ids = Status.SWAPPED, host_ids
        victim.context_len = state.config.movable_tokens(victim.context_len)
        victim.num_swaps += 1
        done.moves.append(
            BlockMove(request_id=view.request_id, block_ids=kept, host_block_ids=host_ids)
        )
        state.emit(now, "swap_out", view.request_id, blocks=len(kept))
    else:
        victim.status, victim.context_len, victim.live_from = Status.WAITING, 0, None
        victim.num_registered, victim.prefix_chain = 0, None
    state.enqueue(victim)


def borrowers(state: SchedulerState, tenant: str) -> list[Sequence]:
    """Return the requests that must give way when a tenant claims what is reserved for it."""
    return [
        sequence
        for sequence in state.running
        if sequence.request.tenant != tenant and may_yield_to(state, sequence, tenant)
    ]


def _shortage(state: SchedulerState, sequence: Sequence, need: int) -> tuple[int, Cause]:
    """Return how many blocks lack for a running sequence to grow, 0 or less if none, and why."""
    tenant = sequence.request.tenant
    short = need - memory.available_to(state, sequence)
    if state.accounts.enabled and not sequence.promised_blocks:
        over = need - state.accounts.room(tenant)
        if over > 0:  # the tenant settles this among its own, which may leave enough
            return over, "limit"
        if short > 0 and state.accounts.is_due(tenant, need):
            return short, "reclaim"
    return short, "growth"


def _candidates(state: SchedulerState, sequence: Sequence, cause: Cause) -> list[Sequence]:
    """Return who may have to give way for a running sequence, itself included."""
    tenant = sequence.request.tenant
    if cause == "reclaim":
        others = borrowers(state, tenant)
        if others:
            return others
    candidates = [s for s in state.running if may_yield_to(state, s, tenant)]
    if cause == "limit":
        return [s for s in candidates if s.request.tenant == tenant]
    return candidates


def _filled(state: SchedulerState, row: int) -> np.ndarray:
    """Return the blocks of a row that hold tokens, those aside whose content stays in the row."""
    tokens = state.config.movable_tokens(int(state.rows.context_len[row]))
    end = blocks_needed(tokens, state.config.block_size)
    return state.rows.blocks(row, end)


def _host_view(state: SchedulerState) -> HostView:
    return HostView(
        free_blocks=int(state.host_pool.num_free),
        bytes_per_block=state.config.bytes_per_block,
        copy_bytes_per_s=state.rates.copy_bytes_per_s,
        prefill_tokens_per_s=state.rates.prefill_tokens_per_s,
        num_others=len(state.running) - 1,
    )
