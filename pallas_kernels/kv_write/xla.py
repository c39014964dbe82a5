"""`write_kv` as one XLA scatter per leaf, in place when the pool is donated."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.quantise import quantise
from pallas_kernels.pages import KV_DTYPES, KVPages


def write_kv(
    k: jax.Array, v: jax.Array, pages: KVPages, slot_mapping: jax.Array, *, layer: int | jax.Array
) -> KVPages:
    """See `pallas_kernels.write_kv`."""
    storage = KV_DTYPES[pages.dtype_name]
    block_size = pages.block_size
    # Out of range on purpose: mode="drop" skips negative slots as it does those past the end.
    block = jnp.where(slot_mapping < 0, pages.num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size
    leaves: dict[str, jax.Array] = {}
    for name, x in (("k", k), ("v", v)):
        if storage.quantised:
            codes, leaves[f"{name}_scale"] = quantise(x, storage)
            leaves[name] = storage.to_leaf(codes)
        else:
            leaves[name] = x.astype(storage.dtype)
    written = {
        name: getattr(pages, name).at[block, layer, :, offset].set(new, mode="drop")
        for name, new in leaves.items()
    }
    return dataclasses.replace(pages, **written)
