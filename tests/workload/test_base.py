from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload.base import request_seeds, streams


@given(st.integers(0, 2**40), st.integers(0, 300))
def test_seeds_are_distinct_and_stable(seed, count):
    # areal-project/AReaL#1524: requests without a seed must not share one.
    seeds = request_seeds(seed, count)
    assert len(set(seeds)) == count
    assert all(0 <= s < 2**31 for s in seeds)
    assert request_seeds(seed, count + 5)[:count] == seeds


def test_seeds_follow_the_run_seed():
    assert request_seeds(0, 4) == request_seeds(0, 4)
    assert not set(request_seeds(0, 4)) & set(request_seeds(1, 4))


def test_streams_are_independent():
    one, two = streams(3, 2)
    drawn = one.random(1000)
    assert streams(3, 2)[1].random() == two.random()
    assert drawn[0] == streams(3, 5)[0].random()
