"""Blocks come back from host memory bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KV_DTYPES, init_pages
from paxkv.cache import store
from paxkv.cache.host import HostSpace
from paxkv.cache.layout import KVLayout
from paxkv.cache.mixed import init_cache
from paxkv.errors import InvariantError


def random_bits(pages, seed=0):
    """Fill a pool with random bits, NaNs and all: only equal bits compare equal."""
    rng = np.random.default_rng(seed)

    def bits(leaf):
        raw = rng.integers(0, 256, leaf.nbytes, np.uint8)
        return jnp.asarray(raw.view(np.dtype(leaf.dtype)).reshape(leaf.shape))

    return jax.tree.map(bits, pages)


def filled(num_blocks, kv_dtype="float32", seed=0, **sizes):
    sizes = {"layers": 2, "kv_heads": 1, "block_size": 2, "head_dim": 4} | sizes
    return random_bits(init_pages(num_blocks, dtype=kv_dtype, **sizes), seed)


def bits_of(pages, block_ids=slice(None)):
    return [np.array(leaf)[block_ids].tobytes() for leaf in jax.tree.leaves(pages)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_round_trip_of_every_dtype(kv_dtype):
    pages = filled(10, kv_dtype)
    host = HostSpace(4, pages)
    out, held = [9, 0, 4], [2, 3, 0]
    expected = bits_of(pages, out)
    moved = store.swap_out(pages, out, host, held)
    assert moved == sum(len(leaf) for leaf in expected) == 3 * host.bytes_per_block
    back = [5, 9, 1]
    others = [i for i in range(10) if i not in back]
    untouched = bits_of(pages, others)
    pages = store.swap_in(pages, back, host, held)
    assert bits_of(pages, back) == expected
    assert bits_of(pages, others) == untouched


def test_round_trip_of_every_count_up_to_130():
    pages, scratch = filled(131), filled(131, seed=1)
    host = HostSpace(140, pages)
    rng = np.random.default_rng(2)
    for count in range(131):
        out = rng.permutation(131)[:count]
        held = rng.permutation(140)[:count]
        back = rng.permutation(131)[:count]
        store.swap_out(pages, out, host, held)
        scratch = store.swap_in(scratch, back, host, held)
        assert bits_of(scratch, back) == bits_of(pages, out), count


@pytest.mark.parametrize(
    ("kv_dtype", "plain_layers"),
    [("int8", ()), ("float8_e4m3fn", ()), ("int4", ()), ("int8", (1,)), ("int4", (0, 3))],
)
def test_round_trip_of_every_count_with_codes_and_plain_layers(kv_dtype, plain_layers):
    layout = KVLayout(
        num_layers=4,
        num_kv_heads=1,
        head_dim=4,
        block_size=2,
        kv_dtype=kv_dtype,
        plain_dtype="bfloat16" if plain_layers else None,
        plain_places=plain_layers,
    )
    pages, scratch = random_bits(init_cache(131, layout)), random_bits(init_cache(131, layout), 1)
    host = HostSpace(140, pages)
    assert host.bytes_per_block == layout.bytes_per_block
    rng = np.random.default_rng(3)
    for count in range(1, 131):
        out, back = rng.permutation(131)[:count], rng.permutation(131)[:count]
        held = rng.permutation(140)[:count]
        assert store.swap_out(pages, out, host, held) == count * layout.bytes_per_block
        scratch = store.swap_in(scratch, back, host, held)
        assert bits_of(scratch, back) == bits_of(pages, out), count


def test_few_shapes_are_compiled():
    store._gather.clear_cache()
    store._scatter.clear_cache()
    pages = filled(131)
    host = HostSpace(131, pages)
    expected = bits_of(pages)
    pages = store.warm_up(pages)
    assert bits_of(pages) == expected
    compiled = store._gather._cache_size(), store._scatter._cache_size()
    assert compiled == (len(store.PIECES), len(store.PIECES))
    for count in (1, 7, 63, 130):
        store.swap_out(pages, np.arange(count), host, np.arange(count))
        pages = store.swap_in(pages, np.arange(count), host, np.arange(count))
    assert (store._gather._cache_size(), store._scatter._cache_size()) == compiled


def test_the_copy_survives_the_blocks_next_owner():
    pages = filled(4)
    host = HostSpace(2, pages)
    expected = bits_of(pages, [1, 2])
    store.swap_out(pages, [1, 2], host, [0, 1])
    pages = store.copy_blocks(pages, [0, 3], [1, 2])
    assert bits_of(pages, [1, 2]) != expected
    pages = store.swap_in(pages, [1, 2], host, [0, 1])
    assert bits_of(pages, [1, 2]) == expected


def test_moves_of_no_blocks_do_nothing():
    pages = filled(3)
    expected, host = bits_of(pages), HostSpace(0, pages)
    assert store.swap_out(pages, [], host, []) == 0
    pages = store.swap_in(pages, [], host, [])
    pages = store.copy_blocks(pages, [], [])
    assert bits_of(pages) == expected


@pytest.mark.parametrize("count", [1, 4, 5, 70])
def test_copy_blocks(count):
    pages = filled(2 * count + 1)
    src, dst = np.arange(count), np.arange(count) + count
    expected = bits_of(pages, src)
    last = bits_of(pages, [2 * count])
    pages = store.copy_blocks(pages, src, dst)
    assert bits_of(pages, dst) == bits_of(pages, src) == expected
    assert bits_of(pages, [2 * count]) == last


def test_one_block_may_be_copied_to_several():
    pages = store.copy_blocks(filled(4), [1, 1], [0, 3])
    assert bits_of(pages, [0]) == bits_of(pages, [1]) == bits_of(pages, [3])


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_moves_into_the_pool_need_no_second_pool(kv_dtype):
    leaves = jax.tree.leaves(filled(256, kv_dtype))
    ids = np.arange(4, dtype=np.int32)
    content = [np.asarray(leaf[:4]) for leaf in leaves]
    for compiled in (
        store._scatter.lower(leaves, ids, content).compile(),
        store._copy.lower(leaves, ids, ids + 4).compile(),
    ):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in leaves)
        assert memory.temp_size_in_bytes < leaves[0].nbytes / 8


def test_the_pool_is_donated():
    pages = filled(4)
    host = HostSpace(2, pages)
    store.swap_out(pages, [0], host, [0])
    assert not pages.k.is_deleted()
    store.swap_in(pages, [1], host, [0])
    assert pages.k.is_deleted()


@pytest.mark.parametrize(
    "other",
    [
        filled(4, kv_dtype="bfloat16"),
        filled(4, kv_dtype="int8"),
        filled(4, block_size=4, head_dim=2),
        filled(4, layers=1, kv_heads=2),
    ],
    ids=["dtype", "scales", "block shape", "heads for layers"],
)
def test_blocks_of_another_layout_are_refused(other):
    pages = filled(4)
    host = HostSpace(2, pages)
    store.swap_out(pages, [0], host, [0])
    with pytest.raises(InvariantError, match="laid out as"):
        store.swap_in(other, [0], host, [0])
    with pytest.raises(InvariantError, match="laid out as"):
        store.swap_out(other, [0], host, [0])


def test_equal_bytes_of_another_meaning_are_another_layout():
    pages = filled(4, kv_dtype="int8")
    host = HostSpace(2, pages)
    with pytest.raises(InvariantError, match="laid out as"):
        store.swap_out({"k": pages.k, "v": pages.v}, [0], host, [0])
    renamed = (pages.k, pages.v, pages.k_scale, pages.v_scale)
    with pytest.raises(InvariantError, match="laid out as"):
        store.swap_out(renamed, [0], host, [0])


def test_packed_keys_and_values_are_another_layout():
    pages = filled(4, kv_dtype="bfloat16")
    host = HostSpace(2, pages)
    swapped = dataclasses.replace(pages, v=jnp.swapaxes(pages.v, 3, 4))
    with pytest.raises(InvariantError, match="laid out as"):
        store.swap_out(swapped, [0], host, [0])


@pytest.mark.parametrize(
    ("block_ids", "host_ids", "rule"),
    [
        ([0, 1], [0], "2 blocks against 1"),
        ([4], [0], r"\[4\]; the pool has 4"),
        ([-1], [0], r"\[-1\]; the pool has 4"),
        ([0], [2], r"\[2\]; the pool has 2"),
        ([0], [-1], r"\[-1\]; the pool has 2"),
        ([0, 1], [1, 1], "two blocks into one"),
    ],
)
def test_wrong_ids_are_refused(block_ids, host_ids, rule):
    pages = filled(4)
    host = HostSpace(2, pages)
    with pytest.raises(InvariantError, match=rule):
        store.swap_out(pages, block_ids, host, host_ids)


def test_wrong_ids_are_refused_before_the_pool_is_given_away():
    pages = filled(4)
    host = HostSpace(2, pages)
    store.swap_out(pages, [0], host, [0])
    with pytest.raises(InvariantError, match=r"host blocks \[1\] hold nothing"):
        store.swap_in(pages, [0, 1], host, [0, 1])
    store.swap_out(pages, [0], host, [1])
    with pytest.raises(InvariantError, match="two blocks into one"):
        store.swap_in(pages, [1, 1], host, [0, 1])
    with pytest.raises(InvariantError, match=r"\[1\] are read and overwritten"):
        store.copy_blocks(pages, [0, 1], [1, 2])
    assert not pages.k.is_deleted()


def test_page_locked_memory_is_used_where_the_device_has_it(monkeypatch):
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if "pinned_host" not in kinds:
        pytest.skip("this device has no memory kind pinned_host")
    monkeypatch.setattr(store, "_has_pinned_host", lambda device: True)
    pages = filled(6, kv_dtype="int8")
    staged = store._to_host_memory(jax.tree.leaves(pages))
    assert {leaf.sharding.memory_kind for leaf in staged} == {"pinned_host"}
    host = HostSpace(6, pages)
    expected = bits_of(pages, [3, 1, 2, 0, 5])
    store.swap_out(pages, [3, 1, 2, 0, 5], host, [5, 4, 3, 2, 1])
    pages = store.swap_in(pages, [0, 1, 2, 3, 4], host, [5, 4, 3, 2, 1])
    assert bits_of(pages, [0, 1, 2, 3, 4]) == expected
