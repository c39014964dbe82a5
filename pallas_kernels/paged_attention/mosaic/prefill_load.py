"""The memory warpgroup of the Mosaic prefill kernel, and the memory it shares with the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic.prefill_plan import (
    ROWS,
    PrefillStatic,
    Span,
    is_kept,
    may_hold_anything,
    page_columns,
)
from pallas_kernels.pages import KV_DTYPES

_WGMMA = plgpu.Layout.WGMMA


class Arrays(NamedTuple):
    """Arguments and result of the kernel, in the GPU's main memory."""

    q: Any  # [row, chunk, head, dim]
    page_ids: Any  # i32 [row, max_blocks], along the first axis of k
    context_lens: Any  # i32 [row]
    query_lens: Any  # i32 [row]
    k: Any  # [block * layer, kv_head, block_size, dim]
    v: Any
    out: Any  # as q
    k_scale: Any = None  # f32 [block * layer, kv_head, block_size]
    v_scale: Any = None


class Scratch(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any  # [warpgroup, ROWS, dim]; takes the output in the end
    k: Any  # [stage, keys, dim]
    v: Any
    q_ready: Any  # barriers [warpgroup]
    k_ready: Any  # barriers [stage]
    v_ready: Any  # [stage + 1]: the last is for values that must be cleaned first
    k_free: Any  # [stage]
    v_free: Any
    key_numbers: Any  # i32 [warpgroup, keys], 0, 1, ...: kept here to save registers
    weights: Any = None  # [warpgroup, ROWS, pass_keys], where the interpreter wants them
    k_codes: Any = None  # [code_stage, keys, dim], 8-bit pools, as all below
    v_codes: Any = None
    k_scale: Any = None  # f32 [code_stage, keys]
    v_scale: Any = None
    k_codes_ready: Any = None  # barriers [code_stage]
    v_codes_ready: Any = None
    score_factor: Any = None  # f32 [stage, keys], of q·k: K scale, softmax scale and log2(e)
    log_v_scale: Any = None  # f32 [stage, keys], log2
    inverse_v_scale: Any = None  # f32 [stage, keys]


def scratch_types(static: PrefillStatic) -> dict[str, Any]:
    """Allocations of `Scratch`, by name."""
    layout, dim = static.layout, static.head_dim
    arrivals = 1 if static.quantised else static.copies
    free = plgpu.Barrier(num_arrivals=layout.warpgroups, num_barriers=layout.stages)
    types = {
        "q": mosaic.swizzled(layout.warpgroups, ROWS, dim, dtype=static.dtype),
        "k": mosaic.swizzled(layout.stages, layout.keys, dim, dtype=static.dtype),
        "v": mosaic.swizzled(
            layout.stages, layout.keys, dim, dtype=static.dtype, swizzle=static.value_swizzle
        ),
        "q_ready": plgpu.Barrier(num_arrivals=static.query.heads, num_barriers=layout.warpgroups),
        "k_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=layout.stages),
        "v_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=layout.stages + 1),
        "k_free": free,
        "v_free": free,
        "key_numbers": plgpu.SMEM((layout.warpgroups, layout.keys), jnp.int32),
    }
    if static.stage_in_smem:
        types["weights"] = mosaic.swizzled(
            layout.warpgroups,
            ROWS,
            layout.pass_keys,
            dtype=static.dtype,
            swizzle=static.value_swizzle,
        )
    if static.quantised:
        leaf_dtype = KV_DTYPES[static.pool_dtype].leaf_dtype
        for name in ("k", "v"):
            types[f"{name}_codes"] = mosaic.swizzled(
                layout.code_stages, layout.keys, dim, dtype=leaf_dtype
            )
            types[f"{name}_scale"] = plgpu.SMEM((layout.code_stages, layout.keys), jnp.float32)
            types[f"{name}_codes_ready"] = plgpu.Barrier(
                num_arrivals=2 * static.copies, num_barriers=layout.code_stages
            )
        for name in ("score_factor", "log_v_scale", "inverse_v_scale"):
            types[name] = plgpu.SMEM((layout.stages, layout.keys), jnp.float32)
    return types


class Loader(NamedTuple):
    """One CTA's memory warpgroup: brings the tiles of its span in, as stages become free."""

    static: PrefillStatic
    arrays: Arrays
    scratch: Scratch
    span: Span
    row: jax.Array
    kv_head: jax.Array

    def run(self) -> None:
        """Load every tile and see all of them used."""
        if self.static.quantised:
            self._load_codes_and_widen()
        else:
            self._load()
        self._clean_last_values()
        # Every barrier must have been observed to its last phase when the kernel ends.
        for stage in range(self.static.layout.stages):
            for free in (self.scratch.k_free, self.scratch.v_free):

                @pl.when(stage < self.span.num_tiles)
                def _(free: Any = free, stage: int = stage) -> None:
                    plgpu.barrier_wait(free.at[stage])

    def _load(self) -> None:
        """16-bit pools: tiles go straight to where they are multiplied."""
        static, arrays, scratch, span = self.static, self.arrays, self.scratch, self.span
        stages = static.layout.stages

        @pl.loop(0, span.num_tiles)
        def _(step: jax.Array) -> None:
            stage = lax.rem(step, jnp.int32(stages))
            pages = self._pages(step)
            self._wait_until_free(scratch.k_free, step)
            self._copy(step, pages, arrays.k, scratch.k.at[stage], scratch.k_ready.at[stage])
            self._wait_until_free(scratch.v_free, step)
            dirty = may_hold_anything(static, span, span.tile(step))
            ready = scratch.v_ready.at[jnp.where(dirty, stages, stage)]
            self._copy(step, pages, arrays.v, scratch.v.at[stage], ready)

    def _clean_last_values(self) -> None:
        """Zero the values that hold no token, before anybody sees them.

        Only a row's last tile has any. Inside the loop over the tiles this would spill registers.
        """
        static, scratch, span = self.static, self.scratch, self.span
        last, stages = span.num_tiles - 1, static.layout.stages

        @pl.when((span.num_tiles > 0) & may_hold_anything(static, span, span.tile(last)))
        def _() -> None:
            if not static.quantised:
                plgpu.barrier_wait(scratch.v_ready.at[stages])
            self._zero_values(last)
            plgpu.commit_smem()
            ready = scratch.v_ready.at[lax.rem(last, jnp.int32(stages))]
            for _ in range(1 if static.quantised else static.copies):  # in place of the copies
                plgpu.barrier_arrive(ready)

    def _load_codes_and_widen(self) -> None:
        """8-bit pools: codes wait in buffers of their own until their stage is free."""
        static, arrays, scratch, span = self.static, self.arrays, self.scratch, self.span
        ahead = static.layout.code_stages
        k_parts = ((arrays.k, scratch.k_codes), (arrays.k_scale, scratch.k_scale))
        v_parts = ((arrays.v, scratch.v_codes), (arrays.v_scale, scratch.v_scale))

        # One pass of the loop widens a tile and fetches the one that takes its place.
        @pl.loop(0, jnp.where(span.num_tiles > 0, span.num_tiles + ahead, 0))
        def _(next_step: jax.Array) -> None:
            step, code_stage = next_step - ahead, lax.rem(next_step, jnp.int32(ahead))
            for widen, parts, ready in (
                (self._widen_keys, k_parts, scratch.k_codes_ready.at[code_stage]),
                (self._widen_values, v_parts, scratch.v_codes_ready.at[code_stage]),
            ):

                @pl.when(step >= 0)
                def _(widen: Callable[..., None] = widen, ready: Any = ready) -> None:
                    plgpu.barrier_wait(ready)
                    widen(step, code_stage)

                @pl.when(next_step < span.num_tiles)
                def _(parts: Any = parts, ready: Any = ready) -> None:
                    pages = self._pages(next_step)
                    for source, target in parts:
                        self._copy(next_step, pages, source, target.at[code_stage], ready)

    def _widen_keys(self, step: jax.Array, code_stage: jax.Array) -> None:
        static, scratch = self.static, self.scratch
        stage = self._wait_until_free(scratch.k_free, step)
        k_scale = plgpu.load(scratch.k_scale.at[code_stage], layout=_WGMMA.reduce(0))
        scratch.score_factor[stage] = k_scale * static.score_factor
        self._widen(scratch.k_codes.at[code_stage], scratch.k.at[stage])
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.k_ready.at[stage])

    def _widen_values(self, step: jax.Array, code_stage: jax.Array) -> None:
        static, scratch, span = self.static, self.scratch, self.span
        stage, tile = self._wait_until_free(scratch.v_free, step), span.tile(step)
        v_scale = plgpu.load(scratch.v_scale.at[code_stage], layout=_WGMMA.reduce(0))
        position = plgpu.broadcasted_iota(jnp.int32, v_scale.shape, 0, layout=_WGMMA.reduce(0))
        kept = is_kept(static, span, position + tile * static.layout.keys)
        v_scale = jnp.where(kept, v_scale, 1.0)  # what no token wrote may be NaN
        scratch.log_v_scale[stage] = jnp.log2(v_scale)
        scratch.inverse_v_scale[stage] = 1.0 / v_scale
        self._widen(scratch.v_codes.at[code_stage], scratch.v.at[stage])
        plgpu.commit_smem()

        @pl.when(jnp.logical_not(may_hold_anything(static, span, tile)))
        def _() -> None:
            plgpu.barrier_arrive(scratch.v_ready.at[stage])

    def _widen(self, codes: Any, target: Any) -> None:
        static = self.static
        for first in range(0, static.layout.keys, ROWS):
            rows = pl.ds(first, ROWS)
            part = plgpu.load(codes.at[rows], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            target[rows] = mosaic.widen(part, static.pool_dtype, static.dtype)

    def _pages(self, step: jax.Array) -> list[jax.Array]:
        """Page ids of a step's tile; all are read before the first copy waits for one."""
        columns = page_columns(self.static, self.span, step, self.arrays.page_ids.shape[1])
        return [self.arrays.page_ids[self.row, column] for column in columns]

    def _copy(
        self, step: jax.Array, pages: list[jax.Array], source: Any, target: Any, ready: Any
    ) -> None:
        """Start the copies that fill one tile of one leaf of the pool."""
        static, size = self.static, self.static.copy_tokens
        for nth, page in enumerate(pages):
            part = source.at[page, self.kv_head]
            if size < static.block_size:
                start = self.span.tile(step) * static.layout.keys
                part = part.at[pl.ds(lax.rem(start, jnp.int32(static.block_size)), size)]
            mosaic.fetch_page(part, target.at[pl.ds(nth * size, size)], ready)

    def _wait_until_free(self, free: Any, step: jax.Array) -> jax.Array:
        """Wait until every compute warpgroup is done with what a step overwrites; its stage."""
        stages = self.static.layout.stages
        stage = lax.rem(step, jnp.int32(stages))

        @pl.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(free.at[stage])

        return stage

    def _zero_values(self, step: jax.Array) -> None:
        """Zero the values that hold no token: 0 * NaN is NaN, whatever their weight."""
        static, span = self.static, self.span
        values = self.scratch.v.at[lax.rem(step, jnp.int32(static.layout.stages))]
        width = static.value_swizzle // 2
        for first in range(0, static.layout.keys, ROWS):
            position = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_WGMMA.reduce(1))
            start = span.tile(step) * static.layout.keys + first
            kept = is_kept(static, span, position + start)
            bits = jnp.where(kept, jnp.int32(-1), jnp.int32(0))
            # A mask and not a choice: that would unpack the values, into twice the registers.
            bits = lax.optimization_barrier(bits).astype(jnp.int16)
            bits = lax.broadcast_in_dim(bits, (ROWS, width), [0])
            for column in range(0, static.head_dim, width):
                part = values.at[pl.ds(first, ROWS), pl.ds(column, width)]
                old = lax.bitcast_convert_type(plgpu.load(part, layout=_WGMMA), jnp.int16)
                part[...] = lax.bitcast_convert_type(old & bits, static.dtype)
