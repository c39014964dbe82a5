"""`write_kv` one token at a time: slow, and plain to read."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.quantise import encode
from pallas_kernels.pages import KVPages


def write_kv(
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> KVPages:
    """See `pallas_kernels.write_kv`."""
    num_slots = pages.num_blocks * pages.block_size

    def write_token(token: jax.Array, pages: KVPages) -> KVPages:
        slot = slot_mapping[token]
        inside = (slot >= 0) & (slot < num_slots)
        block = jnp.where(inside, slot // pages.block_size, 0)
        offset = slot % pages.block_size
        leaves = {}
        for name, x in encode(k[token], v[token], pages, k_scale, v_scale).items():
            leaf = getattr(pages, name)
            old = leaf[block, layer, :, offset]
            leaves[name] = leaf.at[block, layer, :, offset].set(jnp.where(inside, x, old))
        return dataclasses.replace(pages, **leaves)

    return jax.lax.fori_loop(0, slot_mapping.shape[0], write_token, pages)
