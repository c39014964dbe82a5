"""Quantisation, `x ≈ code * scale`: a scale found for each token and head, or one given."""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import KV_DTYPES, KVDtype, KVPages

# Vectors below this absmax, all-zero ones above all, take scale 1 and codes of 0. The Mosaic
# kernels divide weights by V's scales in float32: far smaller scales would overflow their sums.
_ABSMAX_FLOOR = 1e-20


def quantise(x: jax.Array, storage: KVDtype) -> tuple[jax.Array, jax.Array]:
    """Quantise vectors along their last axis.

    Finite input gives finite codes and scales. A vector holding NaN or an infinity gives a NaN
    scale for itself alone: the fault stays visible in its own row and touches no other.

    Args:
        x: `[..., dim]`, any float dtype.
        storage: a quantised entry of `KV_DTYPES`.

    Returns:
        codes `[..., dim]` in the storage dtype and scales, float32 `[...]`.
    """
    assert storage.max_code is not None, storage
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x)
    # XLA on a CPU may drop a NaN from a maximum: let infinity stand for it.
    absmax = jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=-1)
    scale = jnp.where(absmax < _ABSMAX_FLOOR, 1.0, absmax / storage.max_code)
    finite = absmax < jnp.inf
    codes = x / jnp.where(finite, scale, 1.0)[..., None]
    codes = jnp.where(finite[..., None], codes, 0.0)
    return _to_codes(codes, storage), jnp.where(finite, scale, jnp.nan)


def quantise_by(x: jax.Array, scale: jax.Array, storage: KVDtype) -> jax.Array:
    """Quantise by scales that are given; what is beyond the largest code is clipped to it.

    Codes have no room for a fault: infinities become the largest code, NaN becomes 0.

    Args:
        x: `[..., dim]`, any float dtype.
        scale: float32, `x.shape[:-1]` or one that broadcasts to it.
        storage: a quantised entry of `KV_DTYPES`.

    Returns:
        codes `[..., dim]` in the storage dtype.
    """
    scale = jnp.broadcast_to(scale, x.shape[:-1])
    codes = x.astype(jnp.float32) / scale[..., None]
    return _to_codes(jnp.where(jnp.isnan(codes), 0.0, codes), storage)


def encode(
    k: jax.Array,
    v: jax.Array,
    pages: KVPages,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> dict[str, jax.Array]:
    """What a pool stores of new keys and values, by leaf.

    Args:
        k: `[..., kv_head, dim]`, any float dtype.
        v: the same shape.
        pages: the pool; only how it stores is looked at.
        k_scale: static scales, float32 `[kv_head]`; None unless the pool wants them.
        v_scale: the same for values.
    """
    storage = KV_DTYPES[pages.dtype_name]
    leaves = {}
    for name, x, static in (("k", k, k_scale), ("v", v, v_scale)):
        if not storage.quantised:
            leaves[name] = x.astype(storage.dtype)
        elif static is not None:
            leaves[name] = storage.to_leaf(quantise_by(x, static, storage))
        else:
            codes, leaves[f"{name}_scale"] = quantise(x, storage)
            leaves[name] = storage.to_leaf(codes)
    return leaves


def _to_codes(x: jax.Array, storage: KVDtype) -> jax.Array:
    """Round finite or infinite numbers to the nearest codes."""
    assert storage.max_code is not None, storage
    if jnp.issubdtype(storage.dtype, jnp.integer):
        x = jnp.round(x)
    # XLA on a CPU casts float32 480 to NaN in e4m3fn instead of saturating: clip first.
    return jnp.clip(x, -storage.max_code, storage.max_code).astype(storage.dtype)
