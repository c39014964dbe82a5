"""Paged attention in plain XLA: work follows the live tokens, not the padded table.

Both ops are loops with a dynamic trip count over tiles of keys and an online softmax (Milakov and
Gimelshein, arXiv 1805.02867), so nothing recompiles when lengths change.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.products import einsum
from pallas_kernels.paged_attention.tiles import take_tiles
from pallas_kernels.pages import KVPages

# Unseen scores are -inf and a running maximum starts at the lowest finite number, so that an unseen
# weight is exp(-inf - finite), exactly 0 however low the seen scores lie, and never NaN.
_UNSEEN = -float("inf")
_LOWEST = float(jnp.finfo(jnp.float32).min)
_DEAD = -(1 << 30)  # position of a page that pads a tile

# Decode. Tokens a tile: smaller ones make the dots too small, larger ones pad short rows.
_DECODE_TILE_TOKENS = 64
# float32 bytes of K that one loop iteration gathers: enough to amortise the iteration, little
# enough to stay in a cache.
_DECODE_STEP_BYTES = 384 * 1024
# Up to this group size one matrix-vector product a query head beats a thin matrix product.
_MAX_GEMV_GROUP = 4

# Prefill. Queries of a tile, and keys that one loop iteration takes.
_PREFILL_QUERY_TILE = 64
_PREFILL_KEY_STEP = 64


class _Softmax(NamedTuple):
    """Running state of an online softmax."""

    top: jax.Array  # f32 [..., group], highest score so far
    sums: jax.Array  # f32 [..., group, dim + 1], weighted V and, last, the sum of weights

    def output(self) -> jax.Array:
        """Normalise; zeros where no key was seen."""
        total = self.sums[..., -1:]
        return self.sums[..., :-1] / jnp.where(total > 0, total, 1.0)


def _cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _weights(
    scores: jax.Array,  # f32 [..., query, key], _UNSEEN where unseen
    top: jax.Array,  # f32 [..., query]
) -> jax.Array:
    # Fused with what computes `top`, exp is not vectorised on a CPU: 13 ns each instead of 2.
    return jnp.exp(jax.lax.optimization_barrier(scores - top[..., None]))


def _weigh(
    weights: jax.Array,  # f32 [..., query, key], 0 where unseen
    v: jax.Array,  # f32 [..., key, dim]
    v_scale: jax.Array | None,  # f32 [..., key]
) -> jax.Array:
    scaled = weights if v_scale is None else weights * v_scale[..., None, :]
    out = einsum("...gs,...sd->...gd", scaled, v)
    return jnp.concatenate([out, jnp.sum(weights, axis=-1, keepdims=True)], axis=-1)


# --- decode ---------------------------------------------------------------------------------------


class _DecodePlan(NamedTuple):
    """Every row's last page, and a flat work list of tiles over the pages before it.

    Tiles are sorted by row and each row has at least one, so `n` consecutive tiles touch at most
    `n` consecutive rows.
    """

    last_block: jax.Array  # i32 [row]
    last_position: jax.Array  # i32 [row], of the last page's first token
    row: jax.Array  # i32 [tile]
    block_ids: jax.Array  # i32 [tile, page]
    position: jax.Array  # i32 [tile, page], of each page's first token, or _DEAD
    num_steps: jax.Array  # i32 [], loop iterations that hold live tiles


def _plan_decode(
    block_tables: jax.Array,
    context_lens: jax.Array,
    pages: KVPages,
    window: int | None,
    num_sink_tokens: int,
    *,
    tile_pages: int,
    step_tiles: int,
) -> _DecodePlan:
    """Lay out the work. Window and sinks drop the pages wholly outside before anything is read."""
    rows, width = block_tables.shape
    block_size = pages.block_size
    tables = jnp.clip(block_tables, 0, pages.num_blocks - 1)
    last = jnp.clip((context_lens - 1) // block_size, 0, width - 1)
    first = sinks = jnp.zeros_like(last)
    if window is not None:
        first = jnp.minimum(jnp.maximum(context_lens - window, 0) // block_size, last)
        sinks = jnp.minimum(-(-num_sink_tokens // block_size), first)
    num_pages = sinks + last - first
    end = jnp.cumsum(jnp.maximum(-(-num_pages // tile_pages), 1))

    capacity = rows * max(1, -(-(width - 1) // tile_pages))
    capacity = -(-capacity // step_tiles) * step_tiles
    tile = jnp.arange(capacity, dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= end, axis=1, dtype=jnp.int32)
    live, row = row < rows, jnp.minimum(row, rows - 1)
    start = jnp.where(row > 0, end[jnp.maximum(row - 1, 0)], 0)
    nth = (tile - start)[:, None] * tile_pages + jnp.arange(tile_pages, dtype=jnp.int32)
    alive = live[:, None] & (nth < num_pages[row][:, None])
    # A page that pads a tile repeats the row's last full one, which is in the cache already.
    nth = jnp.clip(nth, 0, jnp.maximum(num_pages - 1, 0)[row][:, None])
    column = jnp.where(nth < sinks[row][:, None], nth, nth + (first - sinks)[row][:, None])
    return _DecodePlan(
        last_block=jnp.take_along_axis(tables, last[:, None], axis=1)[:, 0],
        last_position=last * block_size,
        row=row,
        block_ids=tables[row[:, None], column],
        position=jnp.where(alive, column * block_size, _DEAD),
        num_steps=-(-end[-1] // step_tiles),
    )


def _decode_scores(
    q: jax.Array,  # f32 [tile, kv_head, group, dim]
    k: jax.Array,  # f32 [tile, kv_head, key, dim]
    k_scale: jax.Array | None,
    soft_cap: float | None,
) -> jax.Array:
    group = q.shape[2]
    if group <= _MAX_GEMV_GROUP:
        each = [einsum("thd,thsd->ths", q[:, :, g], k) for g in range(group)]
        scores = jnp.stack(each, axis=2)
    else:
        scores = einsum("thgd,thsd->thgs", q, k)
    if k_scale is not None:
        scores = scores * k_scale[:, :, None]
    return _cap(scores, soft_cap)


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
) -> jax.Array:
    """See `pallas_kernels.paged_decode`.

    Each row's last page, the only one that can hold slots past its length, starts the softmax of
    all rows at once. Full pages follow, `tile_pages` of one row a tile, `step_tiles` an iteration;
    a step's partial results reach their rows through one small matrix product, since a scatter
    would walk them one by one.
    """
    rows, heads, dim = q.shape
    kv_heads, block_size = pages.num_kv_heads, pages.block_size
    group = heads // kv_heads
    tile_pages = max(1, _DECODE_TILE_TOKENS // block_size)
    tile_bytes = tile_pages * block_size * kv_heads * dim * 4
    most = rows * max(1, -(-(block_tables.shape[1] - 1) // tile_pages))
    step_tiles = min(max(1, _DECODE_STEP_BYTES // tile_bytes), most)
    plan = _plan_decode(
        block_tables,
        context_lens,
        pages,
        window,
        num_sink_tokens,
        tile_pages=tile_pages,
        step_tiles=step_tiles,
    )
    queries = (q.astype(jnp.float32) * scale).reshape(rows, kv_heads, group, dim)
    flat_queries = queries.reshape(rows, -1)
    offsets = jnp.arange(block_size, dtype=jnp.int32)

    def visible(position: jax.Array, length: jax.Array) -> jax.Array:
        seen = (position >= 0) & (position < length)
        if window is not None:
            seen &= (position >= length - window) | (position < num_sink_tokens)
        return seen

    # Last pages: [row, ...]. What is unseen must leave V itself, since 0 * NaN is NaN.
    seen = visible(plan.last_position[:, None] + offsets, context_lens[:, None])
    k, k_scale = take_tiles(pages, "k", plan.last_block[:, None], layer)
    v, v_scale = take_tiles(pages, "v", plan.last_block[:, None], layer)
    v = jnp.where(seen[:, None, :, None], v, 0.0)
    v_scale = None if v_scale is None else jnp.where(seen[:, None], v_scale, 1.0)
    seen = seen[:, None, None]
    scores = jnp.where(seen, _decode_scores(queries, k, k_scale, soft_cap), _UNSEEN)
    top = jnp.maximum(jnp.max(scores, axis=-1), _LOWEST)
    state = _Softmax(top, _weigh(_weights(scores, top), v, v_scale))

    span = min(rows, step_tiles)  # rows that one step can touch

    def step(i: jax.Array, state: _Softmax) -> _Softmax:
        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i * step_tiles, step_tiles)

        row, block_ids = part(plan.row), part(plan.block_ids)
        position = part(plan.position)[..., None] + offsets
        low = jnp.minimum(row[0], rows - span)
        local = row - low
        old = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, low, span), state)

        k, k_scale = take_tiles(pages, "k", block_ids, layer)
        v, v_scale = take_tiles(pages, "v", block_ids, layer)
        seen = visible(position, context_lens[row][:, None, None])
        seen = seen.reshape(step_tiles, 1, 1, tile_pages * block_size)
        if window is not None:  # else these pages hold nothing but the row's own tokens
            v = jnp.where(seen[:, :, 0, :, None], v, 0.0)
            v_scale = None if v_scale is None else jnp.where(seen[:, :, 0], v_scale, 1.0)
        asking = jax.lax.optimization_barrier(flat_queries.at[row].get(mode="promise_in_bounds"))
        asking = asking.reshape(step_tiles, kv_heads, group, dim)
        scores = jnp.where(seen, _decode_scores(asking, k, k_scale, soft_cap), _UNSEEN)
        mine = jnp.arange(span, dtype=jnp.int32)[:, None] == local  # [span, tile]
        tops = jnp.where(mine[:, :, None, None], jnp.max(scores, axis=-1), _LOWEST)
        top = jnp.maximum(old.top, jnp.max(tops, axis=1))
        weights = _weights(scores, top.at[local].get(mode="promise_in_bounds"))
        parts = _weigh(weights, v, v_scale)
        # A tile of nothing but padding may have read another row's NaN; and since 0 * NaN is NaN, a
        # row's own must go around the product.
        parts = jnp.where(jnp.any(seen, axis=-1, keepdims=True), parts, 0.0)
        parts = parts.reshape(step_tiles, -1)
        fault = jnp.sum(parts, axis=1) * 0.0  # NaN or 0
        finite = jnp.where(jnp.isfinite(parts), parts, 0.0)
        gathered = einsum("rt,tx->rx", mine.astype(jnp.float32), finite)
        gathered += jnp.sum(jnp.where(mine, fault, 0.0), axis=1, keepdims=True)
        sums = old.sums * jnp.exp(old.top - top)[..., None] + gathered.reshape(old.sums.shape)
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, low, 0),
            state,
            _Softmax(top, sums),
        )

    state = jax.lax.fori_loop(0, plan.num_steps, step, state)
    return state.output().reshape(q.shape).astype(q.dtype)


# --- prefill --------------------------------------------------------------------------------------


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
) -> jax.Array:
    """See `pallas_kernels.paged_prefill`.

    One tile of a row's queries at a time, each over the steps of keys that any of them can see:
    causality, the window and the padding of rows and chunks cost nothing beyond a step.
    """
    rows, chunk, heads, dim = q.shape
    kv_heads, block_size = pages.num_kv_heads, pages.block_size
    group = heads // kv_heads
    tile = min(chunk, _PREFILL_QUERY_TILE)
    tiles = -(-chunk // tile)
    step_pages = min(max(1, _PREFILL_KEY_STEP // block_size), block_tables.shape[1])
    step_keys = step_pages * block_size
    tables = jnp.clip(block_tables, 0, pages.num_blocks - 1)
    queries = jnp.pad(q, ((0, 0), (0, tiles * tile - chunk), (0, 0), (0, 0)))
    queries = queries.reshape(rows * tiles, tile, kv_heads, group, dim)

    def attend(item: jax.Array) -> jax.Array:
        row, nth = item // tiles, item % tiles
        length, num_queries = context_lens[row], query_lens[row]
        chosen = queries[item].astype(jnp.float32) * scale
        chosen = chosen.transpose(1, 2, 0, 3).reshape(kv_heads, group * tile, dim)
        in_chunk = nth * tile + jnp.arange(tile, dtype=jnp.int32)
        query_position = length - num_queries + in_chunk
        real = in_chunk < num_queries

        last = (jnp.minimum(query_position[-1], length - 1)) // step_keys
        first = sinks = jnp.zeros_like(last)
        if window is not None:
            first = jnp.minimum(jnp.maximum(query_position[0] - window + 1, 0) // step_keys, last)
            sinks = jnp.minimum(-(-num_sink_tokens // step_keys), first)
        num_steps = jnp.where(nth * tile < num_queries, sinks + last - first + 1, 0)

        def step(i: jax.Array, state: _Softmax) -> _Softmax:
            number = jnp.where(i < sinks, i, i - sinks + first)
            column = number * step_pages + jnp.arange(step_pages, dtype=jnp.int32)
            block_ids = tables[row, jnp.minimum(column, tables.shape[1] - 1)][None]
            key_position = number * step_keys + jnp.arange(step_keys, dtype=jnp.int32)
            k, k_scale = take_tiles(pages, "k", block_ids, layer)
            v, v_scale = take_tiles(pages, "v", block_ids, layer)
            seen = key_position <= query_position[:, None]  # and so below length
            seen &= real[:, None]
            if window is not None:
                inside = key_position > query_position[:, None] - window
                seen &= inside | (key_position < num_sink_tokens)
            visible = jnp.any(seen, axis=0)  # other slots may hold NaN, and 0 * NaN is NaN
            v = jnp.where(visible[:, None], v[0], 0.0)
            v_scale = None if v_scale is None else jnp.where(visible, v_scale[0], 1.0)
            seen = jnp.tile(seen, (group, 1))  # [group * tile, key]
            scores = einsum("hxd,hsd->hxs", chosen, k[0])
            if k_scale is not None:
                scores = scores * k_scale[0][:, None]
            scores = jnp.where(seen, _cap(scores, soft_cap), _UNSEEN)
            top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
            kept = jnp.exp(state.top - top)[..., None]
            parts = _weigh(_weights(scores, top), v, v_scale)
            return _Softmax(top, state.sums * kept + parts)

        shape = (kv_heads, group * tile)
        empty = _Softmax(
            jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros((*shape, dim + 1), jnp.float32)
        )
        out = jax.lax.fori_loop(0, num_steps, step, empty).output()
        out = out.reshape(kv_heads, group, tile, dim).transpose(2, 0, 1, 3)
        return out.reshape(tile, heads, dim).astype(q.dtype)

    out = jax.lax.map(attend, jnp.arange(rows * tiles, dtype=jnp.int32))
    return out.reshape(rows, tiles * tile, heads, dim)[:, :chunk]
