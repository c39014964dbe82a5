"""What the ops must compute, in NumPy and float64, from the bytes a pool holds.

Written from the ops' documentation, apart from every implementation: nothing here calls JAX.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

_FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
_MAX_CODE = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

# Bits after the leading one of a 16-bit or float32 number, as a spacing at 1.
_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def storage_dtype(name: str) -> np.dtype:
    """NumPy dtype of a KV dtype by name; 4-bit codes before they are packed."""
    name = "int8" if name == "int4" else name
    return np.dtype(_FLOAT8.get(name, ml_dtypes.bfloat16 if name == "bfloat16" else name))


def dequantise(stored: np.ndarray, scale: np.ndarray | None, dtype: str) -> np.ndarray:
    """Values of K or V, float64, from what a leaf holds.

    Args:
        stored: `[..., dim]`; bytes where `dtype` is an 8-bit float, `[..., dim / 2]` for int4.
        scale: `[...]`, or None.
        dtype: the pool's dtype by name.
    """
    codes = stored.view(storage_dtype(dtype)) if dtype in _FLOAT8 else stored
    if dtype == "int4":  # low halves hold the first dims, high halves the others
        codes = np.concatenate([stored & 15, stored >> 4], axis=-1).astype(np.int8)
        codes = np.where(codes > 7, codes - 16, codes)
    values = codes.astype(np.float64)
    return values if scale is None else values * scale.astype(np.float64)[..., None]


def to_leaf(codes: np.ndarray, dtype: str) -> np.ndarray:
    """What a leaf holds of codes `[..., dim]`, in the dtype that `storage_dtype` names."""
    if dtype in _FLOAT8:
        return codes.view(np.uint8)
    if dtype == "int4":
        low, high = np.split(codes.view(np.uint8) & 15, 2, axis=-1)
        return low + 16 * high
    return codes


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    num_sink_tokens: int = 0,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Attention of some queries of one row.

    Args:
        q: `[query, head, dim]`.
        keys: float64 `[token, kv_head, dim]`, from position 0.
        values: the same for V.
        positions: `[query]`.
        scale: multiplies the scores.
        window: last positions that are seen; None is all.
        num_sink_tokens: first positions that are seen whatever the window.
        soft_cap: `soft_cap * tanh(scores / soft_cap)`; None is none.

    Returns:
        float64 `[query, head, dim]`.
    """
    group = q.shape[1] // keys.shape[1]
    token = np.arange(len(keys))
    distance = positions[:, None] - token
    seen = distance >= 0
    if window is not None:
        seen &= (distance < window) | (token < num_sink_tokens)
    out = np.empty(q.shape)
    for head in range(q.shape[1]):
        scores = scale * (q[:, head].astype(np.float64) @ keys[:, head // group].T)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, head] = weights @ values[:, head // group]
    return out


def attention_bound(q_dtype: str, values: np.ndarray) -> float:
    """Largest error an attention output of a row may have.

    Half a spacing for the rounding of the softmax weights to 16 bits, half for that of the output,
    half for everything else, each at most that share of the largest |V|; float32 has 64 spacings,
    since its sums are as exact as its terms.
    """
    spacings = 64 if q_dtype == "float32" else 1.5
    return spacings * _EPS[q_dtype] * float(np.abs(values).max(initial=0.0)) + 1e-6


class Ratio(NamedTuple):
    """The largest error over its bound, and that error; above 1 is a failure, NaN counts as one."""

    of_bound: float
    error: float


def compare(out: np.ndarray, want: np.ndarray, bounds: np.ndarray) -> Ratio:
    """Compare outputs row by row.

    Args:
        out: `[row, ...]`.
        want: float64, the same shape.
        bounds: `[row]`, or one bound for each element; 0 asks for equality.
    """
    error = np.abs(out.astype(np.float64) - want)
    error = np.where(np.isnan(error), np.inf, error)
    bounds = bounds.reshape(bounds.shape + (1,) * (error.ndim - bounds.ndim))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error > 0, error / bounds, 0.0)
    return Ratio(float(ratio.max(initial=0.0)), float(error.max(initial=0.0)))


def write_bounds(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """How far a stored value and its scale may be from x.

    Args:
        x: float `[..., dim]`, finite.
        dtype: storage dtype.

    Returns:
        bound of each value, `[..., dim]`: half the spacing of the storage dtype there. The scale
        expected, `[...]`: absmax over the largest code, 1 for a zero vector or no scales.
    """
    x = np.abs(x.astype(np.float64))
    slack = 1 + 1e-5  # codes are x / scale in float32, which may cross a rounding boundary
    if dtype not in _MAX_CODE:
        eps = _EPS[dtype]
        return slack * np.maximum(x, 2.0**-14) * eps / 2, np.ones(x.shape[:-1])
    absmax = x.max(axis=-1)
    scale = np.where(absmax > 0, absmax / _MAX_CODE[dtype], 1.0)
    if dtype in ("int8", "int4"):
        return np.broadcast_to(slack * scale[..., None] / 2, x.shape), scale
    info = ml_dtypes.finfo(_FLOAT8[dtype])
    smallest = float(info.smallest_normal)
    codes = np.maximum(x / scale[..., None], smallest)  # subnormals are spaced evenly
    return slack * codes * float(info.eps) / 2 * scale[..., None], scale
