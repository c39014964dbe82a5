"""Decode on Hopper with Mosaic GPU: split-KV over live tiles, a persistent grid, swapped operands.

One query token a row makes the query side of the matrix unit nearly empty, so the operands are
swapped: 64 cached tokens are the 64 rows of a `wgmma` and the query heads of one KV head its 8 or
16 columns,

    scores[token, head] = K[token, dim] · Q[head, dim]ᵀ
    output[dim, head]  += V[token, dim]ᵀ · weights[token, head]

A CTA has a memory warpgroup, which fetches pages by TMA into a ring of stages, and a compute
warpgroup. Both walk the CTA's segments of the work plan (`work_plan.py`); the ring runs on from one
segment to the next. Each segment leaves a normalised float32 partial output and its log-sum-exp,
which `combine.py` joins.

Sources: Flash-Decoding (split KV), FlashAttention-2 (online softmax), FlashAttention-3 (warp
specialisation). What differs: the swapped operands, the plan made on the device, and scales of an
8-bit V taken into the exponent, so that 16-bit weights stay in 0 to 1 whatever the scales.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic.combine import combine
from pallas_kernels.paged_attention.mosaic.decode_layout import (
    DecodeScratch,
    DecodeStatic,
    DecodeTiling,
    decode_scratch,
    decode_tiling,
)
from pallas_kernels.paged_attention.mosaic.decode_load import fetch_segments
from pallas_kernels.paged_attention.mosaic.work_plan import TILE, WorkPlan, WorkSharing
from pallas_kernels.pages import KV_DTYPES, KVPages

DETERMINISTIC_SPLIT_TOKENS = 1024
"""Where a deterministic call cuts a row: after so many of its own live tokens, and nowhere else."""

_COMPUTE, _MEMORY = 0, 1  # warpgroups of a CTA
_WGMMA = plgpu.Layout.WGMMA
_BY_HEAD = _WGMMA.reduce(0)  # a vector over the columns (query heads)
_BY_TOKEN = _WGMMA.reduce(1)  # a vector over the rows (tokens)


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
    static = DecodeStatic(
        tiling=tiling,
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
    sharing = _share_work(
        tiling,
        rows=rows,
        kv_heads=kv_heads,
        max_tokens=block_tables.shape[1] * pages.block_size,
        deterministic=deterministic,
    )
    plan = sharing.plan(static.span(context_lens).tiles)
    padding = ((0, 0), (0, 0), (0, tiling.heads - group), (0, 0))
    queries = jnp.pad(q.reshape(rows, kv_heads, group, dim).astype(static.dtype), padding)
    out, lse = plgpu.kernel(
        functools.partial(_decode, static, sharing),
        out_type=_partial_types(sharing, tiling, dim),
        grid=(sharing.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        scratch_types=decode_scratch(static),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=mosaic.REDUCTION_BYTES
        ),
    )(
        plan,
        context_lens,
        mosaic.page_ids(block_tables, pages, layer),
        queries,
        list(mosaic.page_leaves(pages).values()),
    )
    joined = combine(out, lse, sharing, plan, dtype=q.dtype)  # [row * kv_head, ≥ dim, heads]
    joined = joined.reshape(rows, kv_heads, -1, tiling.heads)[:, :, :dim, :group]
    return joined.swapaxes(2, 3).reshape(rows, heads, dim)


def partial_bytes(
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_tokens: int,
    deterministic: bool,
) -> int:
    """Memory that a decode takes besides its output: with `deterministic` it grows with max_tokens.

    Args:
        rows: rows of the batch.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: width of a head.
        itemsize: bytes of a stored value.
        max_tokens: tokens that a block table has room for.
        deterministic: the option of `paged_decode`.
    """
    tiling = decode_tiling(group=heads // kv_heads, head_dim=head_dim, itemsize=itemsize)
    sharing = _share_work(
        tiling, rows=rows, kv_heads=kv_heads, max_tokens=max_tokens, deterministic=deterministic
    )
    types = _partial_types(sharing, tiling, head_dim)
    return sum(x.size * x.dtype.itemsize for x in types)


def _share_work(
    tiling: DecodeTiling, *, rows: int, kv_heads: int, max_tokens: int, deterministic: bool
) -> WorkSharing:
    return WorkSharing(
        rows=rows,
        kv_heads=kv_heads,
        num_ctas=tiling.ctas_per_sm * mosaic.num_sms(),
        split_tiles=DETERMINISTIC_SPLIT_TOKENS // TILE if deterministic else None,
        max_tiles=-(-max_tokens // TILE) + 1,  # a window's tiles begin at a page
    )


def _partial_types(
    sharing: WorkSharing, tiling: DecodeTiling, dim: int
) -> list[jax.ShapeDtypeStruct]:
    """Partial outputs and their log-sum-exps.

    The combine kernel wants whole multiples of 64; rows past dim are never written, and cut off in
    the end.
    """
    slots, padded = sharing.num_slots, -(-dim // 64) * 64
    return [
        jax.ShapeDtypeStruct((slots, padded, tiling.heads), jnp.float32),
        jax.ShapeDtypeStruct((slots, tiling.heads), jnp.float32),
    ]


def _decode(
    static: DecodeStatic,
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
    scratch = DecodeScratch(**arrays)
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
        fetch_segments(static, each_segment, context_lens, page_ids, queries, leaves, scratch)

    @pl.when(warpgroup == _COMPUTE)
    def _compute():
        _attend_segments(static, each_segment, context_lens, out, lse, scratch)


class _Softmax(NamedTuple):
    """Running state of a segment, in registers."""

    top: jax.Array  # [heads], in units of log2
    total: jax.Array  # [TILE, heads]: sums by token place, added up at the end only
    out: tuple[jax.Array, ...]  # [dim, heads] in blocks of rows, not yet divided by the total


def _attend_segments(static: DecodeStatic, each_segment, context_lens, out, lse, scratch) -> None:
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


def _attend(
    static: DecodeStatic, scratch, slot, stage, start, context_len, state: _Softmax
) -> _Softmax:
    """Take one tile into a segment's state."""
    heads, dim = static.tiling.heads, static.head_dim
    shape = (TILE, heads)
    by_token = functools.partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=[0])
    by_head = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=[1])

    scores = _scores(static, scratch, slot, stage)
    factor = mosaic.score_factor(static.scale, static.soft_cap)
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
        new = mosaic.product(values.T, scratch.weights.T, part.shape)
        parts.append(part * by_head(kept, shape=part.shape) + new)
    return _Softmax(top, total, tuple(parts))


def _scores(static: DecodeStatic, scratch, slot, stage) -> jax.Array:
    """K · Qᵀ of one tile, [TILE, heads]."""
    k, q = scratch.k.at[stage], scratch.q.at[slot]
    shape = (TILE, static.tiling.heads)
    if not static.quantised:
        return mosaic.product(k, q.T, shape)
    if static.stage_in_smem:
        _widen_into(static, k, scratch.k_wide)
        plgpu.commit_smem()
        return mosaic.product(scratch.k_wide, q.T, shape)

    def multiply(accumulator):
        for columns in _column_blocks(static.head_dim, static.widened_columns):
            wide = mosaic.widen(k[:, columns], static.pool_dtype, static.dtype)
            plgpu.wgmma(accumulator, wide, q.at[:, columns].T)
            plgpu.wgmma_wait(0)  # the next block takes these registers
        return accumulator[...]

    return pl.run_scoped(multiply, mosaic.ACC(shape, jnp.float32))


def _widen_into(static: DecodeStatic, codes, wide) -> None:
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
