"""Every rule that check_pool checks can be broken, and is then named."""

import dataclasses

import jax
import numpy as np
import pytest

from paxkv.blocks.evictable import EvictableBlocks
from paxkv.blocks.invariants import check_pool
from paxkv.blocks.pool import allocate, init_pool, mark_cached, release
from paxkv.blocks.prefix import PrefixIndex
from paxkv.errors import InvariantError


@pytest.fixture
def state():
    """A pool of 6: blocks 0 and 1 live (0 known to the index), 2 cached, the rest free."""
    pool = allocate(init_pool(6), [3]).pool
    pool = release(mark_cached(pool, [0, 2]), [2])
    index, evictable = PrefixIndex(1), EvictableBlocks()
    index.register(None, [0], [0])
    index.register(None, [2], [2])
    evictable.add([2], now=0.0)
    return pool, index, evictable


def broken(pool, **changes):
    plain = jax.tree.map(np.copy, pool)
    for name, (where, value) in changes.items():
        array = np.array(getattr(plain, name))
        array[where] = value
        plain = dataclasses.replace(plain, **{name: array})
    return plain


def test_a_sound_state_passes(state):
    pool, index, evictable = state
    check_pool(pool)
    check_pool(pool, [[0], [1, -1]], index, evictable)
    check_pool(jax.device_put(pool), [np.array([0, 1], np.int32)], index, evictable)
    check_pool(init_pool(0), [], PrefixIndex(1), EvictableBlocks())


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"free_ids": (0, 4)}, r"\[4\]: on the free stack twice"),
        ({"free_ids": (0, 9)}, "free stack .* ids are 0 to 5"),
        ({"free_ids": (0, 1)}, r"\[1, 5\]: free by the stack or by the counts"),
        ({"num_free": ((), 7)}, "num_free=7"),
        ({"num_free": ((), 2)}, r"\[3\]: free by the stack"),
        ({"num_cached": ((), 0)}, "num_cached=0: 1 blocks are"),
        ({"ref_counts": (1, 0)}, r"\[1\]: free by the stack"),
        ({"ref_counts": (1, -1)}, r"\[1\]: negative reference count"),
        ({"ref_counts": (5, 1)}, r"\[5\]: free by the stack"),
        ({"cached": (5, True)}, r"\[5\]: free by the stack"),
    ],
)
def test_a_broken_pool_is_named(state, changes, rule):
    with pytest.raises(InvariantError, match=rule):
        check_pool(broken(state[0], **changes))


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1, 1]], [[0, 1], [0]], [[0, 1, 2]]])
def test_references_must_be_those_of_the_tables(state, tables):
    with pytest.raises(InvariantError, match="references differ from tables"):
        check_pool(state[0], tables)


def test_a_table_out_of_range_is_named(state):
    with pytest.raises(InvariantError, match="holds block 6 of 6"):
        check_pool(state[0], [[0, 1, 6]])


def test_the_index_and_the_flags_must_agree(state):
    pool, index, _ = state
    index.register(None, [5], [5])
    with pytest.raises(InvariantError, match=r"\[5\]: in the index or flagged"):
        check_pool(pool, index=index)
    index.drop(5)
    index.drop(2)
    with pytest.raises(InvariantError, match=r"\[2\]: in the index or flagged"):
        check_pool(pool, index=index)


def test_the_order_of_eviction_must_hold_the_cached_blocks(state):
    pool, _, evictable = state
    evictable.add([0], now=0.0)
    evictable.remove([2])
    with pytest.raises(InvariantError, match=r"\[0, 2\]: evictable by one record only"):
        check_pool(pool, evictable=evictable)
