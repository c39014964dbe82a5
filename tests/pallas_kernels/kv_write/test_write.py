"""write_kv: what lands in the pool, what must not, and that the pool is not copied."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import (
    KV_DTYPES,
    available_implementations,
    init_pages,
    paged_decode,
    read_kv,
    write_kv,
)

IMPLEMENTATIONS = available_implementations()
# Largest |x - stored| over the absmax of the vector: half a step of the code next to the largest.
STORAGE_ERROR = {
    "float32": 0.0,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "int8": 0.5 / 127 * 1.001,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int4": 0.5 / 7 * 1.001,
}
SLOTS = (3, 17, -1, 79, 80, 40)  # one padding, one past the end of 5 blocks of 16


def write(k, v, pages, slots, implementation="xla", layer=1):
    run = jax.jit(functools.partial(write_kv, implementation=implementation))
    slots = jnp.asarray(slots, jnp.int32)
    return run(jnp.asarray(k), jnp.asarray(v), pages, slots, layer=layer)


def vectors(tokens, heads=2, dim=32, seed=0):
    """K and V of magnitudes far from 1, different for each head and for K and V."""
    rng = np.random.default_rng(seed)
    size = np.array([[[0.01], [5.0]], [[300.0], [0.2]]])[:, :heads]
    return (rng.standard_normal((2, tokens, heads, dim)) * size[:, None]).astype(np.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_writes_its_slots_and_nothing_else(implementation, dtype):
    """jax-ml/jax#9083: a write past the end leaves the tokens before it alone."""
    k, v = vectors(len(SLOTS))
    old = init_pages(5, 3, 2, 16, 32, dtype)
    old = jax.tree.map(lambda x: x + jnp.asarray(2, x.dtype), old)
    new = write(k, v, old, SLOTS, implementation)
    kept = [i for i, slot in enumerate(SLOTS) if 0 <= slot < 80]
    slots = np.array(SLOTS)[kept]
    for got, x in zip(read_kv(new, jnp.asarray(slots), layer=1), (k[kept], v[kept]), strict=True):
        bound = STORAGE_ERROR[dtype] * np.abs(x).max(axis=-1, keepdims=True)
        assert np.all(np.abs(np.asarray(got) - x) <= bound)
    touched = np.zeros((5, 3, 2, 16), bool)
    touched[slots // 16, 1, :, slots % 16] = True
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        before, after = np.asarray(before), np.asarray(after)
        np.testing.assert_array_equal(before[~touched], after[~touched])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_implementations_agree_bit_for_bit(dtype):
    k, v = vectors(len(SLOTS), seed=1)
    pages = [write(k, v, init_pages(5, 3, 2, 16, 32, dtype), SLOTS, i) for i in IMPLEMENTATIONS]
    for leaves in zip(*map(jax.tree.leaves, pages), strict=True):
        for leaf in leaves[1:]:
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(leaves[0]))


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-19, 1e-6, 1000.0, 3e38])
def test_finite_input_gives_finite_codes_and_positive_scales(dtype, size):
    """jax-ml/ml_dtypes#260: XLA on a CPU casts e4m3 above 464 to NaN instead of saturating."""
    k = size * np.array([1.0, -1.0, 0.5, 0.0] * 8, np.float32) * np.ones((1, 2, 1), np.float32)
    pages = write(k, k, init_pages(2, 3, 2, 16, 32, dtype), [5])
    got, _ = read_kv(pages, jnp.array([5]), layer=1)
    np.testing.assert_allclose(got, k, rtol=0, atol=STORAGE_ERROR[dtype] * size + 1e-30)
    assert pages.k_scale is not None
    scale = np.asarray(pages.k_scale)
    assert np.all(np.isfinite(scale)) and np.all(scale > 0)
    if size == 0:
        np.testing.assert_array_equal(scale, 1.0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_are_those_of_ml_dtypes(dtype):
    """An independent quantisation of the same vectors in NumPy gives the same codes."""
    k, v = vectors(4, seed=2)
    pages = write(k, v, init_pages(1, 3, 2, 16, 32, dtype), [0, 1, 2, 3])
    top = float(ml_dtypes.finfo(dtype).max)
    scale = np.abs(k).max(axis=-1, keepdims=True) / np.float32(top)
    want = np.clip(k / scale, -top, top).astype(dtype).astype(np.float32)
    got = np.asarray(pages.k[0, 1, :, :4]).view(dtype).astype(np.float32).transpose(1, 0, 2)
    # XLA may divide by a reciprocal: a value on a rounding boundary may fall either way.
    assert np.mean(got != want) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_faulty_vector_shows_and_spoils_no_other(dtype, fault):
    k, v = vectors(3)
    k[1, 0, 7] = fault
    pages = write(k, v, init_pages(1, 3, 2, 16, 32, dtype), [0, 1, 2])
    got, _ = read_kv(pages, jnp.arange(3), layer=1)
    assert not np.isfinite(got[1, 0]).all()
    good = np.ones((3, 2), bool)
    good[1, 0] = False
    bound = STORAGE_ERROR[dtype] * np.abs(k[good]).max(axis=-1, keepdims=True)
    assert np.all(np.abs(np.asarray(got)[good] - k[good]) <= bound)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_error_stays_bounded_over_512_steps(dtype):
    """InfiniLM#553: magnitudes up to 5, decoded a token at a time; the bound holds at the end."""
    steps, dim = 512, 32
    rng = np.random.default_rng(0)
    k, v = rng.uniform(-5, 5, (2, steps, 1, dim)).astype(np.float32)
    q = jnp.asarray(rng.standard_normal((1, 1, dim)), jnp.float32)
    tables = jnp.asarray(rng.permutation(32)[None], jnp.int32)

    @jax.jit
    def decode(pages, k, v):
        def step(pages, token):
            slot = tables[0, token // 16] * 16 + token % 16
            pages = write_kv(k[token][None], v[token][None], pages, slot[None], layer=0)
            return pages, paged_decode(q, pages, tables, token[None] + 1, layer=0)[0]

        return jax.lax.scan(step, pages, jnp.arange(steps, dtype=jnp.int32))

    _, exact = decode(init_pages(32, 1, 1, 16, dim, "float32"), k, v)
    _, stored = decode(init_pages(32, 1, 1, 16, dim, dtype), k, v)
    # V is off by at most half a step; the scores by at most |q|_1 half steps, so a weight by at
    # most a factor exp(2 * that), which moves the mean of values within ±5.
    half_step = 5 / KV_DTYPES[dtype].max_code / 2
    score_error = float(jnp.abs(q).sum()) * half_step * dim**-0.5
    bound = half_step + 5 * np.expm1(2 * score_error)
    errors = np.abs(np.asarray(stored - exact)).reshape(steps, -1).max(axis=1)
    assert errors.max() <= bound
    assert errors[-64:].max() <= 2 * errors[64:128].max()  # and it does not grow


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_pool_is_updated_in_place_within_a_scan(dtype):
    """A donated pool carried through a scan over layers: aliased, and no copy of it as scratch."""
    layers, rows = 4, 8
    pages = jax.eval_shape(lambda: init_pages(8192, layers, 2, 16, 64, dtype))
    pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))

    def step(pages, q, tables, lens, slots):
        def one(carry, layer):
            x, pages = carry
            kv = x[:, :2]
            pages = write_kv(kv, kv, pages, slots, layer=layer)
            return (paged_decode(x, pages, tables, lens, layer=layer), pages), None

        (out, pages), _ = jax.lax.scan(one, (q, pages), jnp.arange(layers, dtype=jnp.int32))
        return out, pages

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((rows, 4, 64), jnp.float32)
    lowered = jax.jit(step, donate_argnums=0).lower(
        pages, q, ints(rows, 32), ints(rows), ints(rows)
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
