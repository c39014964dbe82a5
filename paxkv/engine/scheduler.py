"""The scheduler: pure decisions, no device. `schedule` makes the plan of a step, `commit` books it.

A step: running requests first, in the order of admission; each gets its remaining prompt or one
token, within the token budget. Where blocks lack, victims are preempted until it fits. Waiting
requests are admitted only if nothing was preempted in the step.
"""

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.cache.layout import blocks_needed
from paxkv.engine import memory
from paxkv.engine.admit import admit_waiting
from paxkv.engine.preempt import make_room
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
    prompt_len = len(request.prompt_token_ids)
    total = min(prompt_len + request.max_tokens, state.config.max_model_len)
    problem = _refusal(state, request, prompt_len, total)
    sequence = Sequence(
        request=request,
        order=state.num_submitted,
        max_total_tokens=total,
        tokens=np.array(() if problem else request.prompt_token_ids, np.int32),
    )
    state.num_submitted += 1
    if problem:
        sequence.status = Status.FINISHED
        state.records.append(sequence.record("rejected", now, problem))
        state.emit(now, "reject", request.request_id, reason=problem)
        return False
    state.sequences[request.request_id] = sequence
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
    if sequence.status is Status.RUNNING:
        memory.drop_blocks(state, state.leave_row(sequence), now)
    else:
        state.waiting = [entry for entry in state.waiting if entry[1] is not sequence]
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
    take = _share_budget(state)
    num_preempted, swap_outs = _grow_running(state, take, now)
    swap_ins = ()
    if not num_preempted:
        budget = state.config.max_num_batched_tokens - int(take.sum())
        swap_ins = admit_waiting(state, take, budget, now)
    state.step_preemptions = num_preempted

    rows = state.running_rows
    rows = rows[take[rows] > 0]
    one = take[rows] == 1
    last = take[rows] == (state.rows.num_tokens - state.rows.context_len)[rows]
    decodes = one & last
    plan = StepPlan(
        step=state.step,
        swap_outs=swap_outs,
        swap_ins=swap_ins,
        prefills=_row_batch(state, rows[~decodes], take, last[~decodes]),
        decodes=_row_batch(state, rows[decodes], take, last[decodes]),
    )
    if plan.is_empty and state.has_work and not num_preempted:
        raise InvariantError(
            f"step {state.step}: {len(state.waiting)} requests wait, none can run, and "
            f"{type(state.config.admission).__name__} admits none of them with "
            f"{state.available_blocks} of {state.config.num_blocks} blocks available. "
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
    return _commit_batch(state, plan.prefills, result.prefill_tokens, now) + _commit_batch(
        state, plan.decodes, result.decode_tokens, now
    )


def unfinished(state: SchedulerState) -> list[Sequence]:
    """Return the sequences that have not ended, up to date, in the order of submission."""
    for sequence in state.running:
        state.save(sequence)
    return sorted(state.sequences.values(), key=lambda sequence: sequence.order)


def tokens_held(state: SchedulerState) -> int:
    """Return the tokens in live blocks; a block that several requests share counts once.

    Only full blocks are shared, so each extra hold on a block hides `block_size` tokens.
    """
    rows = state.running_rows
    holds = int(state.rows.num_blocks[rows].sum())
    extra = holds - int(block_pool.counts(state.pool).live)
    return int(state.rows.context_len[rows].sum()) - extra * state.config.block_size


def _refusal(state: SchedulerState, request: Request, prompt_len: int, total: int) -> str:
    """Return why a request can never be served, or an empty string."""
    config = state.config
    if request.request_id in state.sequences:
        return f"request_id={request.request_id}: a request with this id is still unfinished"
    if prompt_len == 0:
        return "the prompt is empty; at least one token is needed"
    if request.max_tokens < 1:
        return f"max_tokens={request.max_tokens}: at least 1 is needed"
    if max(request.prompt_token_ids) >= config.vocab_size or min(request.prompt_token_ids) < 0:
        return f"a prompt token lies outside the vocabulary of {config.vocab_size}"
    if prompt_len >= config.max_model_len:
        return (
            f"prompt of {prompt_len} tokens: with one output token it passes "
            f"engine.max_model_len={config.max_model_len}"
        )
    usable = config.num_blocks * config.block_size
    if total > usable:
        return (
            f"prompt of {prompt_len} and up to {total - prompt_len} output tokens: the pool holds "
            f"{usable} tokens ({config.num_blocks} blocks of {config.block_size}); "
            "raise cache.num_blocks or lower max_tokens"
        )
    return ""


def _share_budget(state: SchedulerState) -> np.ndarray:
    """Deal the token budget to running rows in order; int32 `[row of the batch]`, 0 where idle."""
    rows = state.rows
    take = np.zeros(state.config.max_num_seqs, np.int32)
    order = state.running_rows
    remaining = rows.num_tokens[order] - rows.context_len[order]
    ahead = np.cumsum(remaining) - remaining
    take[order] = np.clip(state.config.max_num_batched_tokens - ahead, 0, remaining)
    return take


def _grow_running(state: SchedulerState, take: np.ndarray, now: float):
    """Give running rows the blocks that their tokens need; returns preemptions and swap-outs."""
    rows = state.rows
    order = state.running_rows
    after = blocks_needed(rows.context_len[order] + take[order], state.config.block_size)
    need = np.maximum(after - rows.num_blocks[order], 0)
    total = int(need.sum())
    if total > state.available_blocks:
        return make_room(state, take, now)
    if total:
        rows.append_blocks(order, need, memory.take_blocks(state, need, now))
    return 0, ()


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
        block_tables=batch.block_table[rows, :width],
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

    places = np.flatnonzero(batch.samples)
    sampled, tokens = at[places], new_tokens[places]
    for place in places.tolist():
        sequences[place].token_times_s.append(now)
    full = rows.num_tokens[sampled] + 1 == rows.max_total_tokens[sampled]
    stop = np.zeros(len(tokens), bool)
    for eos in state.config.eos_token_ids:  # a few compares; np.isin takes 100 µs
        stop |= tokens == eos
    stop &= ~rows.ignore_eos[sampled]
    rows.tokens[sampled, rows.num_tokens[sampled]] = tokens
    rows.num_tokens[sampled] += 1
    for place, stopped in zip(places[full | stop], stop[full | stop], strict=True):
        sequence = sequences[place]
        memory.drop_blocks(state, state.leave_row(sequence), now)
        _finish(state, sequence, "stop" if stopped else "length", now)
    return int(again.sum())


def _finish(
    state: SchedulerState, sequence: Sequence, reason: FinishReason, now: float, message: str = ""
) -> None:
    sequence.status = Status.FINISHED
    del state.sequences[sequence.request.request_id]
    state.records.append(sequence.record(reason, now, message))
