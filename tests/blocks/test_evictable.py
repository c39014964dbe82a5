"""Which cached block goes first."""

import pickle

import pytest

from paxkv.blocks.evictable import CachedBlock, EvictableBlocks
from paxkv.blocks.prefix import PrefixIndex
from paxkv.errors import InvariantError


@pytest.fixture
def index():
    index, parent = PrefixIndex(1), None
    for token, block_id in enumerate([4, 7, 5]):
        parent = index.register(parent, [token], [block_id])
    return index


def test_the_longest_unused_go_first():
    blocks = EvictableBlocks()
    blocks.add([3, 1], now=1.0)
    blocks.add([2], now=2.0)
    blocks.remove([3])
    blocks.add([3], now=3.0)
    assert list(blocks)[:2] == [1, 2]
    assert list(blocks) == [1, 2, 3]
    assert len(blocks) == 3
    assert 3 in blocks and 4 not in blocks


def test_a_prompts_end_goes_before_its_start(index):
    blocks, table = EvictableBlocks(), [4, 7, 5]
    blocks.add(reversed(table), now=1.0)
    for left in ([4, 7], [4], []):
        oldest = next(iter(blocks))
        index.drop(oldest)
        blocks.remove([oldest])
        assert index.match([0, 1, 2]).tolist() == [left]


def test_the_view_says_what_a_policy_needs(index):
    blocks = EvictableBlocks()
    blocks.add([5, 7], now=1.5)
    index.count_use([7])
    assert list(blocks.view(index)) == [CachedBlock(5, 1.5, 0, 2), CachedBlock(7, 1.5, 1, 1)]
    index.drop(7)
    with pytest.raises(InvariantError, match="block 7: evictable, but not in"):
        list(blocks.view(index))


def test_adding_twice_and_removing_what_is_not_there_are_refused():
    blocks = EvictableBlocks()
    blocks.add([1], now=0.0)
    with pytest.raises(InvariantError, match="block 1: became evictable twice"):
        blocks.add([1], now=1.0)
    with pytest.raises(InvariantError, match="block 2: not evictable"):
        blocks.remove([2])


def test_pickles():
    blocks = EvictableBlocks()
    blocks.add([2, 1], now=0.0)
    assert list(pickle.loads(pickle.dumps(blocks)))[:2] == [2, 1]
