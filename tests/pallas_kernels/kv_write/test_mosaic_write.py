"""The Mosaic GPU kernel of write_kv, in GPU interpret mode with race detection, against XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError, init_pages, write_kv
from pallas_kernels.kv_write.mosaic import _plan_tile

pytestmark = pytest.mark.usefixtures("gpu_interpreter")

NUM_BLOCKS, LAYERS, BLOCK_SIZE = 8, 2, 16


def write(implementation, k, v, pages, slots):
    run = jax.jit(functools.partial(write_kv, implementation=implementation))
    return jax.block_until_ready(run(k, v, pages, slots, layer=jnp.int32(1)))


def make_case(dtype, kv_heads, dim, tokens, new_dtype):
    """New vectors of magnitudes far from 1 and slots in any order; the pool holds 3 everywhere."""
    rng = np.random.default_rng(tokens)
    sizes = np.exp(rng.uniform(-6, 6, (2, tokens, kv_heads, 1)))
    k, v = rng.standard_normal((2, tokens, kv_heads, dim)) * sizes
    k[0, 0] = 0.0
    slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[:tokens].astype(np.int32)
    if tokens > 3:
        v[1, kv_heads - 1, 3] = np.nan
        k[tokens - 1, 0, dim - 1] = np.inf
        slots[2] = -1
        slots[tokens - 2] = NUM_BLOCKS * BLOCK_SIZE  # just past the pool
    pages = init_pages(NUM_BLOCKS, LAYERS, kv_heads, BLOCK_SIZE, dim, dtype)
    pages = jax.tree.map(lambda x: jnp.full_like(x, 3), pages)
    return jnp.asarray(k, new_dtype), jnp.asarray(v, new_dtype), pages, jnp.asarray(slots)


def bits(leaf):
    """What a leaf holds, NaN included, as integers."""
    leaf = np.asarray(leaf)
    return leaf.view(f"u{leaf.dtype.itemsize}")


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "dim", "tokens", "new_dtype"),
    [
        ("bfloat16", 8, 128, 70, "bfloat16"),  # copied, the last tile partial
        ("bfloat16", 3, 80, 1, "float32"),  # converted; rows of a token padded
        ("int8", 8, 64, 19, "float32"),
        ("int8", 3, 80, 1, "bfloat16"),
        ("float8_e4m3fn", 3, 64, 70, "bfloat16"),
        ("float8_e4m3fn", 8, 128, 1, "float16"),
        ("float8_e5m2", 3, 80, 9, "bfloat16"),
        ("float8_e5m2", 8, 128, 5, "float32"),
    ],
)
def test_writes_the_same_bits_as_xla(dtype, kv_heads, dim, tokens, new_dtype):
    k, v, pages, slots = make_case(dtype, kv_heads, dim, tokens, new_dtype)
    want = write("xla", k, v, pages, slots)
    got = write("mosaic", k, v, pages, slots)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, other, old in zip(*map(jax.tree.leaves, (got, want, pages)), strict=True):
        np.testing.assert_array_equal(bits(mine), bits(other))
        assert (bits(mine) != bits(old)).any()
    if got.quantised and tokens > 3:  # the vector with a NaN says so
        block, offset = divmod(int(slots[1]), BLOCK_SIZE)
        assert np.isnan(got.v_scale[block, 1, kv_heads - 1, offset])


def test_no_tokens_write_nothing():
    k, v, pages, slots = make_case("int8", 2, 64, 1, "float32")
    got = write("mosaic", k[:0], v[:0], pages, slots[:0])
    for new, old in zip(*map(jax.tree.leaves, (got, pages)), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "dim", "message"),
    [
        ("float32", 2, 64, "the pool is float32; .*What can: reference, xla"),
        ("bfloat16", 2, 20, "head_dim is 20; a bfloat16 pool needs a multiple of 8 up to 256"),
        ("int8", 2, 72, "head_dim is 72; a int8 pool needs a multiple of 16 up to 256"),
        ("int8", 2, 512, "head_dim is 512"),
        ("int8", 65, 64, "65 KV heads; at most 64"),
    ],
)
def test_says_what_it_cannot_write(dtype, kv_heads, dim, message):
    k, v, pages, slots = make_case(dtype, kv_heads, dim, 1, "float32")
    with pytest.raises(UnsupportedError, match=message):
        write("mosaic", k, v, pages, slots)


def test_refuses_k_and_v_of_different_dtypes():
    k, v, pages, slots = make_case("int8", 2, 64, 1, "float32")
    with pytest.raises(UnsupportedError, match="k is bfloat16 and v float32"):
        write("mosaic", k.astype(jnp.bfloat16), v, pages, slots)


@pytest.mark.parametrize("row_bytes", [64, 80, 96, 128, 160, 256, 512])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 16, 33])
def test_tokens_of_a_tile_start_aligned_and_fill_it(kv_heads, row_bytes):
    tile = _plan_tile(kv_heads, row_bytes)
    assert tile is not None
    assert tile.tokens * tile.rows_per_token == 64
    assert tile.rows_per_token >= kv_heads
    assert tile.rows_per_token * row_bytes % 128 == 0
