"""`write_kv` as one XLA scatter per leaf, in place when the pool is donated."""

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
    block_size = pages.block_size
    # Out of range on purpose: mode="drop" skips negative slots as it does those past the end.
    block = jnp.where(slot_mapping < 0, pages.num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size
    written = {
        name: getattr(pages, name).at[block, layer, :, offset].set(new, mode="drop")
        for name, new in encode(k, v, pages, k_scale, v_scale).items()
    }
    return dataclasses.replace(pages, **written)
