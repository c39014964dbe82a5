"""Admission as the scheduler applies it: who starts, with which blocks, and who gives way."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from paxkv.engine import memory
from paxkv.engine.placement import Placement, place
from paxkv.engine.preempt import (
    Cause,
    Preemptions,
    borrowers,
    choose_victim,
    may_yield_to,
    preempt,
    view_of,
)
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import BlockCopy, BlockMove
from paxkv.errors import InvariantError
from paxkv.policies.admission import AdmissionDecision, AdmissionNeed
from paxkv.policies.view import PoolView, QueueHead

Verdict = AdmissionDecision | Literal["limit"]
_DECISIONS = ("wait", "chunk", "context", "guarantee")


@dataclass(slots=True)
class Admissions:
    """What admission did in a step.

    Attributes:
        budget: Tokens left to compute in the step.
        swap_ins: What admitted sequences swap in.
        preempted: Who had to give way.
    """

    budget: int
    swap_ins: list[BlockMove] = field(default_factory=list)
    preempted: Preemptions = field(default_factory=Preemptions)


def admit_waiting(state: SchedulerState, take: np.ndarray, budget: int, now: float) -> Admissions:
    """Admit from the heads of the queues while rows, budget and blocks last.

    Tenants that claim what is reserved for them are heard first, since what others borrow in this
    step could not be taken back in it; while such a claim waits, nobody borrows. After that a head
    that does not fit stops admission, so that a large request is not passed for ever. A tenant at
    its limit is passed over.

    Args:
        state: Changed: admitted sequences enter rows and hold blocks.
        take: int32 `[row of the batch]`, tokens to compute in this step; filled in for new rows.
        budget: Tokens left for this step.
        now: Time of the step.
    """
    done = Admissions(budget)
    if not state.waiting or not state.config.schedule.joins(len(state.running)):
        return done
    waits = state.accounts.enabled and _admit_heads(state, take, done, now, claims=True)
    if not waits:
        _admit_heads(state, take, done, now, claims=False)
    return done


def _admit_heads(
    state: SchedulerState, take: np.ndarray, done: Admissions, now: float, *, claims: bool
) -> bool:
    """Admit the heads whose turn it is; returns whether one has to wait.

    With `claims` all tenants are heard that claim what is reserved for them, and nobody else;
    without, the first head that has to wait ends it.
    """
    whole_batch = not state.config.schedule.joins(1)  # then it is filled, whatever a step computes
    accounts, waits = state.accounts, False
    passed = {a.name for a in accounts.all() if not accounts.is_due(a.name, 1)} if claims else set()
    while state.waiting and (done.budget > 0 or whole_batch):
        if not state.free_rows and not _somebody_may_yield(state):
            break
        sequence = _next(state, passed)
        if sequence is None:
            break
        tenant = sequence.request.tenant
        placement = place(state, sequence, done.budget)
        if claims and not accounts.is_due(tenant, _claim(state, sequence, placement)):
            passed.add(tenant)
            continue
        verdict = _verdict(state, sequence, placement)
        while verdict == "wait" and _make_way(state, sequence, placement, claims, take, done, now):
            placement = place(state, sequence, done.budget)
            verdict = _verdict(state, sequence, placement)
        if verdict in ("wait", "limit"):
            passed.add(tenant)
            waits = waits or verdict == "wait"
            if waits and not claims:
                break
            continue
        _start(state, sequence, placement, verdict, done, now)
        row = sequence.row
        take[row] = min(int(state.rows.num_tokens[row] - state.rows.context_len[row]), done.budget)
        done.budget -= int(take[row])
    return waits


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
    """Ask the admission policy, and check its answer against the pool and the tenant's limit."""
    need, tenant = placement.need, sequence.request.tenant
    claim = _claim(state, sequence, placement)
    if claim > state.accounts.room(tenant):
        return "limit"
    if not state.free_rows or not memory.has_run(state, placement.run_blocks):
        return "wait"
    view = memory.pool_view(state, sequence, claim)
    answer = _answer(state, sequence, view, need)
    if answer == "wait":
        return "wait"
    name = type(state.config.admission).__name__
    wanted = _wanted(state, placement, answer) + need.revived_blocks
    if wanted > view.available_blocks:
        raise InvariantError(
            f"admit: {name} admitted request {sequence.request.request_id}, which "
            f"needs {wanted} blocks, with {view.available_blocks} available"
        )
    if answer == "guarantee" and need.max_blocks > view.promisable_blocks:
        raise InvariantError(
            f"admit: {name} promised {need.max_blocks} blocks to request "
            f"{sequence.request.request_id}, with {view.promisable_blocks} to promise"
        )
    if answer == "guarantee" and need.max_blocks > state.accounts.room(tenant):
        return "limit"
    return answer


def _answer(
    state: SchedulerState, sequence: Sequence, view: PoolView, need: AdmissionNeed
) -> AdmissionDecision:
    """Return the policy's decision, or the engine's for a request that was preempted too often."""
    if _needs_promise(state, sequence):
        fits = need.max_blocks <= min(view.promisable_blocks, view.available_blocks)
        return "guarantee" if fits else "wait"
    policy = state.config.admission
    answer = policy.choose(view, need)
    if answer not in _DECISIONS:
        raise InvariantError(
            f"admit: {type(policy).__name__} answered {answer!r} for request "
            f"{sequence.request.request_id}; an admission policy answers one of {_DECISIONS}"
        )
    return answer


def _needs_promise(state: SchedulerState, sequence: Sequence) -> bool:
    return sequence.num_preemptions >= state.config.max_preemptions


def _wanted(state: SchedulerState, placement: Placement, verdict: Verdict) -> int:
    """Return the blocks that a start allocates at once."""
    if placement.run_blocks is not None:
        return placement.run_blocks
    ends = placement.chunk_ends if verdict == "chunk" else placement.context_ends
    return int(placement.new_blocks(ends, state.rows.sink_blocks).sum())


def _claim(state: SchedulerState, sequence: Sequence, placement: Placement) -> int:
    """Return the blocks that a start adds to what its tenant holds or has been promised."""
    if _needs_promise(state, sequence):
        return placement.need.max_blocks
    shared = state.accounts.newly_held(sequence.request.tenant, placement.shared_ids)
    return placement.need.context_blocks + shared


def _somebody_may_yield(state: SchedulerState) -> bool:
    return state.accounts.enabled or state.config.schedule.may_displace


def _make_way(
    state: SchedulerState,
    sequence: Sequence,
    placement: Placement,
    claims: bool,
    take: np.ndarray,
    done: Admissions,
    now: float,
) -> bool:
    """Preempt one running request for a waiting one; returns whether it did.

    Nobody gives way where it would not do even if all did who have to.
    """
    cause, candidates = _who_gives_way(state, sequence, claims)
    if not candidates or not _would_do(state, sequence, placement, candidates):
        return False
    need, promised = placement.need, _needs_promise(state, sequence)
    wanted = need.max_blocks if promised else need.context_blocks + need.revived_blocks
    short = wanted - memory.available_to(state, sequence)
    victim = choose_victim(state, candidates, max(short, 0))
    done.budget += int(take[victim.row])
    preempt(state, victim, take, done.preempted, cause, now)
    return True


def _who_gives_way(
    state: SchedulerState, sequence: Sequence, claims: bool
) -> tuple[Cause, list[Sequence]]:
    """Return the running requests that have to give way to a waiting one, and why."""
    tenant, waiting = sequence.request.tenant, sequence.queued()
    if claims and (candidates := borrowers(state, tenant)):
        return "reclaim", candidates
    if not state.config.schedule.may_displace:
        return "displace", []
    return "displace", [
        other
        for other in state.running
        if may_yield_to(state, other, tenant)
        and state.config.schedule.displaces(waiting, view_of(state, other))
    ]


def _would_do(
    state: SchedulerState,
    sequence: Sequence,
    placement: Placement,
    candidates: list[Sequence],
) -> bool:
    """Whether a waiting request would start if all candidates gave way."""
    rows = np.array([other.row for other in candidates])
    freed, view = (
        memory.exclusive_blocks(state, rows),
        memory.pool_view(state, sequence, _claim(state, sequence, placement)),
    )
    if not memory.has_run(state, placement.run_blocks, freed):
        return False
    open_tokens = state.rows.max_total_tokens[rows] - state.rows.num_tokens[rows]
    emptier = replace(
        view,
        available_blocks=view.available_blocks + len(np.setdiff1d(freed, placement.shared_ids)),
        num_running=view.num_running - len(candidates),
        running_open_tokens=view.running_open_tokens - int(open_tokens.sum()),
    )
    return _answer(state, sequence, emptier, placement.need) != "wait"


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
    found = min(placement.context_len, prompt_len)
    if placement.forked:
        sequence.forked_prompt_tokens = found
    else:
        sequence.cached_prompt_tokens = found
        state.step_cached_tokens += found
    state.charge(sequence.request.tenant, prompt_len - found, 0)


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
