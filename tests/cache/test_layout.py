"""Planned bytes are allocated bytes, and blocks are counted in one way."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KV_DTYPES
from paxkv.cache.layout import (
    KVLayout,
    blocks_in_budget,
    blocks_needed,
    gib,
    pool_bytes,
)
from paxkv.cache.mixed import init_cache
from paxkv.errors import ConfigError


def layout(**changes):
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}
    return KVLayout(**({**sizes, "block_size": 4, "kv_dtype": "float32"} | changes))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scaled": False},
        {"plain_places": (0, 2), "plain_dtype": "float32"},
        {"plain_places": (1,), "plain_dtype": "bfloat16", "scaled": False},
    ],
)
@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_planned_bytes_are_allocated_bytes(kv_dtype, changes, num_blocks):
    """kvcached#424: scales lie in the block, and are counted."""
    plan = layout(kv_dtype=kv_dtype, **changes)
    pages = init_cache(num_blocks, plan)
    assert all(leaf.shape[0] == num_blocks for leaf in jax.tree.leaves(pages))
    assert pool_bytes(num_blocks, plan) == sum(leaf.nbytes for leaf in jax.tree.leaves(pages))


@pytest.mark.parametrize(
    ("kv_dtype", "expected"),
    # Llama-3 8B, 32 layers of 8 heads of 128: 128 KiB a token in 16 bits, as published.
    [
        ("bfloat16", 131072),
        ("float32", 262144),
        ("int8", 65536 + 2048),
        ("float8_e5m2", 67584),
        ("int4", 34816),
    ],
)
def test_bytes_per_token(kv_dtype, expected):
    plan = layout(num_layers=32, num_kv_heads=8, head_dim=128, kv_dtype=kv_dtype)
    assert plan.bytes_per_token == expected
    assert plan.bytes_per_block == 4 * expected


@given(st.integers(0, 10**6), st.integers(1, 300))
def test_blocks_needed(num_tokens, block_size):
    blocks = blocks_needed(num_tokens, block_size)
    assert blocks == math.ceil(num_tokens / block_size)
    array = np.array([num_tokens, 0])
    assert blocks_needed(array, block_size).tolist() == [blocks, 0]


@given(st.integers(-5, 10**7))
def test_blocks_in_budget_fit_and_one_more_does_not(budget_bytes):
    plan = layout(kv_dtype="int8")
    blocks = blocks_in_budget(budget_bytes, plan)
    assert pool_bytes(blocks, plan) <= max(budget_bytes, 0) < pool_bytes(blocks + 1, plan)


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 0), ("num_layers", -1), ("head_dim", 0)]
)
def test_sizes_are_checked(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        layout(**{field: value})


def test_unknown_dtypes_are_refused():
    with pytest.raises(ConfigError, match="kv_dtype='int3'"):
        layout(kv_dtype="int3")


def test_an_odd_head_has_no_four_bit_layout():
    with pytest.raises(ConfigError, match=r"head_dim=7 is odd. Try kv=int8"):
        layout(kv_dtype="int4", head_dim=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"plain_places": (0,)},
        {"plain_dtype": "float32"},
        {"plain_places": (0, 1, 2), "plain_dtype": "float32"},
        {"plain_places": (2, 0), "plain_dtype": "float32"},
        {"plain_places": (3,), "plain_dtype": "float32"},
    ],
)
def test_plain_places_are_some_of_the_places(changes):
    with pytest.raises(ConfigError, match="plain_places"):
        layout(kv_dtype="int8", **changes)


def test_gib():
    assert gib(3 * 2**29) == "1.50 GiB"
