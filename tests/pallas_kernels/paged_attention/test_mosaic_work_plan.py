"""The decode kernel's work plan: every live tile once, evenly, each part where it is sought."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.mosaic.work_plan import TILE, Segment, WorkSharing, live_span

MAX_TILES = 20


@functools.cache
def jitted(sharing):
    """The plan, all segments of all CTAs `[cta, item]`, and all parts, as the kernels see them."""

    def run(tiles):
        plan = sharing.plan(tiles)
        ctas = jnp.arange(sharing.num_ctas, dtype=jnp.int32)
        items = jnp.arange(sharing.num_items, dtype=jnp.int32)
        outputs = jnp.arange(sharing.rows * sharing.kv_heads, dtype=jnp.int32)
        bounds = jax.vmap(lambda cta: sharing.items(plan, cta))(ctas)
        segment = functools.partial(sharing.segment, plan)
        segments = jax.vmap(lambda cta: jax.vmap(lambda item: segment(cta, item))(items))(ctas)
        return bounds, segments, jax.vmap(lambda i: sharing.parts(plan, i)[:2])(outputs)

    return jax.jit(run)


def walk(sharing, tiles):
    """Segments with tiles, as (CTA, segment), and the parts of each output."""
    (first, end), segments, parts = jax.tree.map(
        np.asarray, jitted(sharing)(jnp.asarray(tiles, jnp.int32))
    )
    found = [
        (cta, Segment(*(int(field[cta, item]) for field in segments)))
        for cta in range(sharing.num_ctas)
        for item in range(first[cta], end[cta])
    ]
    return [(cta, s) for cta, s in found if s.tiles], np.stack(parts, axis=1)


SHARINGS = [
    WorkSharing(1, 1, 4),
    WorkSharing(5, 2, 7),
    WorkSharing(3, 3, 2),
    WorkSharing(4, 2, 5, split_tiles=3, max_tiles=MAX_TILES),
    WorkSharing(2, 1, 3, split_tiles=1, max_tiles=MAX_TILES),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHARINGS), st.data())
def test_every_live_tile_is_read_once_and_its_part_is_found(sharing, data):
    rows, kv_heads = sharing.rows, sharing.kv_heads
    tiles = data.draw(st.lists(st.integers(0, MAX_TILES), min_size=rows, max_size=rows))
    segments, parts = walk(sharing, tiles)
    reads = np.zeros((rows, kv_heads, MAX_TILES), int)
    loads = np.zeros(sharing.num_ctas, int)
    slots = {}
    for cta, s in segments:
        reads[s.row, s.head, s.first_tile : s.first_tile + s.tiles] += 1
        loads[cta] += s.tiles
        slots.setdefault((s.row, s.head), []).append(s.slot)
    used = [s.slot for _, s in segments]
    assert len(set(used)) == len(used)
    assert all(slot < sharing.num_slots for slot in used)
    stride = 1 if sharing.split_tiles is None else kv_heads
    for row, count in enumerate(tiles):
        assert (reads[row, :, :count] == 1).all()
        assert (reads[row, :, count:] == 0).all()
        for head in range(kv_heads):
            first, number = parts[row * kv_heads + head]
            expected = [first + stride * i for i in range(number)]
            assert sorted(slots.get((row, head), [])) == expected
    share = -(-sum(tiles) * kv_heads // sharing.num_ctas)
    assert loads.max() <= share + (0 if sharing.split_tiles is None else sharing.split_tiles - 1)


def test_a_fixed_split_does_not_depend_on_other_rows():
    def cuts(tiles):
        segments, _ = walk(SHARINGS[3], tiles)
        return sorted((s.head, s.first_tile, s.tiles) for _, s in segments if s.row == 1)

    assert cuts([0, 8, 0, 0]) == cuts([20, 8, 13, 1])
    assert cuts([0, 8, 0, 0]) == [(h, f, n) for h in (0, 1) for f, n in ((0, 3), (3, 3), (6, 2))]


def test_rows_without_tokens_at_the_end_cost_no_cta_time():
    (first, end), _, _ = jitted(WorkSharing(64, 2, 7))(jnp.asarray([9] + [0] * 63, jnp.int32))
    assert int((end - first).max()) <= 2


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
