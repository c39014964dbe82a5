"""Prefill on Hopper: chunks of queries over a paged pool, a Mosaic GPU kernel.

A CTA serves up to two tiles of 64 query rows of one row and KV head, one for each of its compute
warpgroups, and walks the key tiles that any of these queries can see. Its memory warpgroup brings
them in by TMA, one copy a page, several tiles ahead. The pages of an 8-bit pool land in a buffer of
their own and the memory warpgroup widens them to 16 bits, so that the compute warpgroups run the
same matrix products for every pool:

    S[64, keys] = Q K^T -> scales, soft cap, mask -> online softmax -> O[64, dim] += P V

A query tile holds `tokens` consecutive tokens of each of `heads` heads that share the KV head, head
by head: each head's tokens are then one box of q, which TMA reads and writes where it is.

Source: FlashAttention-3 (Shah et al., arXiv 2407.08608) for the warpgroup roles and the register
split; paging, windows, sinks and quantised pools are additions.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.pages import KV_DTYPES, KVPages

ROWS = 64
"""Query rows of a tile: what one warpgroup's matrix instruction takes."""

SMEM_BYTES = 227 * 1024
"""Shared memory that a CTA may have on sm_90."""

_LOG2E = math.log2(math.e)
# Unseen scores are -inf and a running maximum starts at the lowest finite number, so that an unseen
# weight is exp2(-inf - finite), exactly 0, and never NaN.
_UNSEEN = -math.inf
_LOWEST = float(jnp.finfo(jnp.float32).min)

_SMEM_ALIGNMENT = 1024  # of every allocation
_SMEM_RESERVED = 4 * 1024  # barriers, and what the compiler keeps for itself
_MAX_STAGES = 4


# --- static choices -------------------------------------------------------------------------------


class QueryTile(NamedTuple):
    """What the 64 rows of a query tile hold.

    Attributes:
        heads: query heads, a divisor of the group; row `head * tokens + token`.
        tokens: consecutive tokens of each, a power of two and at least 8.
    """

    heads: int
    tokens: int


class KeyTile(NamedTuple):
    """How a CTA is laid out.

    Attributes:
        keys: tokens of a key tile.
        warpgroups: compute warpgroups, a query tile each.
        stages: 16-bit key tiles, and value tiles, in SMEM.
        code_stages: 8-bit ones waiting to be widened; 0 for 16-bit pools.
        smem_bytes: bytes of SMEM they take, alignment included.
    """

    keys: int
    warpgroups: int
    stages: int
    code_stages: int
    smem_bytes: int


def choose_query_tile(group: int, chunk: int) -> QueryTile:
    """Pick the shape that needs the fewest tiles; of equals, the one that spans the fewest tokens.

    Args:
        group: query heads of a KV head, 1 to 16.
        chunk: query tokens of a row.
    """
    shapes = [
        QueryTile(heads, 1 << ((ROWS // heads).bit_length() - 1))
        for heads in range(1, 9)
        if group % heads == 0
    ]
    return min(shapes, key=lambda x: (group // x.heads * -(-chunk // x.tokens), x.tokens))


def choose_key_tile(
    head_dim: int, itemsize: int, query_tiles: int, *, stage_in_smem: bool = False
) -> KeyTile:
    """Pick the layout of a CTA: the largest key tiles, then the most stages that fit.

    Keys are 128, and 64 where the float32 output tile takes half the registers (head_dim 256).

    Args:
        head_dim: width of a head.
        itemsize: bytes of a stored value, 1 or 2.
        query_tiles: query tiles of a row and KV head.
        stage_in_smem: whether the weights go through SMEM too.
    """
    quantised = itemsize == 1
    keys = 128 if head_dim <= (96 if quantised else 128) else 64
    for warpgroups in (1,) if query_tiles == 1 else (2, 1):
        for stages in range(2 if quantised else _MAX_STAGES, 1, -1):
            for code_stages in (2, 1) if quantised else (0,):
                used = _smem_bytes(head_dim, keys, warpgroups, stages, code_stages, stage_in_smem)
                if used + _SMEM_RESERVED <= SMEM_BYTES:
                    return KeyTile(keys, warpgroups, stages, code_stages, used)
    raise AssertionError(f"no layout for head_dim {head_dim}, {itemsize} bytes a value")


def _smem_bytes(
    head_dim: int, keys: int, warpgroups: int, stages: int, code_stages: int, stage_in_smem: bool
) -> int:
    tile = keys * head_dim
    arrays = [warpgroups * ROWS * head_dim * 2, stages * tile * 2, stages * tile * 2]
    if code_stages:
        arrays += [code_stages * tile] * 2 + [code_stages * keys * 4] * 2 + [stages * keys * 4] * 3
    if stage_in_smem:
        arrays.append(warpgroups * ROWS * keys * 2)
    return sum(-(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT for size in arrays)


class _Statics(NamedTuple):
    """Everything that is fixed when the kernel is traced."""

    query: QueryTile
    key: KeyTile
    query_tiles: int
    group: int
    head_dim: int
    block_size: int
    pool_dtype: str
    dtype: jnp.dtype  # of the matrix products
    out_dtype: jnp.dtype
    scale: float
    window: int | None
    num_sink_tokens: int
    soft_cap: float | None
    stage_in_smem: bool

    @property
    def quantised(self) -> bool:
        return self.key.code_stages > 0

    @property
    def copy_rows(self) -> int:
        """Tokens that one TMA copy brings."""
        return min(self.block_size, self.key.keys)

    @property
    def copies(self) -> int:
        """Copies that fill a key tile."""
        return self.key.keys // self.copy_rows

    @property
    def subgroups(self) -> int:
        """Query tiles that the heads of a group make."""
        return self.group // self.query.heads


# --- which keys -----------------------------------------------------------------------------------


class _Span(NamedTuple):
    """Positions and key tiles of some queries of a row; int32 scalars.

    Tiles are numbered by position from the start of the row. A CTA walks `sink_tiles` tiles from 0
    and the rest from `first_tile`.
    """

    length: jax.Array  # tokens of the row
    first_query: jax.Array  # position
    last_query: jax.Array
    first_page: jax.Array  # of the first query's window
    sink_tiles: jax.Array
    first_tile: jax.Array
    num_tiles: jax.Array

    def tile(self, step: jax.Array) -> jax.Array:
        """Number of the tile that a step takes."""
        return jnp.where(step < self.sink_tiles, step, step - self.sink_tiles + self.first_tile)


def _int(x: int) -> jax.Array:
    return jnp.int32(x)


def _span(
    s: _Statics, length: jax.Array, queries: jax.Array, first: jax.Array, end: jax.Array
) -> _Span:
    """Span of the queries `first` up to `end` of a row's chunk; empty where none of them is real."""
    end = jnp.minimum(end, queries)
    first_query, last_query = length - queries + first, length - queries + end - 1
    seen_from = _int(0)
    if s.window is not None:
        seen_from = jnp.maximum(first_query - (s.window - 1), 0)
    first_tile = lax.div(seen_from, _int(s.key.keys))
    sink_tiles = jnp.minimum(_int(-(-s.num_sink_tokens // s.key.keys)), first_tile)
    if s.window is None:
        sink_tiles = _int(0)
    num_tiles = sink_tiles + lax.div(last_query, _int(s.key.keys)) + 1 - first_tile
    return _Span(
        length=length,
        first_query=first_query,
        last_query=last_query,
        first_page=lax.div(seen_from, _int(s.block_size)),
        sink_tiles=sink_tiles,
        first_tile=first_tile,
        num_tiles=jnp.where(first < end, num_tiles, 0),
    )


def _page_columns(s: _Statics, span: _Span, tile: jax.Array, in_sinks: jax.Array) -> list[Any]:
    """Columns of the block table that a tile reads.

    A page of the tile that no query sees is replaced by one that some query does, so that nothing
    outside is read; `_kept` tells its slots.
    """
    last_page = lax.div(span.length - 1, _int(s.block_size))
    last_sink_page = (s.num_sink_tokens - 1) // s.block_size
    columns = []
    for j in range(s.copies):
        column = lax.div(tile * s.key.keys + j * s.copy_rows, _int(s.block_size))
        if s.window is not None:
            outside = (column > last_sink_page) & (column < span.first_page)
            stand_in = jnp.where(in_sinks, _int(max(last_sink_page, 0)), span.first_page)
            column = jnp.where(outside, stand_in, column)
        columns.append(jnp.minimum(column, last_page))
    return columns


def _kept(s: _Statics, span: _Span, position: jax.Array) -> jax.Array:
    """Whether a slot at these positions was read from its own page and holds a token."""
    kept = position < span.length
    if s.window is not None:
        sinks_end = -(-s.num_sink_tokens // s.block_size) * s.block_size
        kept &= (position < sinks_end) | (position >= span.first_page * s.block_size)
    return kept


# --- memory warpgroup -----------------------------------------------------------------------------


class _Gmem(NamedTuple):
    """Arguments and result of the kernel."""

    q: Any  # [row, chunk, head, dim]
    page_ids: Any  # i32 [row, max_blocks], of the pool's first axis below
    context_lens: Any  # i32 [row]
    query_lens: Any  # i32 [row]
    k: Any  # [block * layer, kv_head, block_size, dim]
    v: Any
    out: Any  # as q
    k_scale: Any = None  # f32 [block * layer, kv_head, block_size]
    v_scale: Any = None


class _Smem(NamedTuple):
    """Buffers that the warpgroups share. The last six belong to 8-bit pools, the others lack them."""

    q: Any  # [warpgroup, ROWS, dim]; takes the output at the end
    k: Any  # [stage, keys, dim]
    v: Any
    weights: Any  # [warpgroup, ROWS, keys] or None
    k_codes: Any  # [code_stage, keys, dim]
    v_codes: Any
    k_scale: Any  # f32 [code_stage, keys]
    v_scale: Any
    factors: Any  # f32 [stage, keys], multiply the scores
    log_v_scale: Any  # f32 [stage, keys], log2 of the V scales
    inverse_v_scale: Any  # f32 [stage, keys]


class _Barriers(NamedTuple):
    """Barriers; a stage of K, or of V, has its own."""

    q_ready: Any  # [warpgroup]
    k_ready: Any  # [stage]
    v_ready: Any  # [stage + 1], the spare one for a tile that needs cleaning
    k_free: Any
    v_free: Any
    k_codes_ready: Any  # [code_stage], 8-bit pools
    v_codes_ready: Any


class _Codes(NamedTuple):
    """K, or V, of an 8-bit pool on its way in."""

    gmem: Any  # leaf of the pool
    gmem_scale: Any
    codes: Any  # SMEM, [code_stage, keys, dim]
    scale: Any  # SMEM, f32 [code_stage, keys]
    ready: Any  # barriers


def _copy_pages(
    s: _Statics, source: Any, target: Any, pages: list[Any], offset: jax.Array, barrier: Any
) -> None:
    """Fill a tile of SMEM, one TMA a page; `source` is indexed by page id."""
    for j, page in enumerate(pages):
        part = source(page)
        if s.copy_rows < s.block_size:
            part = part.at[pl.ds(offset, s.copy_rows)]
        if s.copies > 1:
            plgpu.copy_gmem_to_smem(part, target.at[pl.ds(j * s.copy_rows, s.copy_rows)], barrier)
        else:
            plgpu.copy_gmem_to_smem(part, target, barrier)


def _has_dead_slots(s: _Statics, span: _Span, tile: jax.Array) -> jax.Array:
    return (tile + 1) * s.key.keys > span.length


def _zero_unkept(s: _Statics, span: _Span, first_position: jax.Array, tile: Any) -> None:
    """Zero the V rows that hold no token: 0 * NaN is NaN, whatever their weight."""
    width = _swizzle_columns(s.head_dim, 2)
    for row in range(0, s.key.keys, ROWS):
        shape = (ROWS, width)
        position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        kept = _kept(s, span, position + (first_position + row))
        for column in range(0, s.head_dim, width):
            part = tile.at[pl.ds(row, ROWS), pl.ds(column, width)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(kept, values, jnp.zeros_like(values))


def _load_tiles(
    s: _Statics, gmem: _Gmem, smem: _Smem, bars: _Barriers, span: _Span, row: Any, kv_head: Any
) -> None:
    """Memory warpgroup of a 16-bit pool: K and V tiles, straight to where they are multiplied."""

    @pl.loop(0, span.num_tiles)
    def _(step: jax.Array) -> None:
        stage = lax.rem(step, _int(s.key.stages))
        tile = span.tile(step)
        columns = _page_columns(s, span, tile, step < span.sink_tiles)
        pages = [gmem.page_ids[row, column] for column in columns]
        offset = lax.rem(tile * s.key.keys, _int(s.block_size))

        @pl.when(step >= s.key.stages)
        def _() -> None:
            plgpu.barrier_wait(bars.k_free.at[stage])

        _copy_pages(
            s,
            lambda page: gmem.k.at[page, kv_head],
            smem.k.at[stage],
            pages,
            offset,
            bars.k_ready.at[stage],
        )

        @pl.when(step >= s.key.stages)
        def _() -> None:
            plgpu.barrier_wait(bars.v_free.at[stage])

        # V of a tile with dead slots takes the spare barrier: it is cleaned before anybody sees it.
        dead = _has_dead_slots(s, span, tile)
        ready = bars.v_ready.at[jnp.where(dead, s.key.stages, stage)]
        _copy_pages(
            s, lambda page: gmem.v.at[page, kv_head], smem.v.at[stage], pages, offset, ready
        )

    last = span.num_tiles - 1  # the only one that may have dead slots

    @pl.when((span.num_tiles > 0) & _has_dead_slots(s, span, span.tile(last)))
    def _() -> None:
        stage = lax.rem(last, _int(s.key.stages))
        plgpu.barrier_wait(bars.v_ready.at[s.key.stages])
        _zero_unkept(s, span, span.tile(last) * s.key.keys, smem.v.at[stage])
        plgpu.commit_smem()
        for _ in range(s.copies):  # in place of the copies
            plgpu.barrier_arrive(bars.v_ready.at[stage])


def _widen_tiles(
    s: _Statics, gmem: _Gmem, smem: _Smem, bars: _Barriers, span: _Span, row: Any, kv_head: Any
) -> None:
    """Memory warpgroup of an 8-bit pool: codes into a buffer of their own, then widened."""
    k = _Codes(gmem.k, gmem.k_scale, smem.k_codes, smem.k_scale, bars.k_codes_ready)
    v = _Codes(gmem.v, gmem.v_scale, smem.v_codes, smem.v_scale, bars.v_codes_ready)
    column_layout = plgpu.Layout.WGMMA.reduce(0)

    def fetch(step: jax.Array, leaf: _Codes) -> None:
        tile = span.tile(step)
        columns = _page_columns(s, span, tile, step < span.sink_tiles)
        pages = [gmem.page_ids[row, column] for column in columns]
        offset = lax.rem(tile * s.key.keys, _int(s.block_size))
        code_stage = lax.rem(step, _int(s.key.code_stages))
        ready = leaf.ready.at[code_stage]
        for source, target in ((leaf.gmem, leaf.codes), (leaf.gmem_scale, leaf.scale)):
            _copy_pages(
                s,
                lambda page, source=source: source.at[page, kv_head],
                target.at[code_stage],
                pages,
                offset,
                ready,
            )

    def wait_until_free(free: Any, step: jax.Array, stage: jax.Array) -> None:
        @pl.when(step >= s.key.stages)
        def _() -> None:
            plgpu.barrier_wait(free.at[stage])

    def widen(source: Any, target: Any) -> None:
        for i in range(0, s.key.keys, ROWS):
            rows = pl.ds(i, ROWS)
            codes = plgpu.load(source.at[rows], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            target[rows] = mosaic.widen(codes, s.pool_dtype, s.dtype)

    def widen_k(step: jax.Array, stage: jax.Array, code_stage: jax.Array) -> None:
        plgpu.barrier_wait(k.ready.at[code_stage])
        wait_until_free(bars.k_free, step, stage)
        k_scale = plgpu.load(k.scale.at[code_stage], layout=column_layout)
        smem.factors[stage] = k_scale * (s.scale * mosaic.LOG2E)
        widen(k.codes.at[code_stage], smem.k.at[stage])
        plgpu.commit_smem()
        plgpu.barrier_arrive(bars.k_ready.at[stage])

    def widen_v(step: jax.Array, stage: jax.Array, code_stage: jax.Array) -> None:
        plgpu.barrier_wait(v.ready.at[code_stage])
        wait_until_free(bars.v_free, step, stage)
        tile = span.tile(step)
        first_position = tile * s.key.keys
        v_scale = plgpu.load(v.scale.at[code_stage], layout=column_layout)
        position = plgpu.broadcasted_iota(jnp.int32, (s.key.keys,), 0, layout=column_layout)
        kept = _kept(s, span, position + first_position)
        v_scale = jnp.where(kept, v_scale, 1.0)  # else NaN, maybe
        smem.log_v_scale[stage] = jnp.log2(v_scale)
        smem.inverse_v_scale[stage] = 1.0 / v_scale
        widen(v.codes.at[code_stage], smem.v.at[stage])
        if s.pool_dtype.startswith("float8"):  # int8 has no NaN

            @pl.when(_has_dead_slots(s, span, tile))
            def _() -> None:
                _zero_unkept(s, span, first_position, smem.v.at[stage])

        plgpu.commit_smem()
        plgpu.barrier_arrive(bars.v_ready.at[stage])

    ahead = s.key.code_stages

    @pl.loop(0, jnp.where(span.num_tiles > 0, span.num_tiles + ahead, 0))
    def _(next_step: jax.Array) -> None:
        step = next_step - ahead
        stage, code_stage = lax.rem(step, _int(s.key.stages)), lax.rem(next_step, _int(ahead))
        for leaf, widen_leaf in ((k, widen_k), (v, widen_v)):

            @pl.when(step >= 0)
            def _(widen_leaf: Callable[..., None] = widen_leaf) -> None:
                widen_leaf(step, stage, code_stage)

            @pl.when(next_step < span.num_tiles)
            def _(leaf: _Codes = leaf) -> None:
                fetch(next_step, leaf)


# --- compute warpgroups ---------------------------------------------------------------------------


class _Softmax(NamedTuple):
    """Running state of an online softmax over the rows of a query tile, in units of log2."""

    top: jax.Array  # f32 [ROWS], highest exponent so far
    total: jax.Array  # f32 [ROWS], sum of the weights
    out: jax.Array  # f32 [ROWS, dim], weighted V


def _rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


def _matmul(lhs: Any, rhs: Any, shape: tuple[int, int]) -> jax.Array:
    def run(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, lhs, rhs)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _mask(s: _Statics, span: _Span, first_position: jax.Array, scores: jax.Array) -> jax.Array:
    """Set what a query may not see to _UNSEEN; tiles that every query sees whole are left alone."""
    last_position = first_position + (s.key.keys - 1)
    needed = last_position > span.first_query
    if s.window is not None:
        needed |= first_position <= span.last_query - s.window

    def apply(scores: jax.Array) -> jax.Array:
        iota = functools.partial(
            plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=plgpu.Layout.WGMMA
        )
        key = iota(1) + first_position
        query = (iota(0) & (s.query.tokens - 1)) + span.first_query
        seen = key <= query
        if s.window is not None:
            seen &= (key > query - s.window) | (key < s.num_sink_tokens)
        return jnp.where(seen, scores, _UNSEEN)

    return lax.cond(needed, apply, lambda scores: scores, scores)


def _exponents(
    s: _Statics, smem: _Smem, stage: jax.Array, scores: jax.Array
) -> tuple[jax.Array, float]:
    """Turn products q·k into exponents of 2, up to the factor returned beside them."""
    factor = s.scale * _LOG2E
    if s.quantised:
        factors = plgpu.load(smem.factors.at[stage], layout=plgpu.Layout.WGMMA.reduce(0))
        scores = scores * _columns(factors, scores.shape)
        factor = 1.0  # it is in these factors
    if s.soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's tanh is 5e-4 off.
        inner = scores * (2.0 / s.soft_cap * factor)
        cap = s.soft_cap * _LOG2E
        scores = cap - (2.0 * cap) * (1.0 / (1.0 + jnp.exp2(inner)))  # this division is fast
        factor = 1.0
    return scores, factor


def _attend(
    s: _Statics, smem: _Smem, bars: _Barriers, span: _Span, num_tiles: jax.Array, wg: jax.Array
) -> jax.Array:
    """Output of one query tile, float32 [ROWS, dim]; rows without a query hold anything."""
    layout = plgpu.Layout.WGMMA
    score_shape, out_shape = (ROWS, s.key.keys), (ROWS, s.head_dim)

    def step(i: jax.Array, state: _Softmax) -> _Softmax:
        stage = lax.rem(i, _int(s.key.stages))
        first_position = span.tile(i) * s.key.keys

        plgpu.barrier_wait(bars.k_ready.at[stage])
        scores = _matmul(smem.q.at[wg], smem.k.at[stage].T, score_shape)
        scores, factor = _exponents(s, smem, stage, scores)
        plgpu.barrier_arrive(bars.k_free.at[stage])
        scores = _mask(s, span, first_position, scores)

        plgpu.barrier_wait(bars.v_ready.at[stage])
        if s.quantised:
            log_scale = plgpu.load(smem.log_v_scale.at[stage], layout=layout.reduce(0))
            scores = scores + _columns(log_scale, score_shape)
        top = jnp.maximum(state.top, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - _rows(top, score_shape))
        kept = jnp.exp2(state.top - top)
        unscaled = weights
        if s.quantised:
            inverse = plgpu.load(smem.inverse_v_scale.at[stage], layout=layout.reduce(0))
            unscaled = weights * _columns(inverse, score_shape)
        total = state.total * kept + unscaled.sum(axis=1)
        out = state.out * _rows(kept, out_shape)
        weights = weights.astype(s.dtype)

        if s.stage_in_smem:
            smem.weights[wg] = weights
            plgpu.commit_smem()
            out = out + _matmul(smem.weights.at[wg], smem.v.at[stage], out_shape)
        else:

            def accumulate(accumulator: Any) -> None:
                plgpu.wgmma(accumulator, weights, smem.v.at[stage])

            out = pl.run_state(accumulate)(plgpu.ACC.init(out))
        plgpu.barrier_arrive(bars.v_free.at[stage])
        return _Softmax(top, total, out)

    start = _Softmax(
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
        plgpu.layout_cast(jnp.zeros(out_shape, jnp.float32), layout),
    )
    end = lax.fori_loop(0, num_tiles, step, start)
    return end.out / _rows(end.total, out_shape)


def _compute(
    s: _Statics, gmem: _Gmem, smem: _Smem, bars: _Barriers, cta: _Span, row: Any, kv_head: Any
) -> None:
    """Compute warpgroup: one query tile over the CTA's key tiles."""
    wg = lax.axis_index("warpgroup")
    item = lax.axis_index("query_pair") * s.key.warpgroups + wg
    exists = item < s.query_tiles
    token = lax.div(item, _int(s.subgroups)) * s.query.tokens
    first_head = kv_head * s.group + lax.rem(item, _int(s.subgroups)) * s.query.heads
    queries = gmem.query_lens[row]
    span = cta._replace(first_query=cta.length - queries + token)
    span = span._replace(
        last_query=cta.length - queries + jnp.minimum(token + s.query.tokens, queries) - 1
    )
    tile, out_shape = smem.q.at[wg], (ROWS, s.head_dim)

    def boxes(array: Any) -> list[tuple[Any, Any]]:
        """The tile's heads: where each is in q or the output, and where in SMEM."""
        return [
            (
                array.at[row, pl.ds(token, s.query.tokens), first_head + i],
                tile.at[pl.ds(i * s.query.tokens, s.query.tokens)],
            )
            for i in range(s.query.heads)
        ]

    def write(out: jax.Array) -> None:
        bits = lax.bitcast_convert_type(out.astype(s.out_dtype), s.dtype)
        tile[...] = bits
        plgpu.commit_smem()
        for target, source in boxes(gmem.out):
            plgpu.copy_smem_to_gmem(source, target)
        plgpu.wait_smem_to_gmem(0)

    has_queries = exists & (token < queries)

    @pl.when(has_queries)
    def _() -> None:
        for source, target in boxes(gmem.q):
            plgpu.copy_gmem_to_smem(source, target, bars.q_ready.at[wg])
        plgpu.barrier_wait(bars.q_ready.at[wg])
        out = _attend(s, smem, bars, span, cta.num_tiles, wg)
        iota = plgpu.broadcasted_iota(jnp.int32, out_shape, 0, layout=plgpu.Layout.WGMMA)
        real = (iota & (s.query.tokens - 1)) + token < queries
        write(jnp.where(real, out, 0.0))

    @pl.when(jnp.logical_not(has_queries))
    def _() -> None:
        @pl.loop(0, cta.num_tiles)
        def _(step: jax.Array) -> None:  # the memory warpgroup waits for everybody
            stage = lax.rem(step, _int(s.key.stages))
            plgpu.barrier_arrive(bars.k_free.at[stage])
            plgpu.barrier_arrive(bars.v_free.at[stage])

    @pl.when(exists & (token >= queries))
    def _() -> None:
        write(plgpu.layout_cast(jnp.zeros(out_shape, jnp.float32), plgpu.Layout.WGMMA))


# --- the kernel -----------------------------------------------------------------------------------


def _swizzle_columns(columns: int, itemsize: int) -> int:
    return plgpu.find_swizzle(columns * itemsize * 8) // itemsize


def _tile_memory(shape: tuple[int, ...], dtype: Any) -> Any:
    """SMEM whose last two axes are laid out as matrix instructions and TMA want them."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = _swizzle_columns(shape[-1], itemsize)
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(s: _Statics) -> tuple[_Smem, _Barriers]:
    key, dim, dtype = s.key, s.head_dim, s.dtype
    codes = code_vector = vector = codes_ready = None
    if s.quantised:
        codes = mosaic.swizzled(
            key.code_stages, key.keys, dim, dtype=KV_DTYPES[s.pool_dtype].leaf_dtype
        )
        code_vector = plgpu.SMEM((key.code_stages, key.keys), jnp.float32)
        vector = plgpu.SMEM((key.stages, key.keys), jnp.float32)
        codes_ready = plgpu.Barrier(num_arrivals=2 * s.copies, num_barriers=key.code_stages)
    smem = _Smem(
        q=_tile_memory((key.warpgroups, ROWS, dim), dtype),
        k=_tile_memory((key.stages, key.keys, dim), dtype),
        v=_tile_memory((key.stages, key.keys, dim), dtype),
        weights=(
            _tile_memory((key.warpgroups, ROWS, key.keys), dtype) if s.stage_in_smem else None
        ),
        k_codes=codes,
        v_codes=codes,
        k_scale=code_vector,
        v_scale=code_vector,
        factors=vector,
        log_v_scale=vector,
        inverse_v_scale=vector,
    )
    free = plgpu.Barrier(num_arrivals=key.warpgroups, num_barriers=key.stages)
    arrivals = 1 if s.quantised else s.copies
    bars = _Barriers(
        q_ready=plgpu.Barrier(num_arrivals=s.query.heads, num_barriers=key.warpgroups),
        k_ready=plgpu.Barrier(num_arrivals=arrivals, num_barriers=key.stages),
        v_ready=plgpu.Barrier(num_arrivals=arrivals, num_barriers=key.stages + 1),
        k_free=free,
        v_free=free,
        k_codes_ready=codes_ready,
        v_codes_ready=codes_ready,
    )
    return smem, bars


def _kernel(s: _Statics, gmem: _Gmem, smem: _Smem, bars: _Barriers) -> None:
    row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
    first_item = lax.axis_index("query_pair") * s.key.warpgroups
    last_item = jnp.minimum(first_item + s.key.warpgroups, s.query_tiles) - 1
    first = lax.div(first_item, _int(s.subgroups)) * s.query.tokens
    end = (lax.div(last_item, _int(s.subgroups)) + 1) * s.query.tokens
    cta = _span(s, gmem.context_lens[row], gmem.query_lens[row], first, end)
    wg = lax.axis_index("warpgroup")

    @pl.when(wg < s.key.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(208 if s.quantised and s.key.warpgroups == 2 else 232, action="increase")
        _compute(s, gmem, smem, bars, cta, row, kv_head)

    @pl.when(wg == s.key.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(88 if s.quantised else 40, action="decrease")
        load = _widen_tiles if s.quantised else _load_tiles
        load(s, gmem, smem, bars, cta, row, kv_head)


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
    stage_in_smem: bool = False,
) -> jax.Array:
    """See `pallas_kernels.paged_prefill`.

    `stage_in_smem` moves the weights through SMEM instead of registers: slower, and the form that
    the GPU interpreter knows.
    """
    rows, chunk, heads, dim = q.shape
    kv_heads, block_size = pages.num_kv_heads, pages.block_size
    group = heads // kv_heads
    dtype = mosaic.compute_dtype(pages.dtype_name, q.dtype)
    out_dtype = q.dtype
    q = q.astype(dtype)
    query_tile = choose_query_tile(group, chunk)
    query_tiles = group // query_tile.heads * -(-chunk // query_tile.tokens)
    statics = _Statics(
        query=query_tile,
        key=choose_key_tile(
            dim, pages.k.dtype.itemsize, query_tiles, stage_in_smem=stage_in_smem
        ),
        query_tiles=query_tiles,
        group=group,
        head_dim=dim,
        block_size=block_size,
        pool_dtype=pages.dtype_name,
        dtype=dtype,
        out_dtype=out_dtype,
        scale=scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
        stage_in_smem=stage_in_smem,
    )
    padding = -chunk % query_tile.tokens
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))

    def flat(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(-1, *leaf.shape[2:])

    inputs = {
        "q": q,
        "page_ids": block_tables * pages.num_layers + jnp.asarray(layer, jnp.int32),
        "context_lens": context_lens,
        "query_lens": query_lens,
        "k": flat(pages.k),
        "v": flat(pages.v),
    }
    if pages.k_scale is not None and pages.v_scale is not None:
        inputs |= {"k_scale": flat(pages.k_scale), "v_scale": flat(pages.v_scale)}

    def entry(*refs: Any) -> None:
        gmem = _Gmem(**dict(zip((*inputs, "out"), refs, strict=True)))
        pl.run_scoped(
            functools.partial(_kernel, statics, gmem), *_scratch(statics), collective_axes="warpgroup"
        )

    out = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        grid=(rows, kv_heads, -(-query_tiles // statics.key.warpgroups)),
        grid_names=("row", "kv_head", "query_pair"),
        num_threads=statics.key.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())
    out = lax.bitcast_convert_type(out, out_dtype)
    return out[:, :chunk]
