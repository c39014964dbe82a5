"""The decode kernel's work plan: every live tile once, evenly, each part where it is sought."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.work_plan import TILE, live_span, plan_decode

MAX_TILES = 20


@functools.cache
def planner(rows, kv_heads, num_ctas, split_tiles):
    return jax.jit(
        functools.partial(
            plan_decode,
            kv_heads=kv_heads,
            num_ctas=num_ctas,
            split_tiles=split_tiles,
            max_tiles=MAX_TILES,
        )
    )


SHAPES = [(1, 1, 4, None), (5, 2, 7, None), (3, 3, 2, None), (4, 2, 5, 3), (2, 1, 3, 1)]


def walk(plan, num_ctas):
    """Segments with tiles, as (CTA, segment, row, head, first, count)."""
    segments, bounds, _ = (np.asarray(x) for x in plan)
    return [
        (cta, s, *segments[s])
        for cta in range(num_ctas)
        for s in range(bounds[cta], bounds[cta + 1])
        if segments[s, 3]
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.data())
def test_every_live_tile_is_read_once_and_its_part_is_found(shape, data):
    rows, kv_heads, num_ctas, split_tiles = shape
    tiles = data.draw(st.lists(st.integers(0, MAX_TILES), min_size=rows, max_size=rows))
    plan = planner(*shape)(jnp.asarray(tiles, jnp.int32))
    parts = np.asarray(plan.parts)
    reads = np.zeros((rows, kv_heads, MAX_TILES), int)
    loads = np.zeros(num_ctas, int)
    found = {}
    for cta, segment, row, head, first, count in walk(plan, num_ctas):
        reads[row, head, first : first + count] += 1
        loads[cta] += count
        found.setdefault((row, head), []).append(segment)
    for row, count in enumerate(tiles):
        assert (reads[row, :, :count] == 1).all()
        assert (reads[row, :, count:] == 0).all()
        for head in range(kv_heads):
            begin, end = parts[row * kv_heads + head]
            assert found.get((row, head), []) == list(range(begin, end))
    if split_tiles is None:
        assert loads.max() <= -(-sum(tiles) * kv_heads // num_ctas)


def test_a_fixed_split_does_not_depend_on_other_rows():
    def cuts(tiles):
        plan = planner(4, 2, 5, 3)(jnp.asarray(tiles, jnp.int32))
        return sorted((h, f, n) for _, _, row, h, f, n in walk(plan, 5) if row == 1)

    assert cuts([0, 8, 0, 0]) == cuts([20, 8, 13, 1])
    assert cuts([0, 8, 0, 0]) == [(h, f, n) for h in (0, 1) for f, n in ((0, 3), (3, 3), (6, 2))]


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (40, 0), (100, 4), (100, 70), (1000, 4)])
def test_tiles_cover_what_is_seen_and_little_else(block_size, window, sinks):
    for length in (0, 1, 63, 64, 65, 150, 500, 1100):
        span = live_span(
            jnp.int32(length), block_size=block_size, window=window, num_sink_tokens=sinks
        )
        starts = [int(span.position(jnp.int32(tile))) for tile in range(int(span.tiles))]
        position = np.arange(length)
        seen = position >= (0 if window is None else length - window)
        seen |= position < sinks
        covered = np.zeros(length + TILE, int)
        for start in starts:
            assert start % min(block_size, TILE) == 0
            assert seen[start : start + TILE].any()  # no tile is read for nothing
            covered[start : start + TILE] += 1
        assert covered.max(initial=0) <= 1
        assert (covered[:length][seen] == 1).all()
