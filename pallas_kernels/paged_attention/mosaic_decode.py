"""Decode on Hopper with Mosaic GPU: split-KV over live tiles, a persistent grid, swapped operands.

One query token a row makes the query side of the matrix unit nearly empty, so the operands are
swapped: 64 cached tokens are the 64 rows of a `wgmma` and the query heads of one KV head its 8 or
16 columns,

    scores[token, head] = K[token, dim] · Q[head, dim]ᵀ
    output[dim, head]  += V[token, dim]ᵀ · weights[token, head]

A CTA has a memory warpgroup, which fetches pages by TMA into a ring of stages, and a compute
warpgroup. Both walk the CTA's segments of the work plan (`work_plan.py`); the ring runs on from one
segment to the next. Each segment leaves a normalised float32 partial output and its log-sum-exp,
which `mosaic_combine.py` joins.

Sources: Flash-Decoding (split KV), FlashAttention-2 (online softmax), FlashAttention-3 (warp
specialisation). What differs: the swapped operands, the plan made on the device, and scales of an
8-bit V taken into the exponent, so that 16-bit weights stay in 0 to 1 whatever the scales.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic_combine import combine
from pallas_kernels.paged_attention.work_plan import (
    TILE,
    LiveSpan,
    WorkPlan,
    WorkSharing,
    live_span,
)
from pallas_kernels.pages import KV_DTYPES, KVPages

DETERMINISTIC_SPLIT_TOKENS = 1024
"""Where a deterministic call cuts a row: after so many of its own live tokens, and nowhere else."""

_MAX_STAGES = 4
_COMPUTE, _MEMORY = 0, 1  # warpgroups of a CTA
_WGMMA = plgpu.Layout.WGMMA
_BY_HEAD = _WGMMA.reduce(0)  # a vector over the columns (query heads)
_BY_TOKEN = _WGMMA.reduce(1)  # a vector over the rows (tokens)


class DecodeTiling(NamedTuple):
    """What is fixed when the kernel compiles, from sizes alone.

    Attributes:
        heads: columns of the matrix unit: the group padded to 8 or 16.
        stages: tiles of K and V in flight.
        ctas_per_sm: resident CTAs that the shared memory allows, 1 or 2.
        smem_bytes: shared memory of a CTA.
    """

    heads: int
    stages: int
    ctas_per_sm: int
    smem_bytes: int


@functools.cache
def decode_tiling(*, group: int, head_dim: int, itemsize: int) -> DecodeTiling:
    """Choose stages and CTAs: two CTAs an SM hide each other's waiting, more stages hide memory's.

    Args:
        group: query heads of a KV head, at most 16.
        head_dim: width of a head.
        itemsize: bytes of a stored value; 1 means quantised.
    """
    heads = 8 if group <= 8 else 16
    stage = 2 * TILE * (head_dim * itemsize + (4 if itemsize == 1 else 0))
    fixed = 2 * heads * head_dim * 2 + heads * TILE * 2 + heads * head_dim * 4 + heads * 4
    if itemsize == 1:
        fixed += TILE * head_dim * 2  # V widened to 16 bits
    fixed += mosaic.REDUCTION_BYTES + 1024  # barriers, and the alignment of each array
    for ctas in (2, 1):
        room = mosaic.SMEM_PER_SM_BYTES // ctas - mosaic.CTA_SMEM_BYTES
        stages = min((min(room, mosaic.MAX_SMEM_BYTES) - fixed) // stage, _MAX_STAGES)
        if stages >= 2:
            return DecodeTiling(heads, stages, ctas, fixed + stages * stage)
    raise AssertionError(f"no tiling for group={group}, head_dim={head_dim}, itemsize={itemsize}")


class _Static(NamedTuple):
    """Everything the kernel body knows at compile time."""

    tiling: DecodeTiling
    layers: int
    block_size: int
    head_dim: int
    pool_dtype: str
    dtype: np.dtype  # of the matrix unit's operands
    scale: float
    window: int | None
    num_sink_tokens: int
    soft_cap: float | None
    stage_in_smem: bool

    @property
    def quantised(self) -> bool:
        return KV_DTYPES[self.pool_dtype].quantised

    @property
    def widened_columns(self) -> int:
        """Columns of codes that are widened at a time."""
        return 128 if self.tiling.heads == 8 else 64

    def span(self, context_len: jax.Array) -> LiveSpan:
        return live_span(
            context_len,
            block_size=self.block_size,
            window=self.window,
            num_sink_tokens=self.num_sink_tokens,
        )


def paged_decode(
    q: jax.Array,  # [row, head, dim]
    pages: KVPages,
    block_tables: jax.Array,  # [row, max_blocks]
    context_lens: jax.Array,  # [row]
    *,
    layer: int | jax.Array,
    scale: float,
    window: int | None,
    num_sink_tokens: int,
    soft_cap: float | None,
    deterministic: bool = False,
) -> jax.Array:
    """See `pallas_kernels.paged_decode`."""
    rows, heads, dim = q.shape
    kv_heads = pages.num_kv_heads
    group = heads // kv_heads
    storage = KV_DTYPES[pages.dtype_name]
    tiling = decode_tiling(group=group, head_dim=dim, itemsize=storage.dtype.itemsize)
    static = _Static(
        tiling=tiling,
        layers=pages.num_layers,
        block_size=pages.block_size,
        head_dim=dim,
        pool_dtype=pages.dtype_name,
        dtype=mosaic.compute_dtype(pages.dtype_name, q.dtype),
        scale=scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
        stage_in_smem=mosaic.interpreting(),
    )
    sharing = WorkSharing(
        rows=rows,
        kv_heads=kv_heads,
        num_ctas=tiling.ctas_per_sm * mosaic.num_sms(),
        split_tiles=DETERMINISTIC_SPLIT_TOKENS // TILE if deterministic else None,
        max_tiles=-(-block_tables.shape[1] * pages.block_size // TILE) + 1,
    )
    plan = sharing.plan(static.span(context_lens).tiles)
    padding = ((0, 0), (0, 0), (0, tiling.heads - group), (0, 0))
    queries = jnp.pad(q.reshape(rows, kv_heads, group, dim).astype(static.dtype), padding)
    page_ids = jnp.clip(block_tables, 0, pages.num_blocks - 1) * pages.num_layers + layer
    leaves = [pages.k, pages.v]
    if pages.k_scale is not None and pages.v_scale is not None:
        leaves += [pages.k_scale, pages.v_scale]
    # A view: blocks and layers are both outermost, so pages of a layer stand `layers` apart.
    leaves = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]

    out, lse = plgpu.kernel(
        functools.partial(_decode, static, sharing),
        out_type=[
            # Rows past dim hold nothing: the combine kernel wants whole multiples of 64.
            jax.ShapeDtypeStruct(
                (sharing.num_slots, -(-dim // 64) * 64, tiling.heads), jnp.float32
            ),
            jax.ShapeDtypeStruct((sharing.num_slots, tiling.heads), jnp.float32),
        ],
        grid=(sharing.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        scratch_types=_scratch(static),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=mosaic.REDUCTION_BYTES
        ),
    )(plan, context_lens, page_ids, queries, leaves)
    joined = combine(out, lse, sharing, plan, dtype=q.dtype)  # [row * kv_head, ≥ dim, heads]
    joined = joined.reshape(rows, kv_heads, -1, tiling.heads)[:, :, :dim, :group]
    return joined.swapaxes(2, 3).reshape(rows, heads, dim)


class _Scratch(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [2, heads, dim]
    k: Any  # [stage, TILE, dim]
    v: Any
    weights: Any  # [heads, TILE]
    out_tile: Any  # [dim, heads]
    lse_tile: Any  # [heads]
    q_ready: Any  # barriers
    q_free: Any
    ready: Any
    free: Any
    k_scale: Any = None  # [stage, TILE]
    v_scale: Any = None
    v_wide: Any = None  # [TILE, dim], 16 bits
    k_wide: Any = None  # the same of K, where the interpreter wants it


def _scratch(static: _Static) -> dict[str, Any]:
    dim, heads, stages = static.head_dim, static.tiling.heads, static.tiling.stages
    codes = KV_DTYPES[static.pool_dtype].leaf_dtype
    # Blocks of 64 columns of codes are widened at a time: 64 bytes.
    swizzle = 64 if static.quantised and dim % 64 == 0 else None
    wide = mosaic.widest_swizzle(dim * 2)  # one swizzle for both operands of each product
    tile = functools.partial(mosaic.swizzled, TILE, dim, dtype=static.dtype)
    copies = (4 if static.quantised else 2) * max(1, TILE // static.block_size)
    scratch = {
        "q": mosaic.swizzled(2, heads, dim, dtype=static.dtype),
        "k": mosaic.swizzled(stages, TILE, dim, dtype=codes, swizzle=swizzle),
        "v": mosaic.swizzled(stages, TILE, dim, dtype=codes, swizzle=swizzle),
        "weights": mosaic.swizzled(heads, TILE, dtype=static.dtype, swizzle=wide),
        "out_tile": plgpu.SMEM((dim, heads), jnp.float32),
        "lse_tile": plgpu.SMEM((heads,), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=2),
        "q_free": plgpu.Barrier(num_barriers=2),
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    if static.quantised:
        scratch["k_scale"] = scratch["v_scale"] = plgpu.SMEM((stages, TILE), jnp.float32)
        scratch["v_wide"] = tile()
        if static.stage_in_smem:
            scratch["k_wide"] = tile()
    return scratch


def _decode(
    static: _Static,
    sharing: WorkSharing,
    plan: WorkPlan,
    context_lens,
    page_ids,
    queries,
    leaves,
    out,
    lse,
    **arrays,
) -> None:
    """One CTA."""
    scratch = _Scratch(**arrays)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")

    def each_segment(work, state):
        """Thread a state through this CTA's segments that have tiles."""

        def one(item, state):
            segment = sharing.segment(plan, cta, item)
            return lax.cond(
                segment.tiles > 0, lambda state: work(segment, state), lambda state: state, state
            )

        return lax.fori_loop(*sharing.items(plan, cta), one, state)

    @pl.when(warpgroup == _MEMORY)
    def _memory():
        _fetch_segments(static, each_segment, context_lens, page_ids, queries, leaves, scratch)

    @pl.when(warpgroup == _COMPUTE)
    def _compute():
        _attend_segments(static, each_segment, context_lens, out, lse, scratch)


def _fetch_segments(
    static: _Static, each_segment, context_lens, page_ids, queries, leaves, scratch
) -> None:
    """The memory warpgroup: queries of each segment and its tiles, as the ring has room."""
    block_size, stages = static.block_size, static.tiling.stages
    width = page_ids.shape[1]

    def fetch(row, head, context_len, tile, stage) -> None:
        span = static.span(context_len)
        start = span.position(tile)
        last_page = _div(span.end(tile, context_len, static.num_sink_tokens) - 1, block_size)
        for nth in range(max(1, TILE // block_size)):
            wanted = _div(start, block_size) + nth
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


class _Softmax(NamedTuple):
    """Running state of a segment, in registers."""

    top: jax.Array  # [heads], in units of log2
    total: jax.Array  # [TILE, heads]: sums by token place, added up at the end only
    out: tuple[jax.Array, ...]  # [dim, heads] in blocks of rows, not yet divided by the total


def _attend_segments(static: _Static, each_segment, context_lens, out, lse, scratch) -> None:
    """The compute warpgroup: online softmax over the tiles of each segment."""
    heads, dim, stages = static.tiling.heads, static.head_dim, static.tiling.stages

    def work(segment, state):
        used, begun = state
        context_len = context_lens[segment.row]
        slot = lax.rem(begun, 2)
        plgpu.barrier_wait(scratch.q_ready.at[slot])

        def one(nth, softmax):
            stage = lax.rem(used + nth, stages)
            plgpu.barrier_wait(scratch.ready.at[stage])
            start = static.span(context_len).position(segment.first_tile + nth)
            softmax = _attend(static, scratch, slot, stage, start, context_len, softmax)
            plgpu.barrier_arrive(scratch.free.at[stage])
            return softmax

        empty = _Softmax(
            plgpu.layout_cast(jnp.full((heads,), mosaic.MASKED, jnp.float32), _BY_HEAD),
            plgpu.layout_cast(jnp.zeros((TILE, heads), jnp.float32), _WGMMA),
            tuple(
                plgpu.layout_cast(jnp.zeros((size, heads), jnp.float32), _WGMMA)
                for _, size in _row_blocks(dim)
            ),
        )
        softmax = lax.fori_loop(0, segment.tiles, one, empty)
        plgpu.barrier_arrive(scratch.q_free.at[slot])
        total = jnp.sum(softmax.total, axis=0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last segment's output has left
        for (low, size), part in zip(_row_blocks(dim), softmax.out, strict=True):
            part = part / lax.broadcast_in_dim(total, part.shape, [1])
            scratch.out_tile[pl.ds(low, size)] = part
        scratch.lse_tile[...] = softmax.top + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.out_tile, out.at[segment.slot, pl.ds(0, dim)])
        plgpu.copy_smem_to_gmem(scratch.lse_tile, lse.at[segment.slot])
        return used + segment.tiles, begun + 1

    each_segment(work, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


def _attend(static: _Static, scratch, slot, stage, start, context_len, state: _Softmax) -> _Softmax:
    """Take one tile into a segment's state."""
    heads, dim = static.tiling.heads, static.head_dim
    shape = (TILE, heads)
    by_token = functools.partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=[0])
    by_head = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=[1])

    scores = _scores(static, scratch, slot, stage)
    factor = static.scale if static.soft_cap is not None else static.scale * mosaic.LOG2E
    if static.quantised:
        k_scale = plgpu.load(scratch.k_scale.at[stage], layout=_BY_TOKEN, optimized=False)
        scores = scores * by_token(k_scale * factor)
    else:
        scores = scores * factor
    if static.soft_cap is not None:
        scores = mosaic.soft_capped(scores, static.soft_cap) * mosaic.LOG2E

    position = start + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
    seen = position < context_len
    if static.window is not None:
        inside = position >= context_len - static.window
        seen &= inside | (position < static.num_sink_tokens)

    v_scale = None
    if static.quantised:
        v_scale = plgpu.load(scratch.v_scale.at[stage], layout=_BY_TOKEN, optimized=False)
        scores = scores + by_token(jnp.log2(v_scale))
    scores = jnp.where(seen, scores, mosaic.MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=0))
    kept = jnp.exp2(state.top - top)
    weights = jnp.exp2(scores - by_head(top, shape=shape))
    counted = weights if v_scale is None else weights * by_token(1.0 / v_scale)
    counted = jnp.where(seen, counted, 0.0)
    total = state.total * by_head(kept, shape=shape) + counted

    scratch.weights.T[...] = weights.astype(static.dtype)
    v = scratch.v.at[stage]
    if static.quantised:
        _widen_into(static, v, scratch.v_wide)
        v = scratch.v_wide

    @pl.when(start + TILE > context_len)
    def _():
        # Slots nobody has written may hold NaN, and 0 * NaN is NaN: V itself must be cleared.
        for columns in _column_blocks(dim, 64):
            part = v.at[:, columns]
            values = plgpu.load(part, layout=_WGMMA, optimized=False)
            place = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=_WGMMA)
            part[...] = jnp.where(place < context_len - start, values, jnp.zeros_like(values))

    plgpu.commit_smem()
    parts = []
    for (low, size), part in zip(_row_blocks(dim), state.out, strict=True):
        values = v.at[:, pl.ds(low, size)] if size < dim else v
        new = _product(values.T, scratch.weights.T, part.shape)
        parts.append(part * by_head(kept, shape=part.shape) + new)
    return _Softmax(top, total, tuple(parts))


def _scores(static: _Static, scratch, slot, stage) -> jax.Array:
    """K · Qᵀ of one tile, [TILE, heads]."""
    k, q = scratch.k.at[stage], scratch.q.at[slot]
    shape = (TILE, static.tiling.heads)
    if not static.quantised:
        return _product(k, q.T, shape)
    if static.stage_in_smem:
        _widen_into(static, k, scratch.k_wide)
        plgpu.commit_smem()
        return _product(scratch.k_wide, q.T, shape)

    def multiply(accumulator):
        for columns in _column_blocks(static.head_dim, static.widened_columns):
            wide = mosaic.widen(k[:, columns], static.pool_dtype, static.dtype)
            plgpu.wgmma(accumulator, wide, q.at[:, columns].T)
            plgpu.wgmma_wait(0)  # the next block takes these registers
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _widen_into(static: _Static, codes, wide) -> None:
    """Turn a tile of codes into 16 bits in shared memory; the caller commits."""
    for columns in _column_blocks(static.head_dim, static.widened_columns):
        wide[:, columns] = mosaic.widen(codes[:, columns], static.pool_dtype, static.dtype)


def _column_blocks(dim: int, size: int) -> list[Any]:
    """Columns of a tile to take at a time, for want of registers; all where they do not divide."""
    size = size if dim % size == 0 else dim
    return [pl.ds(low, size) for low in range(0, dim, size)]


def _row_blocks(dim: int) -> tuple[tuple[int, int], ...]:
    """First row and rows of each product with V: whole multiples of 64, overlapping if need be."""
    return ((0, dim),) if dim % 64 == 0 else ((0, 64), (dim - 64, 64))


def _product(a, b, shape: tuple[int, int]) -> jax.Array:
    """One float32 product of the matrix unit, waited for."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a, jnp.int32(b))
