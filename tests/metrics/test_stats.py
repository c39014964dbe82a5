import numpy as np
import pytest

from paxkv.metrics.stats import describe, ratio, weighted_mean


def test_describe_by_hand():
    found = describe([4.0, 1.0, 3.0, 2.0])
    assert found.mean == 2.5
    assert found.median == 2.5
    assert found.std == pytest.approx(np.sqrt(1.25))
    assert found.p99 == pytest.approx(3 + 0.97)  # position 0.99 * 3 between 3 and 4


def test_nothing_is_none():
    assert set(describe([])) == {None}
    assert weighted_mean([], []) is None
    assert ratio(1.0, 0.0) is None
    assert ratio(1.0, 5e-324) is None
    assert ratio(1.0, 2.0) == 0.5


def test_weighted_mean():
    assert weighted_mean([1.0, 5.0], [3.0, 1.0]) == 2.0
    assert weighted_mean([1.0, 5.0], [0.0, 0.0]) == 3.0
