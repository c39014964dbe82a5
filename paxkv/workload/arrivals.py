"""When requests come in: arrival processes, in seconds after the start of the run."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paxkv.errors import ConfigError
from paxkv.workload.checks import join, number_problem


class Arrivals(Protocol):
    """An arrival process."""

    def times_s(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` arrival times, float64, not decreasing, from 0 on."""
        ...


@dataclass(frozen=True)
class AllAtOnce:
    """Every request is there at the start: a batch job, or a test of throughput."""

    def times_s(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return zeros."""
        return np.zeros(count)


@dataclass(frozen=True)
class Constant:
    """One request every 1 / rate seconds, the first at 0."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def times_s(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return 0, 1/rate, 2/rate, .."""
        return np.arange(count) / self.rate_per_s


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean 1 / rate, the first at 0."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def times_s(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return sums of exponential gaps."""
        return _from_gaps(rng.exponential(1.0 / self.rate_per_s, count))


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed gaps: burstier than Poisson for `burstiness` < 1, more regular above.

    Source: the `burstiness` of `vllm bench serve`, the shape of the gamma distribution; 1 is
    Poisson, and the squared coefficient of variation of the gaps is 1 / burstiness.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        problems = join(
            [
                number_problem("workload.arrivals.rate_per_s", self.rate_per_s, open_low=True),
                number_problem("workload.arrivals.burstiness", self.burstiness, open_low=True),
            ]
        )
        if problems:
            raise ConfigError(problems)

    def times_s(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return sums of gamma gaps of mean 1 / rate."""
        scale = 1.0 / (self.rate_per_s * self.burstiness)
        return _from_gaps(rng.gamma(self.burstiness, scale, count))


def _check_rate(rate_per_s: float) -> None:
    problems = number_problem("workload.arrivals.rate_per_s", rate_per_s, open_low=True)
    if problems:
        raise ConfigError(problems)


def _from_gaps(gaps_s: np.ndarray) -> np.ndarray:
    """Return arrival times from gaps; the first gap is not waited for, since nothing would run."""
    return np.cumsum(gaps_s) - (gaps_s[0] if len(gaps_s) else 0.0)
