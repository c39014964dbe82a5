import numpy as np
import pytest

from paxkv.errors import ConfigError
from paxkv.workload.arrivals import AllAtOnce, Constant, Gamma, Poisson

ALL = [AllAtOnce(), Constant(2.0), Poisson(2.0), Gamma(2.0, 0.5)]


@pytest.mark.parametrize("arrivals", ALL)
@pytest.mark.parametrize("count", [0, 1, 50])
def test_times_start_at_zero_and_never_decrease(arrivals, count):
    times_s = arrivals.times_s(count, np.random.default_rng(0))
    assert times_s.shape == (count,)
    if count:
        assert times_s[0] == 0
        assert (np.diff(times_s) >= 0).all()
    assert np.array_equal(times_s, arrivals.times_s(count, np.random.default_rng(0)))


def test_constant():
    assert Constant(4.0).times_s(3, np.random.default_rng(0)).tolist() == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("arrivals", "variation"), [(Poisson(5.0), 1.0), (Gamma(5.0, 0.25), 2.0), (Gamma(5.0, 4), 0.5)]
)
def test_rate_and_burstiness(arrivals, variation):
    gaps_s = np.diff(arrivals.times_s(40_000, np.random.default_rng(1)))
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), "1"])
@pytest.mark.parametrize("kind", [Constant, Poisson, Gamma])
def test_bad_rates_are_refused(kind, rate):
    with pytest.raises(ConfigError, match=r"workload\.arrivals\.rate_per_s="):
        kind(rate)


def test_both_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        Gamma(-1.0, float("nan"))
    assert len(caught.value.problems) == 2
