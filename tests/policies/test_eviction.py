import pytest

from paxkv.blocks.evictable import CachedBlock
from paxkv.policies.eviction import Lfu, Lru, Priority

# (block, uses, priority), the longest unused first; of one request the last block comes first.
CACHED = [(9, 0, 1), (4, 3, 0), (7, 0, 2), (2, 1, 2), (5, 0, 0), (1, 1, 1)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Lru(), [9, 4, 7, 2, 5, 1]),
        (Lfu(), [9, 7, 5, 2, 1, 4]),
        (Priority(), [7, 2, 9, 1, 4, 5]),
    ],
)
@pytest.mark.parametrize("need_blocks", [1, 2, 3, 6])
def test_what_goes_first(policy, order, need_blocks):
    cached = (
        CachedBlock(block_id, last_used_s=float(place), num_uses=uses, depth=0, priority=priority)
        for place, (block_id, uses, priority) in enumerate(CACHED)
    )
    assert list(policy.choose(cached, need_blocks)) == order[:need_blocks]


def test_lru_looks_at_no_more_than_it_drops():
    cached = iter([CachedBlock(block_id, 0.0, 0, 0) for block_id in range(5)])
    Lru().choose(cached, 2)
    assert next(cached).block_id == 2


@pytest.mark.parametrize("policy", [Lru(), Lfu(), Priority()])
def test_the_end_of_a_prompt_goes_before_its_start(policy):
    deepest_first = [CachedBlock(10 + depth, 1.0, 0, depth) for depth in (2, 1, 0)]
    assert list(policy.choose(iter(deepest_first), 2)) == [12, 11]
