"""The block pool inside jit gives what it gives on the host, field by field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

NUM_BLOCKS = 7
WIDTH = 6  # ids, or counts, of one operation; padded
CAPACITY = 12

ALLOCATE, SHARE, RELEASE, MARK, EVICT = range(5)
OPERATIONS = {SHARE: share, RELEASE: release, MARK: mark_cached, EVICT: evict}


def on_device(pool, code, argument):
    """One operation chosen by a traced code; the ids it gave, if any."""
    nothing = jnp.full(CAPACITY, INVALID, jnp.int32)

    def take(pool):
        result = allocate(pool, argument, capacity=CAPACITY)
        return result.pool, result.block_ids, result.ok

    def change(operation):
        return lambda pool: (operation(pool, argument), nothing, jnp.ones(WIDTH, bool))

    return jax.lax.switch(code, [take, *map(change, OPERATIONS.values())], pool)


step = jax.jit(on_device)


@jax.jit
def scan(pool, codes, arguments):
    def body(pool, xs):
        pool, ids, ok = on_device(pool, *xs)
        return pool, (ids, ok)

    return jax.lax.scan(body, pool, (codes, arguments))


batched = jax.jit(jax.vmap(on_device))


def assert_same(host, device):
    host, device = jax.tree.leaves(host), jax.tree.leaves(device)
    for ours, theirs in zip(host, device, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def draw_operation(draw, pool):
    """Draw an operation that the host accepts in this state."""
    refs = np.asarray(pool.ref_counts)
    live = np.flatnonzero(refs).tolist()
    idle = np.flatnonzero(evictable(pool, np.arange(NUM_BLOCKS))).tolist()
    choices = [ALLOCATE]
    choices += [RELEASE, MARK] if live else []
    choices += [SHARE] if live or idle else []
    choices += [EVICT] if idle else []
    code = draw(st.sampled_from(choices))
    if code == ALLOCATE:
        return code, draw(st.lists(st.integers(0, 3), min_size=WIDTH, max_size=WIDTH))
    if code == RELEASE:
        held = np.repeat(np.arange(NUM_BLOCKS), refs).tolist()
        ids = draw(st.permutations(held))[:WIDTH]
        ids = ids[: draw(st.integers(0, len(ids)))]
    else:
        population = {SHARE: live + idle, MARK: live, EVICT: idle}[code]
        ids = draw(st.lists(st.sampled_from(population), max_size=WIDTH, unique=code == EVICT))
    padded = draw(st.permutations(ids + [INVALID] * (WIDTH - len(ids))))
    return code, list(padded)


@st.composite
def scripts(draw, length=12):
    """A list of operations, with the host pool and result after each."""
    pool, script = init_pool(NUM_BLOCKS), []
    for _ in range(length):
        code, argument = draw_operation(draw, pool)
        ids, ok = [], [True] * WIDTH
        if code == ALLOCATE:
            pool, ids, ok = allocate(pool, argument, capacity=CAPACITY)
            ids, ok = ids.tolist(), ok.tolist()
        else:
            pool = OPERATIONS[code](pool, argument)
        ids += [INVALID] * (CAPACITY - len(ids))
        script.append((code, argument, pool, ids, ok))
    return script


@settings(max_examples=25, deadline=None)
@given(scripts())
def test_each_operation_is_the_same_under_jit(script):
    device = jax.device_put(init_pool(NUM_BLOCKS))
    for code, argument, host, ids, ok in script:
        device, device_ids, device_ok = step(device, code, jnp.array(argument, jnp.int32))
        assert_same(host, device)
        assert device_ids.tolist() == ids
        assert device_ok.tolist() == ok
        assert [int(n) for n in counts(device)] == list(counts(host))


@settings(max_examples=25, deadline=None)
@given(scripts())
def test_a_whole_script_is_the_same_inside_scan(script):
    codes = jnp.array([code for code, *_ in script])
    arguments = jnp.array([argument for _, argument, *_ in script], jnp.int32)
    device, (ids, ok) = scan(init_pool(NUM_BLOCKS), codes, arguments)
    assert_same(script[-1][2], device)
    assert ids.tolist() == [ids for *_, ids, _ in script]
    assert ok.tolist() == [ok for *_, ok in script]


@settings(max_examples=10, deadline=None)
@given(scripts(length=6), scripts(length=6))
def test_pools_run_side_by_side_under_vmap(first, second):
    pools = jax.tree.map(lambda *x: jnp.stack(x), *[init_pool(NUM_BLOCKS)] * 2)
    for one, other in zip(first, second, strict=True):
        codes = jnp.array([one[0], other[0]])
        pools, _, _ = batched(pools, codes, jnp.array([one[1], other[1]], jnp.int32))
        assert_same(one[2], jax.tree.map(lambda x: x[0], pools))
        assert_same(other[2], jax.tree.map(lambda x: x[1], pools))


@pytest.mark.parametrize("operation", OPERATIONS.values())
def test_nonsense_is_ignored_inside_jit(operation):
    pool = allocate(init_pool(NUM_BLOCKS), [2]).pool
    assert_same(pool, jax.jit(operation)(pool, jnp.array([5, 99, -7, INVALID])))


def test_too_many_releases_inside_jit_free_a_block_once():
    pool = allocate(init_pool(NUM_BLOCKS), [2]).pool
    assert_same(release(pool, [1]), jax.jit(release)(pool, jnp.array([1, 1, 1])))


def test_capacity_is_required_inside_jit():
    with pytest.raises(ValueError, match="capacity"):
        jax.jit(allocate)(init_pool(3), jnp.array([1]))
