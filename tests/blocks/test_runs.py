"""Runs of free blocks against brute force over the ids."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.blocks import pool as block_pool
from paxkv.blocks.invariants import check_pool
from paxkv.blocks.runs import allocate_run, largest_free_run


def free_ids(pool):
    return set(np.asarray(pool.free_ids)[: pool.num_free].tolist())


def first_fit(pool, count):
    """The lowest run of free ids, by trying every start."""
    free = free_ids(pool)
    for start in range(pool.num_blocks - count + 1):
        if all(block in free for block in range(start, start + count)):
            return list(range(start, start + count))
    return None


def longest(pool):
    return max((n for n in range(1, pool.num_blocks + 1) if first_fit(pool, n)), default=0)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 20))
def test_first_fit_among_runs_single_blocks_and_cached_ones(seed, num_blocks):
    rng = Random(seed)
    pool, held, cached = block_pool.init_pool(num_blocks), [], []
    for _ in range(25):
        action = rng.choice(["run", "run", "one", "release", "cache", "evict"])
        if action == "run":
            count = rng.randint(1, num_blocks)
            expected, before = first_fit(pool, count), pool
            pool, ids = allocate_run(pool, count)
            assert (None if ids is None else ids.tolist()) == expected
            if ids is None:
                assert pool is before
            else:
                assert ids.dtype == np.int32
                held.append(ids)
                # The pool before stays valid: it is a value.
                assert free_ids(before) == free_ids(pool) | set(ids.tolist())
        elif action == "one" and pool.num_free:
            pool, ids, _ = block_pool.allocate(pool, np.array([1]))
            held.append(ids)
        elif action == "release" and held:
            pool = block_pool.release(pool, held.pop(rng.randrange(len(held))))
        elif action == "cache" and held:
            ids = held.pop()
            pool = block_pool.release(block_pool.mark_cached(pool, ids), ids)
            cached += ids.tolist()
        elif action == "evict" and cached:
            pool = block_pool.evict(pool, np.array([cached.pop()]))
        assert largest_free_run(pool) == longest(pool)
        assert largest_free_run(pool, np.arange(num_blocks)) == num_blocks
        check_pool(pool, tables=held)


def test_a_fresh_pool_is_one_run():
    pool = block_pool.init_pool(9)
    assert largest_free_run(pool) == 9
    pool, ids = allocate_run(pool, 9)
    np.testing.assert_array_equal(ids, np.arange(9))
    assert largest_free_run(pool) == 0
    assert allocate_run(pool, 1) == (pool, None)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_pools_of_next_to_nothing(num_blocks):
    pool = block_pool.init_pool(num_blocks)
    assert largest_free_run(pool) == num_blocks
    assert allocate_run(pool, 2) == (pool, None)


def test_holes_do_not_add_up():
    pool, ids, _ = block_pool.allocate(block_pool.init_pool(10), np.array([10]))
    pool = block_pool.release(pool, ids[np.isin(ids, [1, 2, 5, 6, 7, 9])])
    assert int(pool.num_free) == 6
    assert largest_free_run(pool) == 3
    assert largest_free_run(pool, np.array([3, 4])) == 7  # 1 to 7
    pool, run = allocate_run(pool, 2)
    assert run.tolist() == [1, 2]  # the first that fits, not the best
    assert allocate_run(pool, 4)[1] is None
