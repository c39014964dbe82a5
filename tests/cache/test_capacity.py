"""What a pool holds: tokens, and the longest request."""

import pytest

from paxkv.cache.groups import (
    LayerGroup,
    Span,
    capacity_tokens,
    check_capacity,
    longest_that_fits,
    most_blocks_of,
)
from paxkv.cache.layout import KVLayout
from paxkv.errors import ConfigError

FULL = (LayerGroup((0, 1)),)
MIXED = (LayerGroup((0,)), LayerGroup((1,), Span(32)))


def layout(block_size=16):
    return KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=4, block_size=block_size, kv_dtype="float32"
    )


def test_a_pool_smaller_than_the_model_length_is_refused_with_the_numbers():
    check_capacity(256, FULL, layout(), chunk_tokens=512, max_model_len=4096)
    with pytest.raises(ConfigError) as error:
        check_capacity(229, FULL, layout(), chunk_tokens=512, max_model_len=4096)
    for part in ("3664", "229", "4096", "engine.max_model_len=3664", "cache.num_blocks=256"):
        assert part in str(error.value)


def test_an_empty_pool_suggests_no_length_of_zero():
    with pytest.raises(ConfigError, match=r"Try cache\.num_blocks=1"):
        check_capacity(0, FULL, layout(4), chunk_tokens=4, max_model_len=4)


def test_every_group_takes_blocks_of_its_own():
    assert capacity_tokens(9, FULL, layout()) == 144
    assert capacity_tokens(9, MIXED, layout()) == 64


@pytest.mark.parametrize("groups", [FULL, MIXED, MIXED[1:]])
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 6, 20])
def test_the_longest_request_fits_and_a_longer_one_does_not(groups, num_blocks):
    longest = longest_that_fits(num_blocks, groups, 16, 8, at_most=1000)
    assert most_blocks_of(groups, longest, 16, 8) <= num_blocks
    assert longest == 1000 or most_blocks_of(groups, longest + 1, 16, 8) > num_blocks
