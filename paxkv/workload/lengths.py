"""How long prompts and outputs are: distributions over token counts."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paxkv.errors import ConfigError
from paxkv.workload.checks import count_problem, join, number_problem


class Lengths(Protocol):
    """A distribution of lengths in tokens, each at least 1."""

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` lengths, int64."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        _refuse(count_problem("tokens", self.tokens))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return the length, repeated."""
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from `low` to `high`, both included, alike likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _refuse(_range_problems(self.low, self.high))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw lengths."""
        return rng.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    """exp(N(log median, sigma)), rounded, clipped to `low` .. `high`; chat traces look like it."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _refuse(
            [
                *number_problem("median", self.median, open_low=True),
                *number_problem("sigma", self.sigma),
                *_range_problems(self.low, self.high),
            ]
        )

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw lengths."""
        drawn = rng.lognormal(np.log(self.median), self.sigma, count)
        # Clipped before the cast: a huge draw must not overflow the integer.
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)


def _range_problems(low: int, high: int) -> list[str]:
    problems = join([count_problem("low", low), count_problem("high", high)])
    if not problems and low > high:
        problems.append(f"low={low}, high={high}: low must not be above high.")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError([f"a length distribution of the workload: {p}" for p in problems])
