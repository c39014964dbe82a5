"""The public `write_kv`: checks, then the chosen implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    Scale,
    check_float,
    check_int32,
    check_layer,
    check_pages,
    check_shape,
    check_static_scales,
)
from pallas_kernels.device import device_kind
from pallas_kernels.dispatch import Implementation, later, run_op
from pallas_kernels.kv_write import reference, xla
from pallas_kernels.limits import why_not_mosaic_on, why_not_mosaic_pool
from pallas_kernels.pages import KVPages


def _why_not_mosaic(
    k: jax.Array, v: jax.Array, pages: KVPages, slot_mapping: jax.Array, **options: Any
) -> str | None:
    reason = why_not_mosaic_on(device_kind()) or why_not_mosaic_pool(
        pages.dtype_name, pages.static_scales
    )
    if reason is not None:
        return reason
    unsupported = later("pallas_kernels.kv_write.mosaic", "unsupported")
    return unsupported(k, v, pages, slot_mapping, **options)


_WRITE = {
    "reference": Implementation(reference.write_kv),
    "xla": Implementation(xla.write_kv),
    "mosaic": Implementation(later("pallas_kernels.kv_write.mosaic", "write_kv"), _why_not_mosaic),
}


def write_kv(
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    slot_mapping: jax.Array,
    *,
    layer: int | jax.Array,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
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
        k_scale: static scale of this layer's keys, a number or float32 `[kv_head]`, for a pool
            that carries no scales of its own; None for any other.
        v_scale: the same for values.
        implementation: a name from `available_implementations()`, or None to pick by device.

    Returns:
        The pool with the slots written; a quantised one by the absmax of each token and head, or
        by the static scales, which clip what they cannot hold.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or an unknown implementation.
        UnsupportedError: the named implementation cannot serve them.
    """
    slot_mapping = jnp.asarray(slot_mapping)
    check_pages(pages)
    axes = {"token": None, "kv_head": pages.num_kv_heads, "dim": pages.head_dim}
    check_shape("k", k, axes)
    check_shape("v", v, {**axes, "token": k.shape[0]})
    check_float("k", k)
    check_float("v", v)
    check_shape("slot_mapping", slot_mapping, {"token": k.shape[0]})
    check_int32("slot_mapping", slot_mapping)
    check_layer(layer, pages)
    scales = check_static_scales(pages, k_scale, v_scale)
    options = {} if scales is None else {"k_scale": scales.k, "v_scale": scales.v}
    return run_op(
        "write_kv", _WRITE, implementation, k, v, pages, slot_mapping, layer=layer, **options
    )
