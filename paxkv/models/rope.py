"""Rotary position embedding and its long-context variants, as a model file states them.

Source: RoFormer (arXiv:2104.09864); YaRN (arXiv:2309.00071) for `yarn`; the Llama 3.1 model card's
frequency scaling for `llama3`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.errors import ConfigError

RopeKind = Literal["linear", "llama3", "yarn"]
SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How frequencies are stretched past the length a model was first trained for.

    Attributes:
        factor: Longest length divided by the original one.
        original_max_len: Original training length, tokens; unused by `linear`.
        low_freq_factor: `llama3` only: wavelengths above original / this are fully scaled.
        high_freq_factor: `llama3` only: wavelengths below original / this are kept.
        beta_fast: `yarn` only: rotations in the original length from which a dimension is kept.
        beta_slow: `yarn` only: rotations below which a dimension is fully interpolated.
        attention_factor: `yarn` only: multiplies cos and sin, so logits grow by its square.
        truncate: `yarn` only: round the two borders of the ramp to whole dimensions.
    """

    kind: RopeKind
    factor: float
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def scaling_from_hf(
    given: Mapping[str, Any] | None, *, max_position_embeddings: int
) -> RopeScaling | None:
    """Read `rope_scaling` (or `rope_parameters`) of a Hugging Face config.

    Both names of the kind are read, `rope_type` and the older `type`; null and "default" mean
    no scaling.

    Raises:
        ConfigError: An unknown kind, named; or a key that the kind needs and lacks.
    """
    if not given:
        return None
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SUPPORTED_KINDS:
        raise ConfigError(
            f"model: rope_scaling has rope_type={kind!r}; supported are "
            f"{', '.join(SUPPORTED_KINDS)}. Choose another checkpoint with model.path=DIR."
        )
    required = ["factor"]
    if kind == "llama3":
        required += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [key for key in required if given.get(key) is None]
    if missing:
        raise ConfigError(
            f"model: rope_scaling of rope_type={kind!r} needs {', '.join(required)}; "
            f"config.json lacks {', '.join(missing)}."
        )
    factor = float(given["factor"])
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    original = int(given.get("original_max_position_embeddings") or max_position_embeddings)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_max_len=original,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_len=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(given, factor),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(float(given["mscale"])) / mscale(float(given["mscale_all_dim"]))
    return mscale(1.0)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Return the angle each dimension pair turns a token, and the factor on cos and sin.

    Returns:
        f32 [head_dim // 2] in radians a token, and the attention factor (1 except for `yarn`).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    if scaling is None:
        return base, 1.0
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(base, scaling), 1.0
    return _yarn_frequencies(base, head_dim, theta, scaling), scaling.attention_factor


def _llama3_frequencies(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelength = 2 * np.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (scaling.original_max_len / wavelength - low) / (high - low)
    kept = np.clip(kept, 0.0, 1.0)  # 1: short wavelengths, unchanged; 0: long ones, divided
    return ((1 - kept) * base / scaling.factor + kept * base).astype(np.float32)


def _yarn_frequencies(
    base: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling
) -> np.ndarray:
    def dimension_of(rotations: float) -> float:
        turns = scaling.original_max_len / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # an empty ramp would divide by zero
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    interpolated = np.clip((pairs - low) / (high - low), 0.0, 1.0)
    return (base / scaling.factor * interpolated + base * (1 - interpolated)).astype(np.float32)


def rotation(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, f32 [head_dim // 2, token], of integer positions [token]."""
    frequencies, factor = inverse_frequencies(head_dim, theta, scaling)
    angles = jnp.asarray(frequencies)[:, None] * positions.astype(jnp.float32)[None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + dim/2) of x [head, dim, token]; Hugging Face's half-split layout."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    cos, sin = cos[None], sin[None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=1).astype(x.dtype)
