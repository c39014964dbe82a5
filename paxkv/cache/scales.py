"""Static scales: known before a token is written, one a layer or one a layer and KV head."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KV_DTYPES
from pallas_kernels.checks import why_not_scale
from paxkv.cache.quantize import CALIBRATE, STORAGE, KVFormat
from paxkv.errors import ConfigError

type PerHead = tuple[tuple[float, ...], ...]
"""A number for each KV head of each layer of the model."""


@dataclass(frozen=True, kw_only=True)
class StaticScales:
    """Scales of codes, `x ≈ code * scale`, that the pool does not carry.

    They are constants of the compiled steps, hence plain numbers.

    Attributes:
        k: For keys.
        v: For values.
    """

    k: PerHead
    v: PerHead

    def of_layer(self, layer: int | jax.Array) -> dict[str, jax.Array]:
        """Return a layer's scales, float32 `[kv_head]`, by their names in the ops."""
        return {
            "k_scale": jnp.asarray(self.k, jnp.float32)[layer],
            "v_scale": jnp.asarray(self.v, jnp.float32)[layer],
        }


def uniform_scales(scale: float, num_layers: int, num_kv_heads: int) -> StaticScales:
    """Return one scale for K and V of every layer and head."""
    whole = ((float(scale),) * num_kv_heads,) * num_layers
    return StaticScales(k=whole, v=whole)


def scales_from_absmax(
    k_absmax: np.ndarray, v_absmax: np.ndarray, kv: KVFormat, *, margin: float
) -> StaticScales:
    """Return scales that put the largest magnitudes seen, and a margin, at the largest code.

    Args:
        k_absmax: float `[layer, kv_head]`; 0 where nothing but zeros was seen.
        v_absmax: The same for values.
        kv: A format with static scales.
        margin: Factor on the magnitudes, for text that goes beyond what was seen.

    Raises:
        ConfigError: A magnitude is NaN, infinite or too small to divide by.
    """
    largest = KV_DTYPES[STORAGE[kv.name]].max_code
    assert largest is not None, kv
    made = {}
    for name, absmax in (("k", k_absmax), ("v", v_absmax)):
        if kv.granularity == "tensor":
            absmax = np.broadcast_to(absmax.max(axis=1, keepdims=True), absmax.shape)
        scale = np.where(absmax == 0, 1.0, absmax * (margin / largest)).astype(np.float32)
        if reason := why_not_scale(scale):
            raise ConfigError(
                f"kv.scale={CALIBRATE}: {name.upper()} of the text gave {reason}. Try "
                "kv.granularity=token_head."
            )
        made[name] = tuple(tuple(layer) for layer in scale.tolist())
    return StaticScales(**made)
