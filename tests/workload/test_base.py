from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload.base import request_seeds, streams, with_samples
from paxkv.workload.request import Request


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


def test_samples_of_a_prompt_have_streams_of_their_own():
    # areal-project/AReaL#1524: samples without a seed must differ, and come again.
    requests = [
        Request(request_id="a", prompt_token_ids=(1, 2), max_tokens=3, temperature=1.0, seed=seed)
        for seed in request_seeds(0, 1)
    ]
    made = with_samples(requests, 4)
    assert [request.request_id for request in made] == ["a", "a/1", "a/2", "a/3"]
    assert [request.fork_of for request in made] == [None, "a", "a", "a"]
    assert len({request.seed for request in made}) == 4
    assert made[0] == requests[0]
    assert made == with_samples(requests, 4)
    assert with_samples(requests, 1) == requests
