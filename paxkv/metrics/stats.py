"""Small statistics that say null, never NaN, where there is nothing to say."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Stats(NamedTuple):
    """Mean, median, population standard deviation and 99th percentile; all None without values."""

    mean: float | None
    median: float | None
    std: float | None
    p99: float | None


def describe(values: Sequence[float]) -> Stats:
    """Summarise values; percentiles interpolate linearly, as `vllm bench serve` does."""
    if len(values) == 0:
        return Stats(None, None, None, None)
    array = np.asarray(values, np.float64)
    return Stats(
        mean=float(array.mean()),
        median=float(np.median(array)),
        std=float(array.std()),
        p99=float(np.percentile(array, 99)),
    )


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the mean of `values` under `weights`; the plain mean where all weights are 0."""
    if len(values) == 0:
        return None
    total = math.fsum(weights)
    if total <= 0:
        return math.fsum(values) / len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total


def ratio(numerator: float, denominator: float) -> float | None:
    """Return the quotient, or None where the denominator is not positive or hardly so."""
    if denominator <= 0:
        return None
    quotient = numerator / denominator
    return quotient if math.isfinite(quotient) else None
