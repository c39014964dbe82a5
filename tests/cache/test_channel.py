"""Keys quantised per channel: what queries see, and what lies in blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import init_pages, read_kv, write_kv
from paxkv.cache.attend import PagedAttention
from paxkv.cache.channel import ChannelPages
from paxkv.cache.groups import Span, group_layers
from paxkv.cache.host import HostSpace
from paxkv.cache.layout import KVLayout, pool_bytes
from paxkv.cache.mixed import block_part, init_cache, with_block_part
from paxkv.cache.store import swap_in, swap_out
from paxkv.errors import ConfigError

HEADS, KV_HEADS, DIM, BLOCK, TOKENS = 4, 2, 8, 4, 23
SOFT_CAP = 5.0
WINDOWS = [Span(6), Span(), Span(5, 3), Span(5, 3), Span(), Span(6)]  # three groups of two
FULL = [Span()] * 2
CODES = {"int8": 127, "int4": 7}


def layout(dtype, num_layers, **changes):
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "block_size": BLOCK}
    sizes |= {"num_layers": num_layers, "kv_dtype": dtype, "open_dtype": "float32"}
    return KVLayout(**(sizes | changes))


def numbers(num_layers, seed=0):
    """q, k, v [layer, token, head, dim]; one channel of k is large, as in real models."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(num_layers, TOKENS, HEADS, DIM))
    k, v = rng.normal(size=(2, num_layers, TOKENS, KV_HEADS, DIM))
    k[..., 3] *= 20
    return [x.astype(np.float32) for x in (q, k, v)]


def rounded(x, axis, codes):
    scale = np.abs(x).max(axis=axis, keepdims=True) / codes
    return np.rint(x / scale) * scale


def oracle(q, k, v, span, codes):
    """One layer in float64: [token, head, dim]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    v = rounded(v, 2, codes)
    full = TOKENS // BLOCK * BLOCK
    coded = rounded(k[:full].reshape(-1, BLOCK, KV_HEADS, DIM), 1, codes).reshape(k[:full].shape)
    out = np.zeros_like(q)
    for position in range(TOKENS):
        start = position // BLOCK * BLOCK
        keys = np.concatenate([coded[:start], k[start : position + 1]])
        place = np.arange(position + 1)
        seen = np.ones(position + 1, bool)
        if span.window is not None:
            seen = (place > position - span.window) | (place < span.num_sink_tokens)
        for head in range(HEADS):
            of = head * KV_HEADS // HEADS
            scores = keys[:, of] @ q[position, head] * DIM**-0.5
            weights = np.where(seen, np.exp(SOFT_CAP * np.tanh(scores / SOFT_CAP)), 0)
            out[position, head] = weights / weights.sum() @ v[: position + 1, of]
    return out


@functools.partial(jax.jit, static_argnames="attention")
def run_chunk(attention, cache, tables, start, q, k, v):
    """All layers of one chunk; returns the cache and [layer, token, head, dim]."""
    count = q.shape[1]
    _, attend = attention.one_row(tables, start, jnp.int32(count), count)

    def layer(cache, inputs):
        number, q, k, v = inputs
        out, cache = attend(q, k, v, cache, number)
        return cache, out

    return jax.lax.scan(layer, cache, (jnp.arange(len(q), dtype=jnp.int32), q, k, v))


def tables_of(groups):
    blocks = -(-TOKENS // BLOCK)
    tables = np.random.default_rng(1).permutation(len(groups) * blocks).astype(np.int32)
    return tables.reshape(len(groups), blocks)


def empty(kv_dtype, spans):
    groups = group_layers(spans)
    plan = layout(kv_dtype, len(spans) // len(groups))
    return init_cache(tables_of(groups).size, plan, num_rows=2, num_groups=len(groups))


def attend_all(kv_dtype, spans, chunk, cache=None):
    """Write and attend chunk by chunk; returns [layer, token, head, dim] and the cache."""
    groups = group_layers(spans)
    attention = PagedAttention(groups=groups, block_size=BLOCK, soft_cap=SOFT_CAP)
    tables = tables_of(groups)
    cache = empty(kv_dtype, spans) if cache is None else cache
    q, k, v = numbers(len(spans))
    outs = []
    for start in range(0, TOKENS, chunk):
        part = slice(start, start + chunk)
        cache, out = run_chunk(
            attention, cache, tables, jnp.int32(start), q[:, part], k[:, part], v[:, part]
        )
        outs.append(np.asarray(out))
    return np.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("chunk", [1, pytest.param(16, marks=pytest.mark.slow), TOKENS])
@pytest.mark.parametrize("spans", [FULL, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("kv_dtype", CODES)
def test_queries_see_their_own_block_exactly_and_earlier_ones_quantised(kv_dtype, spans, chunk):
    got, cache = attend_all(kv_dtype, spans, chunk)
    assert isinstance(cache, ChannelPages)
    inputs = numbers(len(spans))
    for number, span in enumerate(spans):
        expected = oracle(*(x[number] for x in inputs), span, CODES[kv_dtype])
        np.testing.assert_allclose(got[number], expected, atol=2e-5)


def test_what_lies_in_full_blocks_does_not_depend_on_chunks():
    (_, one), (_, many) = (attend_all("int8", WINDOWS, chunk) for chunk in (TOKENS, 3))
    full = tables_of(group_layers(WINDOWS))[:, : TOKENS // BLOCK].ravel()
    for a, b in zip(jax.tree.leaves(one.blocks), jax.tree.leaves(many.blocks), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[full], np.asarray(b)[full])
    left = TOKENS % BLOCK
    np.testing.assert_array_equal(one.open[0, ..., :left, :], many.open[0, ..., :left, :])
    assert not np.asarray(one.open[1]).any()  # another row's


def test_what_was_there_before_is_never_seen():
    clean, _ = attend_all("int8", WINDOWS, 5)
    stale = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 99),
        empty("int8", WINDOWS),
    )
    dirty, _ = attend_all("int8", WINDOWS, 5, stale)
    np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float8_e4m3fn"])
def test_a_large_channel_costs_the_others_nothing(kv_dtype):
    """KIVI's reason: keys have large channels, so that a scale a token spoils the others."""
    _, k, v = numbers(1)
    k, v = k[:, :BLOCK], v[:, :BLOCK]
    attention = PagedAttention(groups=group_layers([Span()]), block_size=BLOCK)
    cache = init_cache(1, layout(kv_dtype, 1), num_rows=1)
    q = np.zeros((1, BLOCK, HEADS, DIM), np.float32)
    cache, _ = run_chunk(attention, cache, np.zeros((1, 1), np.int32), jnp.int32(0), q, k, v)
    by_channel, values = cache.blocks.read(jnp.zeros(1, jnp.int32), 0)

    slots = jnp.arange(BLOCK, dtype=jnp.int32)
    pages = init_pages(1, 1, KV_HEADS, BLOCK, DIM, kv_dtype)
    pages = write_kv(jnp.asarray(k[0]), jnp.asarray(v[0]), pages, slots, layer=0)
    by_token, expected = read_kv(pages, slots, layer=0)
    np.testing.assert_array_equal(values[0].swapaxes(0, 1), expected)  # values: as they are there

    def error(got):  # of the small channels
        return np.abs(np.delete(np.asarray(got) - k[0], 3, axis=-1)).max()

    small = np.abs(np.delete(k[0], 3, axis=-1)).max()
    step = 2**-4 if kv_dtype.startswith("float8") else 0.5 / CODES[kv_dtype]
    assert error(by_channel[0].swapaxes(0, 1)) <= small * step * 1.001
    if not kv_dtype.startswith("float8"):  # floats have a scale of their own in each number
        assert error(by_token) > 4 * error(by_channel[0].swapaxes(0, 1))


def test_a_fault_in_a_key_stays_in_its_channel_of_its_block():
    _, k, v = numbers(1)
    k[0, 5, 1, 2] = np.nan
    attention = PagedAttention(groups=group_layers([Span()]), block_size=BLOCK)
    cache = init_cache(6, layout("int8", 1), num_rows=1)
    q, tables = np.ones((1, TOKENS, HEADS, DIM), np.float32), np.arange(6, dtype=np.int32)[None]
    cache, out = run_chunk(attention, cache, tables, jnp.int32(0), q, k, v)
    keys, _ = cache.blocks.read(jnp.arange(5), 0)
    assert np.argwhere(np.isnan(np.asarray(keys))).tolist() == [[1, 1, i, 2] for i in range(BLOCK)]
    assert np.isfinite(np.asarray(out)[0, :5]).all() and np.isnan(np.asarray(out)[0, 5:, 2:]).all()


def test_blocks_are_swapped_bit_for_bit_and_rows_stay():
    _, cache = attend_all("int4", FULL, TOKENS)
    bits = [np.array(leaf).tobytes() for leaf in jax.tree.leaves(cache.blocks)]
    num_blocks, plan = cache.blocks.k.shape[0], layout("int4", 2)
    host = HostSpace(num_blocks, block_part(cache))
    every = np.arange(num_blocks)
    assert swap_out(block_part(cache), every, host, every) == pool_bytes(num_blocks, plan)
    empty = init_cache(num_blocks, plan, num_rows=2)
    back = with_block_part(cache, swap_in(block_part(empty), every, host, every))
    assert [np.array(leaf).tobytes() for leaf in jax.tree.leaves(back.blocks)] == bits
    assert back.open is cache.open


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("open_dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_allocated_bytes(kv_dtype, open_dtype):
    plan = layout(kv_dtype, 3, open_dtype=open_dtype)
    cache = init_cache(5, plan, num_rows=7, num_groups=2)
    assert pool_bytes(5, plan) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.blocks))
    assert plan.open_bytes(num_rows=7, num_groups=2) == cache.open.nbytes
    codes = 2 * BLOCK * DIM // (2 if kv_dtype == "int4" else 1)
    assert plan.bytes_per_block == 3 * KV_HEADS * (codes + 4 * (DIM + BLOCK))
    assert plan.bytes_per_token == -(-plan.bytes_per_block // BLOCK)
    by_token = layout(kv_dtype, 3, open_dtype=None)
    assert by_token.open_bytes(num_rows=7, num_groups=2) == 0
    # A block of as many tokens as a head has dimensions has as many scales either way.
    square = layout(kv_dtype, 3, block_size=DIM)
    assert (
        square.bytes_per_block
        == layout(kv_dtype, 3, block_size=DIM, open_dtype=None).bytes_per_block
    )


@pytest.mark.parametrize(
    "changes",
    [{"kv_dtype": "float32"}, {"scaled": False}, {"plain_places": (0,), "plain_dtype": "float32"}],
)
def test_layouts_that_cannot_be_are_refused(changes):
    with pytest.raises(ConfigError, match="open_dtype=float32"):
        layout("int8", 3, **changes)


def test_a_cache_without_rows_is_refused():
    with pytest.raises(ValueError, match="num_rows=0"):
        init_cache(5, layout("int8", 2))


def test_the_cache_is_updated_in_place_within_a_scan():
    layers, plan = 4, layout("int8", 4)
    attention = PagedAttention(groups=group_layers([Span()] * layers), block_size=BLOCK)
    cache = jax.eval_shape(lambda: init_cache(40000, plan, num_rows=5000))
    vectors = [
        jax.ShapeDtypeStruct((layers, 6, heads, DIM), jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    step = jax.jit(lambda cache, *rest: run_chunk(attention, cache, *rest), donate_argnums=0)
    compiled = step.lower(
        cache,
        jax.ShapeDtypeStruct((1, 8), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        *vectors,
    ).compile()
    memory = compiled.memory_analysis()
    blocks, rows = pool_bytes(40000, plan), plan.open_bytes(num_rows=5000, num_groups=1)
    assert memory.alias_size_in_bytes >= blocks + rows
    assert memory.temp_size_in_bytes < min(blocks, rows) / 4
