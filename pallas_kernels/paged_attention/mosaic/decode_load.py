"""The decode kernel's memory warpgroup: brings queries and pages into shared memory by TMA."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic.decode_layout import DecodeStatics
from pallas_kernels.paged_attention.mosaic.work_plan import TILE


def fetch_segments(
    static: DecodeStatics, each_segment, context_lens, page_ids, queries, leaves, scratch
) -> None:
    """Fetch the queries of each segment, and its tiles as the ring of stages has room."""
    block_size, stages = static.block_size, static.tiling.stages
    width = page_ids.shape[1]

    def fetch(row, head, context_len, tile, stage) -> None:
        span = static.span(context_len)
        start = span.position(tile)
        last_page = lax.div(
            span.end(tile, context_len, static.num_sink_tokens) - 1, jnp.int32(block_size)
        )
        for nth in range(max(1, TILE // block_size)):
            wanted = lax.div(start, jnp.int32(block_size)) + nth
            # Past the end the last live page comes again: what it fills is masked.
            page = page_ids[row, jnp.minimum(jnp.minimum(wanted, last_page), width - 1)]
            size = min(block_size, TILE)
            inside = pl.ds(lax.rem(start, block_size), TILE) if block_size > TILE else slice(None)
            at = pl.ds(nth * size, size)
            for leaf, into in zip(
                leaves, (scratch.k, scratch.v, scratch.k_scale, scratch.v_scale), strict=False
            ):
                plgpu.copy_gmem_to_smem(
                    leaf.at[page, head, inside], into.at[stage, at], scratch.ready.at[stage]
                )

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

            @pl.when(filled >= stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[stage])

            fetch(segment.row, segment.head, context_len, segment.first_tile + nth, stage)
            return filled + 1

        return lax.fori_loop(0, segment.tiles, one, filled), begun + 1

    filled, begun = each_segment(work, (jnp.int32(0), jnp.int32(0)))
    # Every barrier must have been observed to its last phase when the kernel ends.
    for count, barriers, size in ((filled, scratch.free, stages), (begun, scratch.q_free, 2)):
        for i in range(size):
            pl.when(count > i)(functools.partial(plgpu.barrier_wait, barriers.at[i]))
