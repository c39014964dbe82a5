"""Fetch tiles of pages as contiguous float32 keys or values: what the XLA implementation reads."""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import KVPages


def take_tiles(
    pages: KVPages,
    name: str,  # "k" or "v"
    block_ids: jax.Array,  # i32 [tile, page], within the pool
    layer: int | jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Gather tiles of whole pages, one (page, head) at a time.

    Returns:
        values, float32 `[tile, kv_head, page * block_size, dim]`, still to be multiplied by the
        scales, float32 `[tile, kv_head, page * block_size]`, which are None unless quantised.
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

    values = to_float32(gather(leaf)).reshape(tiles, heads, -1, pages.head_dim)
    if scale is None:
        return values, None
    return values, gather(scale).reshape(tiles, heads, -1)


def to_float32(codes: jax.Array) -> jax.Array:
    """Widen stored values exactly; finite e4m3 and e5m2 go through float16, which holds them all.

    XLA on a CPU widens 8-bit floats by branchy bit arithmetic; float16 has an instruction.
    """
    if codes.dtype == jnp.float8_e5m2:
        bits = jax.lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint16)
        return jax.lax.bitcast_convert_type(bits << 8, jnp.float16).astype(jnp.float32)
    if codes.dtype == jnp.float8_e4m3fn:
        bits = jax.lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = jax.lax.bitcast_convert_type(bits, jnp.float16)
        return half.astype(jnp.float32) * 256.0  # the exponent biases differ by 8
    return codes.astype(jnp.float32)
