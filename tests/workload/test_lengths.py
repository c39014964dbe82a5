import numpy as np
import pytest

from paxkv.errors import ConfigError
from paxkv.workload.lengths import Fixed, LogNormal, Uniform


def sample(lengths, count=20_000):
    drawn = lengths.sample(count, np.random.default_rng(0))
    assert drawn.dtype == np.int64
    return drawn


def test_fixed():
    assert set(sample(Fixed(7))) == {7}


def test_uniform_reaches_both_ends():
    assert set(sample(Uniform(3, 6))) == {3, 4, 5, 6}


def test_lognormal_is_clipped_and_has_its_median():
    drawn = sample(LogNormal(64.0, 0.8, 8, 512))
    assert drawn.min() >= 8
    assert drawn.max() <= 512
    assert np.median(drawn) == pytest.approx(64, rel=0.05)
    wild = sample(LogNormal(64.0, 50.0, 8, 512), 100)  # draws beyond any integer
    assert (wild.min(), wild.max()) == (8, 512)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Fixed(1.5),
        lambda: Fixed(True),
        lambda: Uniform(5, 4),
        lambda: Uniform(0, 4),
        lambda: LogNormal(float("nan"), 1.0, 1, 2),
        lambda: LogNormal(10.0, -1.0, 1, 2),
        lambda: LogNormal(10.0, 1.0, 3, 2),
    ],
)
def test_bad_parameters_are_refused(make):
    with pytest.raises(ConfigError, match="length distribution"):
        make()
