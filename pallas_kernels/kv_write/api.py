"""The public `write_kv`: checks, then the chosen implementation."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.kv_write import xla
from pallas_kernels.pages import KVPages


def write_kv(
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
    implementation: str | None = None,
) -> KVPages:
    """Write one layer's new keys and values into their slots.

    Call it inside a `jax.jit` that donates `pages`: then nothing but the slots is touched.

    Args:
        k: `[token, kv_head, dim]`, any float dtype.
        v: the same shape.
        pages: the pool; consumed.
        slot_mapping: int32 `[token]`, `block_id * block_size + offset`. Negative slots are
            skipped (padding), as are slots past the end of the pool. No slot twice.
        layer: which layer; may be traced.
        implementation: a name from `available_implementations()`, or None to pick by device.

    Returns:
        The pool with the slots written; quantised per token and head where its dtype is 8-bit.
    """
    dispatch.resolve(implementation)
    return xla.write_kv(k, v, pages, slot_mapping, layer=layer)
