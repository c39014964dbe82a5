"""Dynamic quantisation: one float32 scale per token and head, `x ≈ code * scale`."""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import KVDtype

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
    if jnp.issubdtype(storage.dtype, jnp.integer):
        codes = jnp.round(codes)
    # XLA on a CPU casts float32 480 to NaN in e4m3fn instead of saturating: clip first.
    codes = jnp.clip(codes, -storage.max_code, storage.max_code).astype(storage.dtype)
    return codes, jnp.where(finite, scale, jnp.nan)
