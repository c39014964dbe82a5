"""The decode kernel's memory warpgroup: brings queries and pages into shared memory by TMA."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic.decode_layout import DecodeStatic
from pallas_kernels.paged_attention.mosaic.work_plan import TILE


def fetch_segments(
    static: DecodeStatic, each_segment, context_lens, page_ids, queries, leaves, scratch
) -> None:
    """Fetch the queries of each segment, and its tiles as the ring of stages has room."""
    block_size, stages = static.block_size, static.tiling.stages
    width = page_ids.shape[1]

    size = min(block_size, TILE)

    def find_pages(row, context_len, tile):
        """Page ids of a tile, and where in a page larger than a tile it begins."""
        span = static.span(context_len)
        start = span.position(tile)
        first, last = lax.div(start, jnp.int32(block_size)), span.last_page(tile)
        ids = []
        for nth in range(static.pages_of_tile):
            page = jnp.minimum(jnp.minimum(span.live_page(first + nth), last), width - 1)
            ids.append(page_ids[row, page])
        return ids, lax.rem(start, jnp.int32(block_size))

    def fetch(head, ids, offset, stage) -> None:
        targets = (scratch.k, scratch.v, scratch.k_scale, scratch.v_scale)
        inside = pl.ds(offset, TILE) if block_size > TILE else slice(None)
        for nth, page in enumerate(ids):
            for leaf, target in zip(leaves, targets, strict=False):
                part = target.at[stage, pl.ds(nth * size, size)]
                mosaic.fetch_page(leaf.at[page, head, inside], part, scratch.ready.at[stage])

    def work(segment, state):
        filled, begun = state
        context_len = context_lens[segment.row]
        slot = lax.rem(begun, 2)

        @pl.when(begun >= 2)
        def _():
            plgpu.barrier_wait(scratch.q_free.at[slot])

        plgpu.copy_gmem_to_smem(
            queries.at[segment.row, segment.head], scratch.q.at[slot], scratch.q_ready.at[slot]
        )

        def one(nth, filled):
            stage = lax.rem(filled, stages)
            # Ids first: all are under way before the first copy needs one.
            ids, offset = find_pages(segment.row, context_len, segment.first_tile + nth)

            @pl.when(filled >= stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[stage])

            fetch(segment.head, ids, offset, stage)
            return filled + 1

        return lax.fori_loop(0, segment.tiles, one, filled), begun + 1

    filled, begun = each_segment(work, (jnp.int32(0), jnp.int32(0)))
    # Every barrier must have been observed to its last phase when the kernel ends.
    for count, barriers, size in ((filled, scratch.free, stages), (begun, scratch.q_free, 2)):
        for i in range(size):
            pl.when(count > i)(functools.partial(plgpu.barrier_wait, barriers.at[i]))
