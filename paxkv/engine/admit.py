"""Admission as the scheduler applies it: who starts, what it shares, what it gets, who gives way."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paxkv.engine import memory
from paxkv.engine.placement import Placement, place
from paxkv.engine.preempt import (
    Cause,
    Preemptions,
    borrowers,
    choose_victim,
    may_be_preempted,
    preempt,
    view_of,
)
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import BlockCopy, BlockMove
from paxkv.errors import InvariantError
from paxkv.policies.view import QueueHead

Verdict = Literal["wait", "limit", "chunk", "context", "guarantee"]
_DECISIONS = ("wait", "chunk", "context", "guarantee")


@dataclass(slots=True)
class Admissions:
    """What admission did in a step.

    Attributes:
        swap_ins: What admitted sequences swap in.
        preempted: Who had to give way.
    """

    swap_ins: list[BlockMove] = field(default_factory=list)
    preempted: Preemptions = field(default_factory=Preemptions)


def admit_waiting(state: SchedulerState, take: np.ndarray, budget: int, now: float) -> Admissions:
    """Admit from the heads of the queues while rows, budget and blocks last.

    A head that does not fit stops admission, so that a large request is not passed for ever; only
    a tenant at its limit is passed over, and a tenant's claim to its reservation is heard.

    Args:
        state: Changed: admitted sequences enter rows and hold blocks.
        take: int32 `[row of the batch]`, tokens to compute in this step; filled in for new rows.
        budget: Tokens left for this step.
        now: Time of the step.
    """
    done = Admissions()
    schedule = state.config.schedule
    if not state.waiting or not schedule.joins(len(state.running)):
        return done
    whole_batch = not schedule.joins(1)  # then the batch is filled, whatever this step computes
    passed: set[str] = set()
    only_due = False
    while state.waiting and (budget > 0 or whole_batch):
        if not state.free_rows and not _somebody_may_yield(state):
            break
        sequence = _next(state, passed)
        if sequence is None:
            break
        tenant = sequence.request.tenant
        placement = place(state, sequence, budget)
        due = state.accounts.enabled and _is_due(state, sequence, placement)
        verdict: Verdict = "wait"
        if due or not only_due:
            verdict = _verdict(state, sequence, placement)
        while verdict == "wait":
            freed = _make_way(state, sequence, placement, due, take, done.preempted, now)
            if freed is None:
                break
            budget += freed
            placement = place(state, sequence, budget)
            verdict = _verdict(state, sequence, placement)
        if verdict in ("wait", "limit"):
            passed.add(tenant)
            only_due = only_due or verdict == "wait"
            if only_due and not state.accounts.enabled:
                break
            continue
        _start(state, sequence, placement, verdict, done, now)
        row = sequence.row
        remaining = int(state.rows.num_tokens[row] - state.rows.context_len[row])
        take[row] = min(remaining, budget)
        budget -= int(take[row])
    return done


def _next(state: SchedulerState, passed: set[str]) -> Sequence | None:
    """Return the head of the queue whose turn it is."""
    heads = [head for head in state.waiting.heads() if head.sequence.request.tenant not in passed]
    if not heads:
        return None
    if len(heads) == 1:
        return heads[0].sequence
    policy = state.config.schedule
    choice = policy.choose(
        [
            QueueHead(
                head.sequence.queued(),
                head.key,
                state.accounts.of(head.sequence.request.tenant).service_tokens,
            )
            for head in heads
        ]
    )
    if not 0 <= choice < len(heads):
        raise InvariantError(
            f"schedule: {type(policy).__name__} chose number {choice} of {len(heads)} heads"
        )
    return heads[choice].sequence


def _verdict(state: SchedulerState, sequence: Sequence, placement: Placement) -> Verdict:
    """Ask the admission policy, and check its answer against the pool."""
    need, policy = placement.need, state.config.admission
    if not state.free_rows or not memory.has_run(state, placement.run_blocks):
        return "wait"
    view = memory.pool_view(state, sequence)
    if sequence.num_preemptions >= state.config.max_preemptions:
        promisable = need.max_blocks <= min(view.promisable_blocks, view.available_blocks)
        return "guarantee" if promisable else "wait"
    answer = policy.choose(view, need)
    if answer not in _DECISIONS:
        raise InvariantError(
            f"admit: {type(policy).__name__} answered {answer!r} for request "
            f"{sequence.request.request_id}; an admission policy answers one of {_DECISIONS}"
        )
    if answer == "wait":
        return "wait"
    wanted = _wanted(state, placement, answer)
    if wanted + need.revived_blocks > view.available_blocks:
        raise InvariantError(
            f"admit: {type(policy).__name__} admitted request {sequence.request.request_id}, which "
            f"needs {wanted + need.revived_blocks} blocks, with {view.available_blocks} available"
        )
    if answer == "guarantee" and need.max_blocks > view.promisable_blocks:
        raise InvariantError(
            f"admit: {type(policy).__name__} promised {need.max_blocks} blocks to request "
            f"{sequence.request.request_id}, with {view.promisable_blocks} to promise"
        )
    claim = need.max_blocks if answer == "guarantee" else _claim(state, sequence, placement)
    if state.accounts.enabled and claim > state.accounts.room(sequence.request.tenant):
        return "limit"
    return answer


def _wanted(state: SchedulerState, placement: Placement, verdict: Verdict) -> int:
    """Return the blocks that a start allocates at once."""
    if placement.run_blocks is not None:
        return placement.run_blocks
    ends = placement.chunk_ends if verdict == "chunk" else placement.context_ends
    return placement.new_blocks(ends, state.rows.sink_blocks)


def _claim(state: SchedulerState, sequence: Sequence, placement: Placement) -> int:
    """Return the blocks that a start adds to what its tenant holds."""
    shared = state.accounts.newly_held(sequence.request.tenant, placement.shared_ids)
    return placement.need.context_blocks + shared


def _is_due(state: SchedulerState, sequence: Sequence, placement: Placement) -> bool:
    claim = _claim(state, sequence, placement)
    return state.accounts.is_due(sequence.request.tenant, claim)


def _somebody_may_yield(state: SchedulerState) -> bool:
    return state.accounts.enabled or getattr(state.config.schedule, "preempt_to_admit", False)


def _make_way(
    state: SchedulerState,
    sequence: Sequence,
    placement: Placement,
    due: bool,
    take: np.ndarray,
    done: Preemptions,
    now: float,
) -> int | None:
    """Preempt one running request for a waiting one; returns the tokens it leaves to others.

    None where nobody has to give way, or where all who have to would not free enough.
    """
    cause: Cause = "reclaim"
    candidates = borrowers(state, sequence.request.tenant) if due else []
    if not candidates:
        cause, waiting = "displace", sequence.queued()
        candidates = [
            other
            for other in state.running
            if may_be_preempted(state, other)
            and state.config.schedule.displaces(waiting, view_of(state, other))
            and (
                not state.accounts.enabled
                or other.request.tenant == sequence.request.tenant
                or state.accounts.of(other.request.tenant).is_borrowing
            )
        ]
    need = placement.need
    short = need.context_blocks + need.revived_blocks - memory.available_to(state, sequence)
    freed = sum(view_of(state, other).exclusive_blocks for other in candidates)
    if not candidates or freed < short:
        return None
    victim = choose_victim(state, candidates, max(short, 1))
    tokens = int(take[victim.row])
    preempt(state, victim, take, done, cause, now)
    return tokens


def _start(
    state: SchedulerState,
    sequence: Sequence,
    placement: Placement,
    verdict: Verdict,
    done: Admissions,
    now: float,
) -> None:
    """Give a sequence a row and its blocks."""
    rows = state.rows
    swapped = sequence.status is Status.SWAPPED
    state.enter_row(sequence, placement.context_len)
    row = sequence.row
    if placement.run_blocks is not None:
        memory.fill_row_with_run(state, sequence, placement.run_blocks)
    else:
        _share(state, sequence, placement)
        ends = placement.chunk_ends if verdict == "chunk" else placement.context_ends
        memory.fill_row(state, sequence, ends, placement.starts, now)
    state.waiting.remove(sequence)
    if verdict == "guarantee":
        memory.promise(state, sequence)
    if len(placement.tails):
        first = placement.shared.shape[1]
        copy = BlockCopy(
            request_id=sequence.request.request_id,
            src=placement.tails,
            dst=rows.block_table[row, :, first].copy(),
        )
        state.step_copies.append(copy)
        leader = state.sequences[sequence.request.fork_of or ""]
        state.entered.add(leader.row)  # it keeps what is to be copied until that is done
    if sequence.first_scheduled_s is None:
        _count_first_entry(state, sequence, placement)
    if swapped:
        done.swap_ins.append(_swap_in(state, sequence, now))
    else:
        _continue_chain(state, sequence, placement)


def _share(state: SchedulerState, sequence: Sequence, placement: Placement) -> None:
    """Put the blocks that a sequence shares into its tables."""
    rows, row = state.rows, sequence.row
    rows.live_from[row] = placement.live_from
    rows.block_table[row, :, : placement.shared.shape[1]] = placement.shared
    if len(placement.shared_ids):
        memory.share_blocks(state, sequence, placement.shared_ids)


def _count_first_entry(state: SchedulerState, sequence: Sequence, placement: Placement) -> None:
    """Note what a sequence found in the cache, and charge its tenant for the rest."""
    prompt_len = len(sequence.request.prompt_token_ids)
    if sequence in state.unscheduled:
        return
    state.unscheduled.append(sequence)
    sequence.cached_prompt_tokens = min(placement.context_len, prompt_len)
    state.step_cached_tokens += sequence.cached_prompt_tokens
    state.charge(sequence.request.tenant, prompt_len - sequence.cached_prompt_tokens, 0)


def _continue_chain(state: SchedulerState, sequence: Sequence, placement: Placement) -> None:
    """Let a sequence register its blocks from where the shared ones end."""
    last = placement.shared[:, -1] if placement.shared.shape[1] else np.zeros(0, np.int32)
    sequence.num_registered = placement.shared.shape[1]
    sequence.prefix_chain = None
    if state.index is not None:
        for block_id in last.tolist():
            if block_id in state.index:
                sequence.prefix_chain = state.index.entry_of(block_id)


def _swap_in(state: SchedulerState, sequence: Sequence, now: float) -> BlockMove:
    """Return the move that brings a sequence's blocks back.

    Its blocks are new ones, so what it registered before the swap is no longer under its hold; it
    registers from there on only if its last registered block is still known.
    """
    host_ids = sequence.host_block_ids
    assert host_ids is not None
    sequence.host_block_ids = None
    state.host_release.append(host_ids)
    filled = -(-sequence.context_len // state.config.block_size)
    move = BlockMove(
        request_id=sequence.request.request_id,
        block_ids=state.rows.blocks(sequence.row, filled).copy(),
        host_block_ids=host_ids,
    )
    state.emit(now, "swap_in", move.request_id, blocks=len(host_ids))
    return move
