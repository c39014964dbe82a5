"""Prefill on Hopper with Mosaic GPU: chunks of queries over a paged pool, causally.

A CTA serves up to two tiles of 64 query rows of one row and KV head, one for each of its compute
warpgroups, and walks the key tiles that any of these queries can see. Its memory warpgroup
(`prefill_load.py`) brings them in by TMA, one copy a page, several tiles ahead. Pages of an 8-bit
pool land in a buffer of their own and the memory warpgroup widens them to 16 bits, so that the
compute warpgroups run the same products for every pool:

    scores[query, key] = Q[query, dim] · K[key, dim]ᵀ
    output[query, dim] += weights[query, key] · V[key, dim]

A query tile holds the same tokens of some heads of the group, head by head: each head's tokens are
then one box of q, which TMA reads and writes where it stands.

Sources: FlashAttention-2 (online softmax), FlashAttention-3 (warp specialisation, the division of
registers). What differs: pages, windows and sinks that skip tiles, and scales of an 8-bit V taken
into the exponent, so that 16-bit weights stay in 0 to 1 whatever the scales.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic.prefill_load import (
    Arrays,
    Loader,
    Scratch,
    scratch_types,
)
from pallas_kernels.paged_attention.mosaic.prefill_plan import (
    ROWS,
    PrefillStatic,
    Span,
    choose_layout,
    choose_query_tile,
    find_span,
)
from pallas_kernels.pages import KVPages

_WGMMA = plgpu.Layout.WGMMA
# Unseen scores are -inf and a running maximum starts at the lowest finite number, so that an unseen
# weight is exp2(-inf - finite), exactly 0, also in tiles of which a query sees nothing.
_UNSEEN = -math.inf
_LOWEST = float(jnp.finfo(jnp.float32).min)


def paged_prefill(
    q: jax.Array,  # [row, chunk, head, dim]
    pages: KVPages,
    block_tables: jax.Array,  # [row, max_blocks]
    context_lens: jax.Array,  # [row]
    query_lens: jax.Array,  # [row]
    *,
    layer: int | jax.Array,
    scale: float,
    window: int | None,
    num_sink_tokens: int,
    soft_cap: float | None,
    stage_in_smem: bool | None = None,
) -> jax.Array:
    """See `pallas_kernels.paged_prefill`.

    `stage_in_smem` moves the weights through shared memory instead of registers: slower, and the
    form that the GPU interpreter knows; None means there.
    """
    rows, chunk, heads, dim = q.shape
    kv_heads, out_dtype = pages.num_kv_heads, q.dtype
    group = heads // kv_heads
    query = choose_query_tile(group, chunk)
    query_tiles = group // query.heads * -(-chunk // query.tokens)
    stage_in_smem = mosaic.interpreting() if stage_in_smem is None else stage_in_smem
    layout = choose_layout(dim, pages.k.dtype.itemsize, query_tiles, stage_in_smem=stage_in_smem)
    static = PrefillStatic(
        query=query,
        layout=layout,
        query_tiles=query_tiles,
        group=group,
        head_dim=dim,
        block_size=pages.block_size,
        pool_dtype=pages.dtype_name,
        dtype=mosaic.compute_dtype(pages.dtype_name, q.dtype),
        out_dtype=out_dtype,
        scale=scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
        stage_in_smem=stage_in_smem,
    )
    q = q.astype(static.dtype)
    padding = -chunk % query.tokens
    if padding:  # boxes of q must lie within it
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    inputs = {
        "q": q,
        "page_ids": mosaic.page_ids(block_tables, pages, layer),
        "context_lens": context_lens,
        "query_lens": query_lens,
        **mosaic.page_leaves(pages),
    }

    def body(*refs: Any) -> None:
        arrays = Arrays(**dict(zip((*inputs, "out"), refs, strict=True)))
        pl.run_scoped(
            lambda **scratch: _prefill(static, arrays, Scratch(**scratch)),
            **scratch_types(static),
            collective_axes="warpgroup",
        )

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, static.dtype),
        # Neighbours share their keys, for the L2 cache to find.
        grid=(rows, kv_heads, -(-query_tiles // layout.warpgroups)),
        grid_names=("row", "kv_head", "query_pair"),
        num_threads=layout.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*inputs.values())
    return lax.bitcast_convert_type(out, out_dtype)[:, :chunk]


def _prefill(static: PrefillStatic, arrays: Arrays, scratch: Scratch) -> None:
    """One CTA."""
    layout, subgroups = static.layout, jnp.int32(static.subgroups)
    row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
    first_tile = lax.axis_index("query_pair") * layout.warpgroups
    last_tile = jnp.minimum(first_tile + layout.warpgroups, static.query_tiles) - 1
    span = find_span(
        static,
        arrays.context_lens[row],
        arrays.query_lens[row],
        lax.div(first_tile, subgroups) * static.query.tokens,
        (lax.div(last_tile, subgroups) + 1) * static.query.tokens,
    )
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < layout.warpgroups)
    def _compute() -> None:
        if layout.registers is not None:
            plgpu.set_max_registers(layout.registers[1], action="increase")
        _serve_queries(static, arrays, scratch, span, row, kv_head, warpgroup)

    @pl.when(warpgroup == layout.warpgroups)
    def _memory() -> None:
        if layout.registers is not None:
            plgpu.set_max_registers(layout.registers[0], action="decrease")
        Loader(static, arrays, scratch, span, row, kv_head).run()


def _serve_queries(
    static: PrefillStatic,
    arrays: Arrays,
    scratch: Scratch,
    cta: Span,
    row: jax.Array,
    kv_head: jax.Array,
    warpgroup: jax.Array,
) -> None:
    """A compute warpgroup: its query tile from q to the output."""
    tokens, subgroups = static.query.tokens, jnp.int32(static.subgroups)
    number = lax.axis_index("query_pair") * static.layout.warpgroups + warpgroup
    token = lax.div(number, subgroups) * tokens
    first_head = kv_head * static.group + lax.rem(number, subgroups) * static.query.heads
    queries = arrays.query_lens[row]
    exists, has_queries = number < static.query_tiles, token < queries
    tile = scratch.q.at[warpgroup]

    def boxes(array: Any) -> list[tuple[Any, Any]]:
        """Where the tokens of each head stand in an array like q, and in the tile."""
        return [
            (
                array.at[row, pl.ds(token, tokens), first_head + head],
                tile.at[pl.ds(head * tokens, tokens)],
            )
            for head in range(static.query.heads)
        ]

    def write(out: jax.Array) -> None:
        tile[...] = lax.bitcast_convert_type(out.astype(static.out_dtype), static.dtype)
        plgpu.commit_smem()
        for target, source in boxes(arrays.out):
            plgpu.copy_smem_to_gmem(source, target)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(exists & has_queries)
    def _attend_and_write() -> None:
        for source, target in boxes(arrays.q):
            plgpu.copy_gmem_to_smem(source, target, scratch.q_ready.at[warpgroup])
        plgpu.barrier_wait(scratch.q_ready.at[warpgroup])
        before = cta.length - queries
        span = cta._replace(
            first_query=before + token,
            last_query=before + jnp.minimum(token + tokens, queries) - 1,
        )
        out = _attend(static, scratch, span, warpgroup)
        row_number = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=_WGMMA)
        padding = (row_number & (tokens - 1)) + token >= queries
        write(jnp.where(padding, 0.0, out))

    @pl.when(jnp.logical_not(exists & has_queries))
    def _let_others_work() -> None:
        @pl.loop(0, cta.num_tiles)
        def _(step: jax.Array) -> None:
            stage = lax.rem(step, jnp.int32(static.layout.stages))
            plgpu.barrier_wait(scratch.k_ready.at[stage])
            plgpu.barrier_arrive(scratch.k_free.at[stage])
            plgpu.barrier_wait(scratch.v_ready.at[stage])
            plgpu.barrier_arrive(scratch.v_free.at[stage])

    @pl.when(exists & jnp.logical_not(has_queries))
    def _write_padding() -> None:
        write(plgpu.layout_cast(jnp.zeros((ROWS, static.head_dim), jnp.float32), _WGMMA))


class _Softmax(NamedTuple):
    """Running state of a query tile, in registers."""

    top: jax.Array  # f32 [ROWS], in units of log2
    total: jax.Array  # f32 [ROWS]
    out: jax.Array  # f32 [ROWS, dim], not yet divided by the total


def _attend(static: PrefillStatic, scratch: Scratch, span: Span, warpgroup: jax.Array) -> jax.Array:
    """Output of a query tile, float32 [ROWS, dim]; anything in rows that hold no query."""
    layout, dim = static.layout, static.head_dim
    by_row = functools.partial(lax.broadcast_in_dim, broadcast_dimensions=[0])

    def take_tile(step: jax.Array, state: _Softmax) -> _Softmax:
        stage = lax.rem(step, jnp.int32(layout.stages))
        position = span.tile(step) * layout.keys
        plgpu.barrier_wait(scratch.k_ready.at[stage])
        for first in range(0, layout.keys, layout.pass_keys):
            keys = pl.ds(first, layout.pass_keys)
            scores = _scores(static, scratch, warpgroup, stage, keys)
            if first + layout.pass_keys == layout.keys:
                plgpu.barrier_arrive(scratch.k_free.at[stage])
            scores = _mask(static, scratch, span, warpgroup, position, keys, scores)
            if first == 0:
                plgpu.barrier_wait(scratch.v_ready.at[stage])
            if static.quantised:
                scores += _by_key(scratch.log_v_scale.at[stage, keys])
            top = jnp.maximum(state.top, scores.max(axis=1))
            weights = jnp.exp2(scores - by_row(top, scores.shape))
            unscaled = weights
            if static.quantised:
                unscaled = weights * _by_key(scratch.inverse_v_scale.at[stage, keys])
            shrink = jnp.exp2(state.top - top)
            total = state.total * shrink + unscaled.sum(axis=1)
            out = state.out * by_row(shrink, state.out.shape)
            values = scratch.v.at[stage, keys]
            out = _add_values(static, scratch, warpgroup, weights.astype(static.dtype), values, out)
            state = _Softmax(top, total, out)
        plgpu.barrier_arrive(scratch.v_free.at[stage])
        return state

    scratch.key_numbers[warpgroup] = plgpu.broadcasted_iota(
        jnp.int32, (layout.keys,), 0, layout=_WGMMA.reduce(0)
    )
    empty = _Softmax(
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _WGMMA.reduce(1)),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _WGMMA.reduce(1)),
        plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), _WGMMA),
    )
    state = lax.fori_loop(0, span.num_tiles, take_tile, empty)
    return state.out * by_row(1.0 / state.total, state.out.shape)


def _by_key(vector: Any) -> jax.Array:
    """Load a vector of shared memory as a row for every query, `[ROWS, keys]`."""
    values = plgpu.load(vector, layout=_WGMMA.reduce(0))
    return lax.broadcast_in_dim(values, (ROWS, *values.shape), [1])


def _scores(
    static: PrefillStatic, scratch: Scratch, warpgroup: jax.Array, stage: jax.Array, keys: pl.Slice
) -> jax.Array:
    """Scores of some keys of a stage in units of log2, `[ROWS, keys]`."""
    keys_t = scratch.k.at[stage, keys].T
    scores = mosaic.product(scratch.q.at[warpgroup], keys_t, (ROWS, static.layout.pass_keys))
    if static.quantised:
        scores *= _by_key(scratch.score_factor.at[stage, keys])
    else:
        scores *= static.score_factor
    if static.soft_cap is None:
        return scores
    return mosaic.soft_capped(scores, static.soft_cap) * mosaic.LOG2E


def _add_values(
    static: PrefillStatic,
    scratch: Scratch,
    warpgroup: jax.Array,
    weights: jax.Array,  # [ROWS, keys], 16 bits
    values: Any,  # [keys, dim], in shared memory
    out: jax.Array,  # f32 [ROWS, dim]
) -> jax.Array:
    """`out + weights · values`."""
    if static.stage_in_smem:
        scratch.weights[warpgroup] = weights
        plgpu.commit_smem()
        return out + mosaic.product(scratch.weights.at[warpgroup], values, out.shape)

    def accumulate(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(accumulate)(mosaic.ACC.init(out))


def _mask(
    static: PrefillStatic,
    scratch: Scratch,
    span: Span,
    warpgroup: jax.Array,
    position: jax.Array,  # of the tile's first key
    keys: pl.Slice,
    scores: jax.Array,
) -> jax.Array:
    """Set scores of keys that a query does not see to _UNSEEN; most tiles are seen whole."""
    window = static.window
    partly_seen = position + (static.layout.keys - 1) > span.first_query
    if window is not None:
        partly_seen |= position <= span.last_query - window

    def apply(scores: jax.Array) -> jax.Array:
        key = _by_key(scratch.key_numbers.at[warpgroup, keys])
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_WGMMA)
        query = (row & (static.query.tokens - 1)) + (span.first_query - position)
        seen = key <= query
        if window is not None:
            seen &= (key > query - window) | (key < static.num_sink_tokens - position)
        return jnp.where(seen, scores, _UNSEEN)

    return lax.cond(partly_seen, apply, lambda scores: scores, scores)
