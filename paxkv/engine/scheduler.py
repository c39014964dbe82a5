"""The scheduler: pure decisions, no device. `schedule` makes the plan of a step, `commit` books it.

A step: running requests first, in the order of admission; each gets its remaining prompt or one
token, within the token budget. Where blocks lack, victims are preempted until it fits. Waiting
requests are admitted only if nothing was preempted in the step.
"""

from collections import Counter

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.engine import memory
from paxkv.engine.admit import admit_waiting
from paxkv.engine.preempt import Preemptions, blocks_to_grow, grow_one_by_one
from paxkv.engine.refuse import why_refused
from paxkv.engine.request import Sequence, Status
from paxkv.engine.state import SchedulerState
from paxkv.engine.step import RowBatch, Sampling, StepPlan, StepResult, no_rows
from paxkv.errors import InvariantError
from paxkv.metrics.records import FinishReason
from paxkv.workload.request import Request

_NO_ROWS = no_rows()


def submit(state: SchedulerState, request: Request, now: float) -> bool:
    """Queue a request, or refuse one that could never finish; returns whether it was queued.

    A refused request gets a record with `rejected` and the numbers that speak against it.
    """
    config, account = state.config, state.accounts.of(request.tenant)
    prompt_len = len(request.prompt_token_ids)
    total = min(prompt_len + request.max_tokens, config.max_model_len)
    problem = why_refused(state, request, total)
    priority = account.terms.priority
    sequence = Sequence(
        request=request,
        order=state.num_submitted,
        priority=request.priority if priority is None else priority,
        max_total_tokens=total,
        most_blocks=0 if problem else config.most_blocks(prompt_len, total),
        tokens=np.array(() if problem else request.prompt_token_ids, np.int32),
    )
    state.num_submitted += 1
    if problem:
        sequence.status = Status.FINISHED
        state.records.append(sequence.record("rejected", now, problem))
        state.emit(now, "reject", request.request_id, reason=problem)
        return False
    state.sequences[request.request_id] = sequence
    state.accounts.open(request.tenant)
    leader = state.sequences.get(request.fork_of or "")
    if leader is not None and not leader.token_times_s:
        state.held_forks.setdefault(leader.request.request_id, []).append(sequence)
    else:
        state.enqueue(sequence)
    return True


def abort(state: SchedulerState, request_id: str, now: float, message: str = "aborted") -> None:
    """End an unfinished request between two steps; its blocks come back, its record says `failed`.

    Raises:
        KeyError: No unfinished request has this id.
        InvariantError: A plan is being executed and may still write to the request's blocks.
    """
    if state.in_flight:
        raise InvariantError(f"abort {request_id}: commit the plan in flight first")
    sequence = state.sequences[request_id]
    held = state.held_forks.get(sequence.request.fork_of or "", [])
    if sequence.status is Status.RUNNING:
        memory.drop_row(state, sequence, now)
    elif sequence in held:
        held.remove(sequence)
    else:
        state.waiting.remove(sequence)
        if sequence.host_block_ids is not None:
            state.host_pool = block_pool.release(state.host_pool, sequence.host_block_ids)
            sequence.host_block_ids = None
    _finish(state, sequence, "failed", now, message)
    state.emit(now, "abort", request_id, reason=message)


def schedule(state: SchedulerState, now: float) -> StepPlan:
    """Decide the next step; the plan must be executed and committed before the next call.

    Raises:
        InvariantError: A policy decided something impossible, or no request can make progress.
    """
    if state.in_flight:
        raise InvariantError("schedule: the plan before has not been committed")
    state.step += 1
    state.step_cached_tokens = 0
    state.entered.clear()
    take = _share_budget(state)
    grown = _grow_running(state, take, now)
    swap_outs, swap_ins, state.step_preemptions = grown.moves, [], grown.count
    if not grown.count:
        memory.refresh_owed(state)
        budget = state.config.max_num_batched_tokens - int(take.sum())
        admitted = admit_waiting(state, take, budget, now)
        swap_outs, swap_ins = admitted.preempted.moves, admitted.swap_ins
        state.step_preemptions = admitted.preempted.count
    _note_first_scheduled(state, take, now)

    rows = state.running_rows
    rows = rows[take[rows] > 0]
    one = take[rows] == 1
    last = take[rows] == (state.rows.num_tokens - state.rows.context_len)[rows]
    decodes = one & last
    plan = StepPlan(
        step=state.step,
        swap_outs=tuple(swap_outs),
        swap_ins=tuple(swap_ins),
        copies=tuple(state.step_copies),
        prefills=_row_batch(state, rows[~decodes], take, last[~decodes]),
        decodes=_row_batch(state, rows[decodes], take, last[decodes]),
    )
    state.step_copies.clear()
    if plan.is_empty and state.has_work and not state.step_preemptions:
        raise InvariantError(
            f"step {state.step}: {len(state.waiting)} requests wait, none can run, and "
            f"{type(state.config.admission).__name__} admits none of them with "
            f"{state.spare_blocks} of {state.config.num_blocks} blocks held by nobody. "
            "Try admit=full_prompt."
        )
    state.in_flight = True
    return plan


def commit(state: SchedulerState, plan: StepPlan, result: StepResult, now: float) -> int:
    """Book what a plan computed; returns how many of its tokens had been computed before.

    Args:
        state: Changed: lengths and tokens grow, full blocks become findable, ended requests leave.
        plan: The plan that `schedule` returned last.
        result: What the executor brought back for it.
        now: When the tokens were there.
    """
    if not state.in_flight:
        raise InvariantError("commit: there is no plan in flight")
    state.in_flight = False
    for host_ids in state.host_release:
        state.host_pool = block_pool.release(state.host_pool, host_ids)
    state.host_release.clear()
    state.rates.add_step(
        duration_s=result.duration_s,
        prefill_tokens=len(plan.prefills.tokens),
        decode_tokens=plan.decodes.num_rows,
        copy_bytes=result.swap_bytes,
        copy_s=result.swap_s,
    )
    return _commit_batch(state, plan.prefills, result.prefill_tokens, now) + _commit_batch(
        state, plan.decodes, result.decode_tokens, now
    )


def unfinished(state: SchedulerState) -> list[Sequence]:
    """Return the sequences that have not ended, up to date, in the order of submission."""
    for sequence in state.running:
        state.save(sequence)
    return sorted(state.sequences.values(), key=lambda sequence: sequence.order)


def tokens_held(state: SchedulerState) -> int:
    """Return the tokens in live blocks, in each group; a block that several share counts once.

    Only full blocks are shared, so each extra hold on a block hides `block_size` tokens.
    """
    rows, at, size = state.rows, state.running_rows, state.config.block_size
    extra = int(rows.num_held(at).sum()) - int(block_pool.counts(state.pool).live)
    written = int(rows.context_len[at].sum()) * len(state.config.groups)
    return written - (int(rows.num_dead(at).sum()) + extra) * size


def _share_budget(state: SchedulerState) -> np.ndarray:
    """Deal the token budget to running rows in order; int32 `[row of the batch]`, 0 where idle."""
    rows = state.rows
    take = np.zeros(state.config.max_num_seqs, np.int32)
    order = state.running_rows
    remaining = rows.num_tokens[order] - rows.context_len[order]
    ahead = np.cumsum(remaining) - remaining
    take[order] = np.clip(state.config.max_num_batched_tokens - ahead, 0, remaining)
    return take


def _grow_running(state: SchedulerState, take: np.ndarray, now: float) -> Preemptions:
    """Give running rows the blocks that their tokens need, preempting where there are too few."""
    order = state.running_rows
    need = blocks_to_grow(state, order, take)
    growing = need.any(axis=1)
    if not growing.any() or memory.grow_all(state, order[growing], need[growing], now):
        return Preemptions()
    return grow_one_by_one(state, order[growing], need[growing], take, now)


def _note_first_scheduled(state: SchedulerState, take: np.ndarray, now: float) -> None:
    for sequence in tuple(state.unscheduled):
        if sequence.row >= 0 and take[sequence.row]:
            sequence.first_scheduled_s = now
            state.unscheduled.remove(sequence)


def _row_batch(
    state: SchedulerState, rows: np.ndarray, take: np.ndarray, samples: np.ndarray
) -> RowBatch:
    """Copy what an executor needs to know of some rows."""
    if not len(rows):
        return _NO_ROWS
    batch = state.rows
    query_lens, start = take[rows], batch.context_len[rows]
    place = np.arange(int(query_lens.sum())) - np.repeat(
        np.cumsum(query_lens) - query_lens, query_lens
    )
    width = int(batch.num_blocks[rows].max(initial=0))
    temperature = batch.temperature[rows]
    return RowBatch(
        rows=rows,
        tokens=batch.tokens[np.repeat(rows, query_lens), np.repeat(start, query_lens) + place],
        query_lens=query_lens,
        context_lens=start + query_lens,
        block_tables=batch.block_table[rows, :, :width],
        samples=samples,
        sampling=Sampling(
            temperature=temperature,
            top_p=batch.top_p[rows],
            seed=batch.seed[rows],
            output_index=batch.num_tokens[rows] - batch.prompt_len[rows],
            all_greedy=not temperature.any(),
        ),
    )


def _commit_batch(
    state: SchedulerState, batch: RowBatch, new_tokens: np.ndarray, now: float
) -> int:
    rows, at = state.rows, batch.rows
    sequences = state.sequences_at(at)
    if not len(at):
        return 0
    before = rows.context_len[at]
    again = np.maximum(np.minimum(batch.context_lens, rows.num_computed[at]) - before, 0)
    rows.context_len[at] = batch.context_lens
    rows.num_computed[at] = np.maximum(rows.num_computed[at], batch.context_lens)
    for place in np.flatnonzero(again):
        sequences[place].recomputed_tokens += int(again[place])

    size = state.config.block_size
    filled = np.flatnonzero(batch.context_lens // size > before // size)
    memory.register_full_blocks(state, [sequences[place] for place in filled])

    memory.drop_unseen_blocks(state, at, now)

    places = np.flatnonzero(batch.samples)
    sampled, tokens = at[places], new_tokens[places]
    drawn = [sequences[place] for place in places.tolist()]
    for sequence in drawn:
        sequence.token_times_s.append(now)
    _charge_outputs(state, drawn)
    full = rows.num_tokens[sampled] + 1 == rows.max_total_tokens[sampled]
    stop = np.zeros(len(tokens), bool)
    for eos in state.config.eos_token_ids:  # a few compares; np.isin takes 100 µs
        stop |= tokens == eos
    stop &= ~rows.ignore_eos[sampled]
    rows.tokens[sampled, rows.num_tokens[sampled]] = tokens
    rows.num_tokens[sampled] += 1
    for place, stopped in zip(places[full | stop], stop[full | stop], strict=True):
        sequence = sequences[place]
        memory.drop_row(state, sequence, now)
        _finish(state, sequence, "stop" if stopped else "length", now)
    return int(again.sum())


def _finish(
    state: SchedulerState, sequence: Sequence, reason: FinishReason, now: float, message: str = ""
) -> None:
    sequence.status = Status.FINISHED
    request = sequence.request
    del state.sequences[request.request_id]
    state.accounts.of(request.tenant).unfinished -= 1
    if sequence in state.unscheduled:
        state.unscheduled.remove(sequence)
    if reason in ("stop", "length"):
        state.ended_output_tokens += len(sequence.tokens) - len(request.prompt_token_ids)
        state.ended_limit_tokens += sequence.max_total_tokens - len(request.prompt_token_ids)
    _release_forks(state, request.request_id)
    state.records.append(sequence.record(reason, now, message))


def _release_forks(state: SchedulerState, leader_id: str) -> None:
    """Queue the samples that waited for a prompt: it is computed, or never will be."""
    for sequence in state.held_forks.pop(leader_id, ()):
        state.enqueue(sequence)


def _charge_outputs(state: SchedulerState, sequences: list[Sequence]) -> None:
    """Charge tenants for one output token of each sequence, and let samples of a prompt start."""
    if state.accounts.single:
        by_tenant = {state.accounts.single: len(sequences)}
    else:
        by_tenant = Counter(sequence.request.tenant for sequence in sequences)
    for tenant, count in by_tenant.items():
        state.charge(tenant, 0, count)
    if state.held_forks:
        for sequence in sequences:
            _release_forks(state, sequence.request.request_id)
