"""The scheduler's hand on the device blocks: pool, tables, index, evictable set and accounts.

These functions change the state. They are the only code that does so with its pool.
"""

from collections.abc import Iterator

import numpy as np

from paxkv.blocks import pool as block_pool
from paxkv.blocks.evictable import CachedBlock
from paxkv.blocks.runs import allocate_run, largest_free_run
from paxkv.engine.request import Sequence
from paxkv.engine.state import SchedulerState
from paxkv.errors import InvariantError, OutOfBlocks
from paxkv.policies.view import PoolView

_NO_IDS = np.zeros(0, np.int32)


def available_to(state: SchedulerState, sequence: Sequence) -> int:
    """Return the blocks that a sequence may take now; negative where promises exceed what is left.

    Spare blocks, less what other requests have been promised and do not hold yet, less the cached
    blocks within other tenants' reservations.
    """
    owed = refresh_owed(state)
    if sequence.row >= 0 and sequence.promised_blocks:
        owed -= max(sequence.promised_blocks - int(state.rows.num_held(_row(sequence))[0]), 0)
    return state.spare_blocks - owed - state.accounts.protected_from(sequence.request.tenant)


def refresh_owed(state: SchedulerState) -> int:
    """Bring the accounts up to date with what is promised but not held; returns the sum."""
    rows, at = state.rows, state.running_rows
    promised = rows.promised[at]
    if not promised.any():
        for account in state.accounts.all():
            account.owed_blocks = 0
        return 0
    owed = np.where(promised > 0, np.maximum(promised - rows.num_held(at), 0), 0)
    by_tenant: dict[str, int] = {}
    for sequence, blocks in zip(state.running, owed.tolist(), strict=True):
        tenant = sequence.request.tenant
        by_tenant[tenant] = by_tenant.get(tenant, 0) + blocks
    for account in state.accounts.all():
        account.owed_blocks = by_tenant.get(account.name, 0)
    return int(owed.sum())


def pool_view(state: SchedulerState, sequence: Sequence, claim_blocks: int) -> PoolView:
    """Return the pool as the admission policy sees it for a sequence that claims so many blocks."""
    rows, at = state.rows, state.running_rows
    return PoolView(
        num_blocks=state.config.num_blocks,
        available_blocks=available_to(state, sequence),
        promisable_blocks=state.accounts.promisable(sequence.request.tenant),
        num_running=len(state.running),
        block_size=state.config.block_size,
        num_groups=len(state.config.groups),
        is_due=state.accounts.is_due(sequence.request.tenant, claim_blocks),
        # What is reserved in advance needs no blocks any more.
        running_open_tokens=0
        if state.config.allocator.contiguous
        else int((rows.max_total_tokens[at] - rows.num_tokens[at]).sum()),
        ended_output_tokens=state.ended_output_tokens,
        ended_limit_tokens=state.ended_limit_tokens,
    )


def promise(state: SchedulerState, sequence: Sequence) -> None:
    """Promise a running sequence the most blocks it can ever hold; then it is never preempted."""
    sequence.promised_blocks = sequence.most_blocks
    state.rows.promised[sequence.row] = sequence.most_blocks
    state.accounts.of(sequence.request.tenant).guaranteed_blocks += sequence.most_blocks
    refresh_owed(state)


def grow_rows(state: SchedulerState, rows: np.ndarray, counts: np.ndarray, now: float) -> None:
    """Append new blocks to the tables of rows, evicting cached blocks where none are free.

    Args:
        state: Changed.
        rows: int [n]; of one tenant where tenants are accounted for.
        counts: int [n, group].
        now: Time for the events.

    Raises:
        OutOfBlocks: More is asked for than there is; nothing has changed.
    """
    ids = _take(state, state.sequences_at(rows[:1])[0], counts.ravel(), now)
    state.rows.append_blocks(rows, counts, ids)


def grow_all(state: SchedulerState, rows: np.ndarray, counts: np.ndarray, now: float) -> bool:
    """Append new blocks to tables if nobody has to give way for any; returns whether it did.

    Args:
        state: Changed where it did.
        rows: int [n], running rows.
        counts: int [n, group].
        now: Time for the events.
    """
    owed, accounts = refresh_owed(state), state.accounts
    unpromised = np.where(state.rows.promised[rows] > 0, 0, counts.sum(axis=1))
    if int(unpromised.sum()) > state.spare_blocks - owed - accounts.protected_from(None):
        return False
    if not accounts.enabled:
        grow_rows(state, rows, counts, now)
        return True
    by_tenant: dict[str, list[int]] = {}
    for place, sequence in enumerate(state.sequences_at(rows)):
        by_tenant.setdefault(sequence.request.tenant, []).append(place)
    if any(unpromised[at].sum() > accounts.room(tenant) for tenant, at in by_tenant.items()):
        return False
    for at in by_tenant.values():
        grow_rows(state, rows[at], counts[at], now)
    return True


def fill_row(
    state: SchedulerState, sequence: Sequence, ends: np.ndarray, starts: np.ndarray, now: float
) -> None:
    """Give a sequence that enters its row new blocks, in each group from `starts` to `ends`.

    Places that its window has left behind stay empty.
    """
    rows, row = state.rows, sequence.row
    places = []
    for group, sinks in enumerate(rows.sink_blocks.tolist()):
        place = np.arange(starts[group], ends[group])
        places.append(place[(place < sinks) | (place >= rows.live_from[row, group])])
    counts = np.array([len(place) for place in places])
    ids = _take(state, sequence, counts, now)
    for group, place in enumerate(places):
        rows.block_table[row, group, place] = ids[: len(place)]
        ids = ids[len(place) :]
    rows.num_blocks[row] = ends


def has_run(state: SchedulerState, count: int | None, also: np.ndarray = _NO_IDS) -> bool:
    """Whether so many free blocks lie side by side, or would with others; None needs no run."""
    return count is None or largest_free_run(state.pool, also) >= count


def fill_row_with_run(state: SchedulerState, sequence: Sequence, count: int) -> None:
    """Give a sequence that enters its row blocks side by side.

    Raises:
        OutOfBlocks: There is no such run; nothing has changed.
    """
    pool, ids = allocate_run(state.pool, count)
    if ids is None:
        raise OutOfBlocks(f"{count} blocks side by side asked for")
    state.pool = pool
    state.accounts.hold(sequence.request.tenant, ids)
    state.rows.block_table[sequence.row, 0, :count] = ids
    state.rows.num_blocks[sequence.row] = count


def share_blocks(state: SchedulerState, sequence: Sequence, ids: np.ndarray) -> None:
    """Add a sequence as a holder of cached or live blocks."""
    if state.index is not None:
        state.index.count_use([block_id for block_id in ids.tolist() if block_id in state.index])
    _uncache(state, ids[block_pool.evictable(state.pool, ids)].tolist())
    state.pool = block_pool.share(state.pool, ids)
    state.accounts.hold(sequence.request.tenant, ids)


def exclusive_blocks(state: SchedulerState, rows: np.ndarray) -> np.ndarray:
    """Return the blocks that only these rows hold, which they would leave together."""
    ids, holds = np.unique(
        np.concatenate([state.rows.blocks(row) for row in rows.tolist()]), return_counts=True
    )
    return ids[state.pool.ref_counts[ids] == holds]


def count_evictable(state: SchedulerState, ids: np.ndarray) -> int:
    """Return how many of the blocks are cached and held by nobody."""
    return int(block_pool.evictable(state.pool, ids).sum())


def drop_blocks(state: SchedulerState, sequence: Sequence, ids: np.ndarray, now: float) -> None:
    """Give up a sequence's hold on blocks, the last block first.

    The prefix index keeps what it can find; so the start of a prompt outlives its end.
    """
    ids = ids[::-1].copy()  # the pool may keep the array; a row's table will change
    tenant = sequence.request.tenant
    state.pool = block_pool.release(state.pool, ids)
    state.accounts.drop(tenant, ids)
    if state.index is not None:
        idle = ids[block_pool.evictable(state.pool, ids)].tolist()
        state.evictable.add(idle, now, tenant=tenant, priority=sequence.priority)
        state.accounts.count_cached(tenant, len(idle))


def drop_row(state: SchedulerState, sequence: Sequence, now: float) -> None:
    """Take a sequence out of its row and give up all its blocks and what it was promised."""
    state.accounts.of(sequence.request.tenant).guaranteed_blocks -= sequence.promised_blocks
    sequence.promised_blocks = 0
    drop_blocks(state, sequence, state.leave_row(sequence), now)


def drop_unseen_blocks(state: SchedulerState, rows: np.ndarray, now: float) -> None:
    """Give back the blocks of rows that no later token can see into."""
    size, batch = state.config.block_size, state.rows
    for number, group in enumerate(state.config.groups):
        if group.span.window is None:
            continue
        context_lens = state.config.movable_tokens(batch.context_len[rows])
        first = group.first_live_block(context_lens, size)
        before = batch.live_from[rows, number]
        sinks = int(batch.sink_blocks[number])
        for place in np.flatnonzero((first > before) & (first > sinks)).tolist():
            row = int(rows[place])
            start, end = max(int(before[place]), sinks), int(np.asarray(first)[place])
            ids = batch.block_table[row, number, start:end].copy()
            batch.live_from[row, number] = end
            drop_blocks(state, state.sequences_at(rows[place : place + 1])[0], ids, now)


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
        salt = salt_of(state, sequence)
        for place in range(sequence.num_registered, full):
            if place and sequence.prefix_chain is None:
                break  # its parent was dropped, so nothing after it could be found
            block_ids = rows.block_table[row, :, place].tolist()
            tokens = rows.tokens[row, place * size : (place + 1) * size]
            sequence.prefix_chain = index.register(sequence.prefix_chain, tokens, block_ids, salt)
            found += [block_id for block_id in block_ids if block_id in index]
        sequence.num_registered = full
    state.pool = block_pool.mark_cached(state.pool, np.array(found, np.int32))


def salt_of(state: SchedulerState, sequence: Sequence) -> dict[str, str] | None:
    """Return what keeps a tenant's cached blocks apart from others'; None where nothing does."""
    tenant = sequence.request.tenant
    return {"tenant": tenant} if state.accounts.of(tenant).terms.salt else None


def _row(sequence: Sequence) -> np.ndarray:
    return np.array([sequence.row])


def _take(state: SchedulerState, sequence: Sequence, counts: np.ndarray, now: float) -> np.ndarray:
    """Allocate blocks for one tenant; int32 ids, those of entry 0 first."""
    total = int(counts.sum())
    if total > state.spare_blocks:
        raise OutOfBlocks(f"{total} blocks asked for, {state.spare_blocks} available")
    missing = total - int(state.pool.num_free)
    if missing > 0:
        _evict(state, sequence.request.tenant, missing, now)
    state.pool, ids, _ = block_pool.allocate(state.pool, counts)
    state.accounts.hold(sequence.request.tenant, ids)
    return ids


def _evict(state: SchedulerState, tenant: str, num_blocks: int, now: float) -> None:
    assert state.index is not None  # without an index nothing is evictable
    policy = state.config.eviction
    seen: set[int] = set()  # only what was offered may be chosen; the policy decides how much

    def offered() -> Iterator[CachedBlock]:
        for block in _offered(state, tenant):
            seen.add(block.block_id)
            yield block

    ids = list(policy.choose(offered(), num_blocks))
    if len(set(ids)) != num_blocks or not seen.issuperset(ids):
        raise InvariantError(
            f"evict: {type(policy).__name__} was asked for {num_blocks} different blocks out of "
            f"the {len(state.evictable)} evictable ones and chose {ids[:20]}"
        )
    for block_id in ids:
        state.index.drop(block_id)
    _uncache(state, ids)
    state.pool = block_pool.evict(state.pool, np.array(ids, np.int32))
    state.emit(now, "evict", blocks=num_blocks)


def _offered(state: SchedulerState, tenant: str) -> Iterator[CachedBlock]:
    """Iterate over the blocks that may be evicted for a tenant, the longest unused first.

    Of each other tenant's cached blocks the most recently used ones within its reservation stay.
    """
    assert state.index is not None
    spare = {
        account.name: account.cached_blocks
        - (account.protected_blocks if account.name != tenant else 0)
        for account in state.accounts.all()
    }
    for block in state.evictable.view(state.index):
        if state.accounts.enabled:
            if not spare[block.tenant]:
                continue
            spare[block.tenant] -= 1
        yield block


def _uncache(state: SchedulerState, ids: list[int]) -> None:
    """Take blocks out of the evictable ones: they are used again, or evicted."""
    for block_id in ids:
        state.accounts.count_cached(state.evictable.holder_of(block_id).tenant, -1)
    state.evictable.remove(ids)
