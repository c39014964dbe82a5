"""The block pool on the host, against a model of dicts and sets."""

import pickle

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paxkv.blocks.invariants import check_pool
from paxkv.blocks.pool import (
    INVALID,
    allocate,
    counts,
    evict,
    evictable,
    init_pool,
    mark_cached,
    release,
    share,
)
from paxkv.errors import InvariantError

NUM_BLOCKS = 9


def fields(pool):
    """Everything that a pool says, as plain values; the dead part of the stack left out."""
    return (
        np.asarray(pool.free_ids)[: int(pool.num_free)].tolist(),
        np.asarray(pool.ref_counts).tolist(),
        np.asarray(pool.cached).tolist(),
        int(pool.num_cached),
    )


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool and a model of it; `handles` lists every reference that somebody holds."""

    def __init__(self):
        super().__init__()
        self.pool = init_pool(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))  # next to be given out first
        self.handles: list[int] = []
        self.cached: set[int] = set()
        self.history = [(self.pool, fields(self.pool))]

    def idle(self):
        return sorted(self.cached - set(self.handles))

    def some(self, data, population, **kwargs):
        return data.draw(st.lists(st.sampled_from(population), max_size=6, **kwargs))

    @rule(wanted=st.lists(st.integers(0, 4), max_size=5), spare=st.integers(0, 3))
    def do_allocate(self, wanted, spare):
        pool, ids, ok = allocate(self.pool, wanted, capacity=sum(wanted) + spare)
        expected_ids, expected_ok, open_ = [], [], True
        for count in wanted:
            open_ = open_ and count <= len(self.free)
            granted = open_ or count == 0
            expected_ok.append(granted)
            expected_ids += [self.free.pop(0) if granted else INVALID for _ in range(count)]
        assert ok.tolist() == expected_ok
        assert ids.tolist() == expected_ids + [INVALID] * spare
        assert ids.dtype == np.int32
        self.handles += [i for i in expected_ids if i != INVALID]
        self.pool = pool

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def do_release(self, data):
        places = data.draw(st.lists(st.integers(0, len(self.handles) - 1), unique=True, max_size=6))
        ids = [self.handles[place] for place in places]
        self.handles = [h for place, h in enumerate(self.handles) if place not in places]
        self.pool = release(self.pool, [*ids, INVALID])
        for block in dict.fromkeys(ids):
            if block not in self.handles and block not in self.cached:
                self.free.insert(0, block)

    @precondition(lambda self: self.handles or self.idle())
    @rule(data=st.data())
    def do_share(self, data):
        ids = self.some(data, sorted({*self.handles, *self.idle()}))
        self.pool = share(self.pool, [INVALID, *ids])
        self.handles += ids

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def do_mark_cached(self, data):
        ids = self.some(data, self.handles)
        self.pool = mark_cached(self.pool, ids)
        self.cached |= set(ids)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def do_evict(self, data):
        ids = self.some(data, self.idle(), unique=True)
        self.pool = evict(self.pool, ids)
        self.cached -= set(ids)
        self.free = ids[::-1] + self.free

    @rule(data=st.data(), operation=st.sampled_from([share, release, mark_cached]))
    def misuse_a_free_block(self, data, operation):
        if self.free:
            block = data.draw(st.sampled_from(self.free))
            others = self.handles[:1]
            with pytest.raises(InvariantError, match=rf"blocks \[{block}\]"):
                operation(self.pool, [*others, block])

    @rule(data=st.data())
    def release_once_too_often(self, data):
        if self.handles:
            block = data.draw(st.sampled_from(self.handles))
            with pytest.raises(InvariantError, match=rf"blocks \[{block}\].*more often"):
                release(self.pool, [block] * (self.handles.count(block) + 1))

    @rule(data=st.data())
    def evict_what_is_not_idle(self, data):
        block = data.draw(st.sampled_from(sorted(set(range(NUM_BLOCKS)) - set(self.idle())) or [0]))
        if block not in self.idle():
            with pytest.raises(InvariantError, match=rf"blocks \[{block}\]"):
                evict(self.pool, [block])

    @invariant()
    def agrees_with_the_model(self):
        check_pool(self.pool, [self.handles])
        refs = [self.handles.count(block) for block in range(NUM_BLOCKS)]
        flags = [block in self.cached for block in range(NUM_BLOCKS)]
        expected = (self.free[::-1], refs, flags, len(self.idle()))
        assert fields(self.pool) == expected
        free, live, cached = counts(self.pool)
        assert (free, live, cached) == (len(self.free), len(set(self.handles)), len(self.idle()))
        assert free + live + cached == NUM_BLOCKS
        mask = evictable(self.pool, np.arange(NUM_BLOCKS))
        assert np.flatnonzero(mask).tolist() == self.idle()
        self.history.append((self.pool, expected))

    def teardown(self):
        for pool, expected in self.history[:: max(1, len(self.history) // 6)]:
            assert fields(pool) == expected


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("ids", [[-2], [NUM_BLOCKS], [0, 10**9], [-(2**40)]])
@pytest.mark.parametrize("operation", [share, release, mark_cached, evict])
def test_ids_out_of_range_are_refused(operation, ids):
    pool = allocate(init_pool(NUM_BLOCKS), [2]).pool
    with pytest.raises(InvariantError, match="has blocks 0 to 8"):
        operation(pool, ids)


def test_a_failed_allocation_changes_nothing():
    # A hit of 3 shared blocks, 4 more wanted, 3 free: nothing may stay behind.
    pool, hit, _ = allocate(init_pool(6), [3])
    before = fields(pool)
    refused = allocate(pool, [4])
    assert not refused.ok[0]
    assert fields(refused.pool) == before
    assert refused.block_ids.tolist() == [INVALID] * 4
    assert fields(share(pool, hit))[1][:3] == [2, 2, 2]
    assert fields(pool) == before


def test_a_refused_entry_refuses_those_after_it_but_not_empty_ones():
    pool, ids, ok = allocate(init_pool(5), [2, 4, 0, 1])
    assert ok.tolist() == [True, False, True, False]
    assert ids.tolist() == [0, 1] + [INVALID] * 5
    assert counts(pool).live == 2


def test_capacity_bounds_what_is_granted():
    pool, ids, ok = allocate(init_pool(5), [2, 2], capacity=3)
    assert ok.tolist() == [True, False]
    assert ids.tolist() == [0, 1, INVALID]
    assert counts(pool).live == 2


def test_ten_requests_in_a_row_leave_nothing_held():
    pool = init_pool(4)
    for _ in range(10):
        pool, ids, ok = allocate(pool, [3])
        if not ok[0]:
            pool = evict(pool, np.flatnonzero(evictable(pool, np.arange(4))))
            pool, ids, ok = allocate(pool, [3])
        assert ok[0]
        pool = mark_cached(pool, ids)
        pool = release(pool, ids)
        assert not np.asarray(pool.ref_counts).any()
        assert evictable(pool, ids).all()
        assert sum(counts(pool)) == 4


def test_blocks_shared_by_two_finished_requests_are_cached_once():
    pool, ids, _ = allocate(init_pool(8), [5])
    pool = mark_cached(share(pool, ids), ids)
    pool = release(pool, np.concatenate([ids, ids]))
    assert counts(pool) == (3, 0, 5)


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_pool_size_is_checked(bad):
    with pytest.raises(ValueError, match="num_blocks"):
        init_pool(bad)


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        allocate(init_pool(3), [1, -1])


def test_a_pool_of_no_blocks_refuses_everything():
    pool, ids, ok = allocate(init_pool(0), [1, 0])
    assert ok.tolist() == [False, True]
    assert ids.tolist() == [INVALID]
    assert counts(pool) == (0, 0, 0)
    check_pool(release(pool, []), [])


def test_the_callers_arrays_are_not_kept():
    pool, ids, _ = allocate(init_pool(4), [3])
    released = release(pool, ids)
    ids[:] = 3
    assert fields(pool)[1] == [1, 1, 1, 0]
    assert fields(released)[1] == [0, 0, 0, 0]


def test_pickles_and_works_from_plain_arrays():
    pool = allocate(init_pool(5), [3]).pool
    expected = fields(release(pool, [1]))
    assert fields(release(pickle.loads(pickle.dumps(pool)), [1])) == expected
    plain = jax.tree.map(np.copy, pool)
    assert type(plain.ref_counts) is np.ndarray
    assert fields(release(plain, [1])) == expected
    assert plain.ref_counts.tolist() == [1, 1, 1, 0, 0]


def test_flattening_gives_arrays_that_later_steps_leave_alone():
    pool = allocate(init_pool(4), [2]).pool
    leaves = jax.tree.leaves(pool)
    release(pool, [0, 1])
    assert [leaf.dtype for leaf in leaves] == [np.int32, np.int32, np.int32, np.bool_, np.int32]
    assert leaves[2].tolist() == [1, 1, 0, 0]
