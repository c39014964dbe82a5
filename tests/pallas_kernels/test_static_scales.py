"""Pools without scales of their own: the ops take those of the layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KV_DTYPES,
    UnsupportedError,
    available_implementations,
    init_pages,
    paged_decode,
    paged_prefill,
    read_kv,
    write_kv,
)
from pallas_kernels.limits import AttentionSizes, why_not_mosaic_for

IMPLEMENTATIONS = available_implementations()
QUANTISED = [name for name, storage in KV_DTYPES.items() if storage.quantised]
HEADS, DIM, TOKENS = 2, 32, 40
K_SCALE = np.array([0.02, 0.5], np.float32)
V_SCALE = np.array([0.3, 0.004], np.float32)
TABLE = np.array([[2, 0, 1]], np.int32)


def fill(dtype, size=40, implementation="xla", k_scale=K_SCALE, v_scale=V_SCALE):
    """Write a row into a pool of three blocks; K and V reach `size` codes."""
    k, v = np.random.default_rng(0).uniform(-size, size, (2, TOKENS, HEADS, DIM))
    k, v = (k * K_SCALE[:, None]).astype(np.float32), (v * V_SCALE[:, None]).astype(np.float32)
    slots = TABLE[0][np.arange(TOKENS) // 16] * 16 + np.arange(TOKENS) % 16
    pages = init_pages(3, 2, HEADS, 16, DIM, dtype, scaled=False)
    write = jax.jit(functools.partial(write_kv, layer=1, implementation=implementation))
    return k, v, slots, write(k, v, pages, slots, k_scale=k_scale, v_scale=v_scale)


def stored(pages, slots, k_scale=K_SCALE, v_scale=V_SCALE):
    codes = read_kv(pages, jnp.asarray(slots), layer=1)
    return [np.asarray(c) * s[:, None] for c, s in zip(codes, (k_scale, v_scale), strict=True)]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_pool_holds_codes_and_nothing_else(dtype):
    pages = init_pages(3, 2, HEADS, 16, DIM, dtype, scaled=False)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    assert nbytes == 3 * 2 * HEADS * 16 * KV_DTYPES[dtype].token_bytes(DIM, scaled=False)
    assert pages.static_scales and not init_pages(3, 2, HEADS, 16, DIM, dtype).static_scales


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_values_within_the_codes_are_kept_to_half_a_step(dtype, implementation):
    size = 7 if dtype == "int4" else 40
    k, v, slots, pages = fill(dtype, size, implementation)
    step = {"float8_e4m3fn": size / 8, "float8_e5m2": size / 4}.get(dtype, 1.0)
    for x, got, scale in zip((k, v), stored(pages, slots), (K_SCALE, V_SCALE), strict=True):
        assert np.all(np.abs(x - got) <= 0.501 * step * scale[:, None])
        assert np.abs(got).max() > 0


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("value", [1e30, -1e30, np.inf])
def test_what_the_codes_cannot_hold_is_clipped(dtype, value):
    """ml_dtypes#260: no NaN can come of a value beyond the range."""
    largest = KV_DTYPES[dtype].max_code
    k = np.full((1, HEADS, DIM), value, np.float32)
    pages = init_pages(1, 2, HEADS, 16, DIM, dtype, scaled=False)
    pages = write_kv(k, k, pages, np.array([3], np.int32), layer=1, k_scale=0.5, v_scale=0.5)
    for got in read_kv(pages, jnp.array([3]), layer=1):
        np.testing.assert_array_equal(got, np.sign(value) * largest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "q_dtype"),
    [("int8", "float32"), ("int4", "bfloat16"), ("float8_e4m3fn", "bfloat16")],
)
def test_attention_is_that_of_the_stored_values(attention, implementation, dtype, q_dtype):
    _, _, slots, pages = fill(dtype)
    keys, values = stored(pages, slots)
    q = jax.random.normal(jax.random.key(1), (1, 8, 3 * HEADS, DIM), q_dtype)
    masks = {"window": 20, "num_sink_tokens": 3, "soft_cap": 3.0}
    options = {**masks, "layer": 1, "k_scale": K_SCALE, "v_scale": V_SCALE}
    options["implementation"] = implementation
    lens, chunk = np.array([TOKENS], np.int32), np.array([8], np.int32)
    got = paged_prefill(q, pages, TABLE, lens, chunk, **options)[0]
    want = attention.oracle_row(
        np.asarray(q[0], np.float64),
        keys,
        values,
        positions=range(TOKENS - 8, TOKENS),
        scale=DIM**-0.5,
        window=20,
        sinks=3,
        soft_cap=3.0,
    )
    assert got.dtype == q.dtype
    size = max(1.0, np.abs(want).max())
    assert attention.row_errors(got, want).max() <= attention.tolerance[q_dtype] * size
    last = paged_decode(q[:, -1], pages, TABLE, lens, **options)
    assert attention.row_errors(last, want[-1:]).max() <= attention.tolerance[q_dtype] * size


def test_one_number_stands_for_every_head():
    *_, one = fill("int8", k_scale=0.1, v_scale=0.2)
    *_, each = fill("int8", k_scale=np.float32([0.1, 0.1]), v_scale=np.float32([0.2, 0.2]))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(each), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, [1.0, 0.0]])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_no_scale_but_a_positive_finite_one(scale, name):
    """onnxruntime/mobius#447."""
    _, _, _, pages = fill("int8")
    scales = {"k_scale": 1.0, "v_scale": 1.0, name: np.asarray(scale, np.float32)}
    q, lens = jnp.ones((1, 4, DIM)), np.array([5], np.int32)
    for call in (
        lambda: write_kv(q[:, :2], q[:, :2], pages, lens, layer=0, **scales),
        lambda: paged_decode(q, pages, TABLE, lens, layer=0, **scales),
        lambda: paged_prefill(q[None], pages, TABLE, lens, lens, layer=0, **scales),
    ):
        with pytest.raises(ValueError, match=f"{name}: .* is no scale: must be positive"):
            call()


def test_scales_must_be_given_where_wanted_and_only_there():
    q, lens = jnp.ones((1, 4, DIM)), np.array([5], np.int32)
    bare = init_pages(3, 2, HEADS, 16, DIM, "int8", scaled=False)
    with pytest.raises(ValueError, match="v_scale is missing: a int8 pool without scales"):
        paged_decode(q, bare, TABLE, lens, layer=0, k_scale=1.0)
    with pytest.raises(ValueError, match=r"k_scale has shape \[3\].*\[kv_head\] = \[2\]"):
        paged_decode(q, bare, TABLE, lens, layer=0, k_scale=np.ones(3), v_scale=1.0)
    for dtype, why in (("int8", "carries a scale a token"), ("float32", "is not quantised")):
        pages = init_pages(3, 2, HEADS, 16, DIM, dtype)
        with pytest.raises(ValueError, match=f"k_scale is given: this {dtype} pool {why}"):
            paged_decode(q, pages, TABLE, lens, layer=0, k_scale=1.0, v_scale=1.0)


def test_mosaic_says_what_it_does_not_read(monkeypatch):
    sizes = AttentionSizes("int8", "bfloat16", 64, 16, 4, 2)
    assert why_not_mosaic_for(sizes) is None
    assert "static scales" in str(why_not_mosaic_for(sizes._replace(static_scales=True)))
    assert "int4" in str(why_not_mosaic_for(sizes._replace(kv_dtype="int4")))
    monkeypatch.setattr("pallas_kernels.kv_write.api.why_not_mosaic_on", lambda device: None)
    k = jnp.ones((1, HEADS, DIM), jnp.bfloat16)
    for dtype, why in (("int4", "the pool is int4"), ("int8", "static scales")):
        pages = init_pages(3, 2, HEADS, 16, DIM, dtype, scaled=False)
        with pytest.raises(UnsupportedError, match=f"{why}.*What can: reference, xla"):
            write_kv(
                *(k, k, pages, np.array([0], np.int32)),
                layer=0,
                k_scale=1.0,
                v_scale=1.0,
                implementation="mosaic",
            )
