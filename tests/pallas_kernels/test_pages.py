"""KVPages: sizes, limits, reading back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KV_DTYPES, KVPages, init_pages, read_kv


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_leaves_have_block_axis_first_and_layer_second(dtype):
    pages = init_pages(7, 3, 2, 16, 8, dtype)
    leaves = jax.tree.leaves(pages)
    assert all(leaf.shape[:2] == (7, 3) for leaf in leaves)
    assert len(leaves) == (4 if pages.quantised else 2)
    assert pages.dtype_name == dtype
    sizes = (pages.num_blocks, pages.num_layers, pages.num_kv_heads, pages.block_size)
    assert (*sizes, pages.head_dim) == (7, 3, 2, 16, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3'.*int8"),
        ({"num_blocks": 0}, "num_blocks=0: must be at least 1"),
        ({"head_dim": -1}, "head_dim=-1"),
    ],
)
def test_refuses_impossible_sizes(change, message):
    sizes = {"num_blocks": 1, "layers": 1, "kv_heads": 1, "block_size": 16, "head_dim": 8}
    with pytest.raises(ValueError, match=message):
        init_pages(**{**sizes, "dtype": "float32", **change})


def test_refuses_a_pool_that_32_bits_cannot_index():
    """vllm#50427: refused with the limit in the message; no allocation happens."""
    with pytest.raises(ValueError, match=r"below 2\^31 = 2147483648.*At most 524287 blocks fit"):
        init_pages(524288, 32, 8, 16, 128, "bfloat16")
    # One block fewer passes, though its elements number far beyond 2^31.
    pages = jax.eval_shape(lambda: init_pages(524287, 32, 8, 16, 128, "bfloat16"))
    assert pages.k.size > 2**37


def test_reads_the_last_slot_of_a_pool_of_more_than_2_31_elements():
    """Offsets are counted in pages and tokens: no product over elements is formed in 32 bits."""
    pages = jax.eval_shape(lambda: init_pages(2**17, 4, 8, 16, 64, "int8"))
    assert pages.k.size > 2**31
    text = jax.jit(lambda p, s: read_kv(p, s, layer=3)).lower(
        pages, jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    assert "i64" not in text.as_text().replace("array<i64", "").replace(": i64", "")


def test_read_kv_multiplies_by_the_scale_of_its_token_and_head():
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (2, 3, 4, 2, 4, 8)).astype(np.int8)
    scales = rng.uniform(0.001, 40, (2, 3, 4, 2, 4)).astype(np.float32)
    arrays = {"k": codes[0], "v": codes[1], "k_scale": scales[0], "v_scale": scales[1]}
    pages = KVPages(**{name: jnp.asarray(x) for name, x in arrays.items()})
    slots = [0, 5, 11]
    got = jax.jit(lambda layer: read_kv(pages, jnp.asarray(slots), layer=layer))(2)
    for i, slot in enumerate(slots):
        block, offset = divmod(slot, 4)
        for which, x in enumerate(got):
            want = codes[which, block, 2, :, offset] * scales[which, block, 2, :, offset][:, None]
            np.testing.assert_allclose(x[i], want, rtol=1e-6)
