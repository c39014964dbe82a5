"""How the decode kernel shares its work out: which CTA reads which tiles of which row and KV head.

Plain JAX on lengths, run inside the caller's jit: no host sync, and nothing recompiles when lengths
change. A tile is `TILE` tokens of one row and one KV head. All tiles of a batch form one line,
row by row and head by head, that is cut into equal pieces, one a CTA (a persistent grid), so the
spread of lengths does not matter. A CTA's share of one (row, KV head) is a segment; it ends as one
partial output, and the combine kernel joins the segments of each (row, KV head).

Source: the flat cut is "stream-K" (arXiv 2301.03598) applied to split-KV decoding (Flash-Decoding);
what differs is that the cut is made on the device from the lengths of the live tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64
"""Tokens of a tile: the row side of one `wgmma`."""


class LiveSpan(NamedTuple):
    """The tiles of a row that any query may see; all int32, scalars or arrays alike.

    Attributes:
        sink_tiles: tiles that hold the sink tokens, from position 0.
        start: position where the tiles after those begin, at the start of a page.
        tiles: tiles in all.
    """

    sink_tiles: int | jax.Array
    start: int | jax.Array
    tiles: jax.Array

    def position(self, tile: jax.Array) -> jax.Array:
        """Position of a tile's first token."""
        return jnp.where(
            tile < self.sink_tiles, tile * TILE, self.start + (tile - self.sink_tiles) * TILE
        )

    def end(self, tile: jax.Array, context_len: jax.Array, num_sink_tokens: int) -> jax.Array:
        """Position after the last token that a tile must read."""
        return jnp.where(tile < self.sink_tiles, num_sink_tokens, context_len)


def live_span(
    context_len: jax.Array, *, block_size: int, window: int | None, num_sink_tokens: int
) -> LiveSpan:
    """Cut a row's visible tokens into tiles.

    Args:
        context_len: int32, a scalar or one a row.
        block_size: tokens of a page; the window's tiles start at a page, or at a tile where pages
            are larger.
        window: last tokens that are seen; None is all.
        num_sink_tokens: first tokens that are seen whatever the window.
    """
    start, sink_tiles = 0, 0
    if window is not None:
        align = min(block_size, TILE)
        start = _div(jnp.maximum(context_len - window, 0), align) * align
        tiles = -(-num_sink_tokens // TILE)
        apart = start > tiles * TILE  # else the sinks' tiles and the window's would meet
        sink_tiles = jnp.where(apart, tiles, 0)
        start = jnp.where(apart, start, 0) if num_sink_tokens else start
    return LiveSpan(sink_tiles, start, sink_tiles + _div(context_len - start + (TILE - 1), TILE))


class WorkPlan(NamedTuple):
    """Who reads what.

    Attributes:
        segments: int32 `[segment, 4]`: row, KV head, first tile, number of tiles (0: no work).
        cta_segments: int32 `[cta + 1]`: CTA c owns segments `cta_segments[c]` to
            `cta_segments[c + 1]`.
        parts: int32 `[row * kv_head, 2]`: first segment of each output, and the one after its last;
            each of them has tiles.
    """

    segments: jax.Array
    cta_segments: jax.Array
    parts: jax.Array


def plan_decode(
    tiles: jax.Array,
    *,
    kv_heads: int,
    num_ctas: int,
    split_tiles: int | None = None,
    max_tiles: int = 1,
) -> WorkPlan:
    """Share tiles out over CTAs.

    Args:
        tiles: int32 `[row]`, live tiles of each row, for one KV head.
        kv_heads: KV heads; each has the same tiles.
        num_ctas: CTAs of the grid.
        split_tiles: None cuts wherever the balance wants it. A number cuts every row after so many
            of its own tiles and nowhere else, so that its result does not depend on other rows.
        max_tiles: largest possible entry of `tiles`; only used with `split_tiles`.

    Returns:
        The plan; `segments` has `rows * kv_heads + num_ctas` entries, or with `split_tiles` one for
        each piece of the longest possible rows.
    """
    rows = tiles.shape[0]
    zero = jnp.zeros(1, jnp.int32)
    if split_tiles is None:
        pieces_of_row = jnp.minimum(tiles, 1)
        num_items = rows * kv_heads
    else:
        pieces_of_row = _div(tiles + (split_tiles - 1), split_tiles)
        num_items = rows * kv_heads * -(-max_tiles // split_tiles)

    # Items: pieces of a (row, KV head) that have tiles, numbered without gaps.
    row_items = jnp.concatenate([zero, jnp.cumsum(kv_heads * pieces_of_row, dtype=jnp.int32)])
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = _count_le(row_items[1:], item)
    real = row < rows
    row = jnp.minimum(row, rows - 1)
    pieces = jnp.maximum(pieces_of_row[row], 1)
    nth = item - row_items[row]
    head, piece = _div(nth, pieces), jax.lax.rem(nth, pieces)
    length = tiles[row] if split_tiles is None else jnp.full_like(row, split_tiles)
    first = piece * length
    count = jnp.where(real, jnp.minimum(length, tiles[row] - first), 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    start = end - count
    per_cta = jnp.maximum(_div(end[-1] + (num_ctas - 1), num_ctas), 1)

    cta = jnp.arange(num_ctas, dtype=jnp.int32)
    # The item that holds a CTA's first tile; with whole items, the first that begins in its share.
    before = (
        _count_le(end, cta * per_cta) if split_tiles is None else _count_lt(start, cta * per_cta)
    )
    first_item = jnp.minimum(before, row_items[-1])
    output = jnp.arange(rows * kv_heads, dtype=jnp.int32)
    output_row = _div(output, kv_heads)
    output_pieces = pieces_of_row[output_row]
    output_item = row_items[output_row] + jax.lax.rem(output, kv_heads) * output_pieces

    if split_tiles is not None:
        segments = jnp.stack([row, head, first, count], axis=1)
        cta_segments = jnp.concatenate([first_item, row_items[-1:]])
        parts = jnp.stack([output_item, output_item + output_pieces], axis=1)
        return WorkPlan(segments, cta_segments, parts)

    # A segment begins where an item or a CTA's share does: numbered item + CTA, it is unique, and
    # those of one item follow each other. Where both begin at once, one number has no tiles.
    cta_segments = jnp.concatenate([first_item + cta, row_items[-1:] + num_ctas])
    segment = jnp.arange(num_items + num_ctas, dtype=jnp.int32)
    owner = _count_le(cta_segments[1:], segment)
    of_item = jnp.minimum(segment - owner, num_items - 1)
    low = jnp.maximum(start[of_item], owner * per_cta)
    high = jnp.minimum(end[of_item], (owner + 1) * per_cta)
    used = (segment - owner < num_items) & (owner < num_ctas)
    segments = jnp.stack(
        [
            row[of_item],
            head[of_item],
            first[of_item] + low - start[of_item],
            jnp.where(used, jnp.maximum(high - low, 0), 0),
        ],
        axis=1,
    )
    at = jnp.minimum(output_item, num_items - 1)
    part_start = output_item + _div(start[at], per_cta)
    part_end = output_item + _div(end[at] - 1, per_cta) + 1
    part_end = jnp.where(output_pieces > 0, part_end, part_start)
    return WorkPlan(segments, cta_segments, jnp.stack([part_start, part_end], axis=1))


def _count_le(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """How many entries are ≤ each value: a search in one fused kernel instead of a loop."""
    return jnp.sum(ascending[None, :] <= values[:, None], axis=1, dtype=jnp.int32)


def _count_lt(ascending: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.sum(ascending[None, :] < values[:, None], axis=1, dtype=jnp.int32)


def _div(a: jax.Array, b: int | jax.Array) -> jax.Array:
    """Quotient of non-negative int32: `//` adds a branch for signs, which a kernel pays for."""
    b = jnp.asarray(b, jnp.int32)
    return jax.lax.div(a, b if a.ndim == 0 else jnp.broadcast_to(b, a.shape))
