"""A cache in which some layers stay plain, and static scales, through the attention of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.cache.attend import PagedAttention
from paxkv.cache.groups import Span, group_layers
from paxkv.cache.host import HostSpace
from paxkv.cache.layout import KVLayout, pool_bytes
from paxkv.cache.mixed import MixedPages, init_cache
from paxkv.cache.scales import StaticScales, uniform_scales
from paxkv.cache.store import swap_in, swap_out

HEADS, DIM, TOKENS, LAYERS = 2, 16, 20, 4
PLAIN = (0, 3)
HALF_STEP = {"int8": 0.5 / 127, "int4": 0.5 / 7}


def layout(kv_dtype, plain=PLAIN, **changes):
    return KVLayout(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        block_size=4,
        kv_dtype=kv_dtype,
        plain_places=plain,
        plain_dtype="float32" if plain else None,
        **changes,
    )


def attend_all(plan, spans=None, kv_scales=None):
    """Write one sequence layer by layer and attend with it; returns outputs and the cache.

    Decoding reads the last token, a chunk all of them: [layer, token, head, dim].
    """
    groups = group_layers(spans or [Span()] * LAYERS)
    attention = PagedAttention(groups=groups, block_size=4, kv_scales=kv_scales)
    blocks = TOKENS // 4
    num_layers = sum(len(group.layers) for group in groups)
    tables = np.arange(len(groups) * blocks, dtype=np.int32).reshape(len(groups), blocks)
    q, k, v = np.random.default_rng(0).uniform(-1, 1, (3, num_layers, TOKENS, HEADS, DIM))

    @jax.jit
    def run(cache, q, k, v):
        one = jnp.int32(TOKENS)
        _, attend = attention.one_row(jnp.asarray(tables), jnp.int32(0), one, TOKENS)

        def layer(cache, inputs):
            number, q, k, v = inputs
            out, cache = attend(q, k, v, cache, number)
            last = attention.decode(q[-1:], cache, tables[None], one[None], number)
            return cache, (out, last[0])

        numbers = jnp.arange(num_layers, dtype=jnp.int32)
        return jax.lax.scan(layer, cache, (numbers, q, k, v))

    cache, (chunk, last) = run(
        init_cache(len(groups) * blocks, plan), *(x.astype(np.float32) for x in (q, k, v))
    )
    np.testing.assert_allclose(chunk[:, -1], last, atol=2e-6)
    return np.asarray(chunk), cache


@pytest.mark.parametrize(
    ("kv_dtype", "scaled"),
    [
        ("int4", True),
        ("float8_e4m3fn", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("int8", True),
                ("int8", False),
                ("int4", False),
                ("float8_e4m3fn", True),
            )
        ),
    ],
)
def test_plain_layers_are_exact_and_the_others_as_in_a_pool_of_their_own(kv_dtype, scaled):
    scales = None if scaled else uniform_scales(1 / 7, LAYERS, HEADS)
    exact, _ = attend_all(layout("float32", plain=()))
    coded, _ = attend_all(layout(kv_dtype, plain=(), scaled=scaled), kv_scales=scales)
    mixed, cache = attend_all(layout(kv_dtype, scaled=scaled), kv_scales=scales)
    assert isinstance(cache, MixedPages)
    for number in range(LAYERS):
        expected = exact if number in PLAIN else coded
        np.testing.assert_array_equal(mixed[number], expected[number])
    assert not np.array_equal(exact[1], coded[1])


def test_each_layer_and_head_has_its_own_static_scale():
    def steps(base):
        return tuple(tuple(base * (1 + h + 2 * n) for h in range(HEADS)) for n in range(LAYERS))

    scales = StaticScales(k=steps(0.02), v=steps(0.03))
    out, cache = attend_all(layout("int8", plain=(), scaled=False), kv_scales=scales)
    v = np.random.default_rng(0).uniform(-1, 1, (3, LAYERS, TOKENS, HEADS, DIM))[2]
    for number in range(LAYERS):  # the first token sees nothing but itself
        scale = np.array(scales.v[number])[:, None]
        np.testing.assert_allclose(out[number, 0], np.rint(v[number, 0] / scale) * scale, atol=1e-5)
    assert cache.static_scales


@pytest.mark.parametrize("kv_dtype", HALF_STEP)
def test_the_error_stays_bounded_past_a_window(kv_dtype):
    """ik_llama.cpp#1205: window 8, 20 tokens, 8-bit and 4-bit caches."""
    spans = [Span(8), Span(8), Span(), Span()]
    exact, _ = attend_all(layout("float32", plain=()), spans)
    sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": DIM, "block_size": 4}
    coded, _ = attend_all(KVLayout(**sizes, kv_dtype=kv_dtype), spans)
    # V within [-1, 1] is off by half a step at most, and a score by |q| * half a step.
    half = HALF_STEP[kv_dtype]
    bound = half + np.expm1(2 * half * DIM * DIM**-0.5)
    error = np.abs(coded - exact).max(axis=(0, 2, 3))
    assert error.max() <= bound
    assert error[12:].max() <= 2 * error[:8].max()  # and it does not grow past the window


def test_blocks_of_both_pools_are_swapped_together():
    plan = layout("int4")
    _, cache = attend_all(plan)
    bits = [np.array(leaf).tobytes() for leaf in jax.tree.leaves(cache)]
    host = HostSpace(5, cache)
    assert swap_out(cache, np.arange(5), host, np.arange(5)) == pool_bytes(5, plan)
    back = swap_in(init_cache(5, plan), np.arange(5), host, np.arange(5))
    assert [np.array(leaf).tobytes() for leaf in jax.tree.leaves(back)] == bits


def test_a_mixed_cache_is_updated_in_place_within_a_scan():
    plan = layout("int8")
    attention = PagedAttention(groups=group_layers([Span()] * LAYERS), block_size=4)
    cache = jax.eval_shape(lambda: init_cache(20000, plan))

    def step(cache, q, tables, lens):
        slots = attention.slots(tables, lens - 1, lens > 0)

        def layer(carry, number):
            x, cache = carry
            cache = attention.write(x, x, cache, slots, number)
            return (attention.decode(x, cache, tables, lens, number), cache), None

        return jax.lax.scan(layer, (q, cache), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    q = jax.ShapeDtypeStruct((2, HEADS, DIM), jnp.float32)
    tables = jax.ShapeDtypeStruct((2, 1, 8), jnp.int32)
    lens = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, q, tables, lens).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes(20000, plan)
    assert memory.temp_size_in_bytes < pool_bytes(20000, plan) / 8
