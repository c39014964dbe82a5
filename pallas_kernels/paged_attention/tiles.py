"""Fetch tiles of pages as contiguous float32 keys or values: what the XLA implementation reads."""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import KV_DTYPES, KVPages


def take_tiles(
    pages: KVPages,
    name: str,  # "k" or "v"
    block_ids: jax.Array,  # i32 [tile, page], within the pool
    layer: int | jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Gather tiles of whole pages, one (page, head) at a time.

    Returns:
        values, float32 `[tile, kv_head, page * block_size, dim]`, still to be multiplied by the
        scales, float32 `[tile, kv_head, page * block_size]`; None where the pool has none.
    """
    leaf, scale = getattr(pages, name), getattr(pages, f"{name}_scale")
    tiles, heads = block_ids.shape[0], pages.num_kv_heads
    page_ids = block_ids * pages.num_layers + layer
    index = page_ids[:, None, :] * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]

    def gather(leaf: jax.Array) -> jax.Array:
        flat = leaf.reshape(pages.num_blocks * pages.num_layers * heads, -1)
        # The barrier keeps XLA from merging the reshape below into the gather: copying runs of
        # block_size * dim values took 11 ms where runs of dim took 15 (decode step of SmolLM2-135M
        # on a 2-core CPU, 24 rows).
        return jax.lax.optimization_barrier(flat.at[index].get(mode="promise_in_bounds"))

    stored = gather(leaf).reshape(tiles, heads, -1, leaf.shape[-1])
    values = KV_DTYPES[pages.dtype_name].widen(stored)
    if scale is None:
        return values, None
    return values, gather(scale).reshape(tiles, heads, -1)
