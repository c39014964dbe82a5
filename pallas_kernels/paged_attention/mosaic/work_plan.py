"""How the decode kernel shares its work out: which CTA reads which tiles of which row and KV head.

Plain JAX on lengths, run inside the caller's jit: no host sync, and nothing recompiles when lengths
change. A tile is `TILE` tokens of one row and one KV head. All tiles of a batch form one line,
row by row and head by head, that is cut into equal shares, one a CTA (a persistent grid), so the
spread of lengths does not matter. A CTA's share of one (row, KV head) is a segment; it ends as one
partial output in a slot of its own, and the combine kernel joins the slots of each (row, KV head).

The plan itself is two small arrays, so that it costs few launches; the kernels work the rest out
from them with the same functions that the tests call.

Source: the flat cut is "stream-K" (arXiv 2301.03598) applied to split-KV decoding (Flash-Decoding);
what differs is that the cut is made on the device from the lengths of the live tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64
"""Tokens of a tile: the row side of one `wgmma`."""


class LiveSpan(NamedTuple):
    """The tiles of a row that any query may see; int32, scalars or arrays alike.

    Attributes:
        sink_tiles: tiles that hold the sink tokens, from position 0; 0 where they run into those of
            the window, which then begin at 0.
        start: position where the tiles after those begin, at the start of a page.
        tiles: tiles in all.
        last_sink_page: page that holds the last sink token; -1 without sinks.
        first_page: first page that the window reaches into.
        end_page: the row's last page.
    """

    sink_tiles: int | jax.Array
    start: int | jax.Array
    tiles: jax.Array
    last_sink_page: int
    first_page: int | jax.Array
    end_page: jax.Array

    def position(self, tile: jax.Array) -> jax.Array:
        """Position of a tile's first token."""
        return jnp.where(
            tile < self.sink_tiles, tile * TILE, self.start + (tile - self.sink_tiles) * TILE
        )

    def last_page(self, tile: jax.Array) -> jax.Array:
        """Last page that a tile may read."""
        return jnp.where(tile < self.sink_tiles, self.last_sink_page, self.end_page)

    def live_page(self, page: jax.Array) -> jax.Array:
        """A page itself, or where it lies between the sinks and the window the sinks' last.

        That one is full, since tokens follow it: what stands in for a page is masked by position,
        but must not hold a NaN that nobody wrote.
        """
        if self.last_sink_page < 0:
            return page
        between = (page > self.last_sink_page) & (page < self.first_page)
        return jnp.where(between, self.last_sink_page, page)


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
    start, sink_tiles, first_page, last_sink_page = 0, 0, 0, -1
    if window is not None:
        seen_from = jnp.maximum(context_len - window, 0)
        first_page = _div(seen_from, block_size)
        align = min(block_size, TILE)
        start = _div(seen_from, align) * align
        if num_sink_tokens:
            last_sink_page = (num_sink_tokens - 1) // block_size
            sink_tiles = -(-num_sink_tokens // TILE)
            apart = start > sink_tiles * TILE
            start = jnp.where(apart, start, 0)
            sink_tiles = jnp.where(apart, sink_tiles, 0)
    return LiveSpan(
        sink_tiles=sink_tiles,
        start=start,
        tiles=sink_tiles + _div(context_len - start + (TILE - 1), TILE),
        last_sink_page=last_sink_page,
        first_page=first_page,
        end_page=_div(jnp.maximum(context_len - 1, 0), block_size),
    )


class WorkPlan(NamedTuple):
    """What is worked out from the lengths of a batch; the kernels read it.

    Attributes:
        starts: int32 `[piece + 1]`, tiles of all pieces before each, for one KV head.
        first_items: int32 `[cta + 1]`, where each CTA's share begins.
        share: int32 `[1]`, tiles of a CTA's share.
    """

    starts: jax.Array
    first_items: jax.Array
    share: jax.Array


class Segment(NamedTuple):
    """A CTA's part of one (row, KV head); int32 scalars.

    Attributes:
        row: of the batch.
        head: KV head.
        first_tile: of the row's live tiles.
        tiles: how many; 0 is no work.
        slot: where its partial output goes.
    """

    row: jax.Array
    head: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    slot: jax.Array


class Parts(NamedTuple):
    """Slots that make up one output: `first`, `first + stride`, ...; all of them are written."""

    first: jax.Array
    count: jax.Array
    stride: int


class WorkSharing(NamedTuple):
    """How work is cut; fixed when the kernels compile.

    An item is a (piece, KV head), numbered `piece * kv_heads + head`.

    Attributes:
        rows: rows of the batch.
        kv_heads: KV heads; each has the same tiles.
        num_ctas: CTAs of the grid.
        split_tiles: None cuts wherever the balance wants it: a row is one piece. A number cuts
            every row into pieces of so many of its tiles, and nowhere else, so that its result does
            not depend on other rows.
        max_tiles: most live tiles that a row can have; only used with `split_tiles`.
    """

    rows: int
    kv_heads: int
    num_ctas: int
    split_tiles: int | None = None
    max_tiles: int = 1

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return 1 if self.split_tiles is None else -(-self.max_tiles // self.split_tiles)

    @property
    def num_items(self) -> int:
        """Items of a batch, those without tiles included."""
        return self.rows * self.pieces * self.kv_heads

    @property
    def num_slots(self) -> int:
        """Partial outputs to make room for: a segment begins where an item or a share does."""
        return self.num_items + (self.num_ctas if self.split_tiles is None else 0)

    def plan(self, tiles: jax.Array) -> WorkPlan:
        """Share out the live tiles of each row, int32 `[row]`, of one KV head."""
        lengths = tiles
        if self.split_tiles is not None:
            before = jnp.arange(self.pieces, dtype=jnp.int32) * self.split_tiles
            lengths = jnp.clip(tiles[:, None] - before, 0, self.split_tiles).reshape(-1)
        ends = _cumulative(lengths)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        total = ends[-1] * self.kv_heads
        share = jnp.maximum(_div(total + (self.num_ctas - 1), self.num_ctas), 1)

        # The item that holds the first tile of each share; past the last tile, the item after it.
        wanted = jnp.arange(self.num_ctas + 1, dtype=jnp.int32) * share
        tile = jnp.minimum(wanted, total - 1)
        piece = jnp.sum(ends * self.kv_heads <= tile[:, None], axis=1, dtype=jnp.int32)
        length = jnp.maximum(starts[piece + 1] - starts[piece], 1)
        within = jnp.maximum(tile - starts[piece] * self.kv_heads, 0)
        holds = piece * self.kv_heads + _div(within, length)
        begins = holds
        if self.split_tiles is not None:  # whole items: the first that begins in the share
            begins = piece * self.kv_heads + _div(within + (length - 1), length)
        first_items = jnp.where(wanted < total, begins, jnp.where(total > 0, holds + 1, 0))
        return WorkPlan(starts, first_items, share[None])

    def items(self, plan: WorkPlan, cta: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First item of a CTA, and the one after its last; some may have no tiles in its share."""
        end = plan.first_items[cta + 1]
        if self.split_tiles is None:  # the next share may begin within an item
            end = jnp.minimum(end + 1, self.num_items)
        return plan.first_items[cta], end

    def segment(self, plan: WorkPlan, cta: jax.Array, item: jax.Array) -> Segment:
        """A CTA's part of an item of its own."""
        piece, head = _div(item, self.kv_heads), jax.lax.rem(item, jnp.int32(self.kv_heads))
        before = plan.starts[piece]
        length = plan.starts[piece + 1] - before
        if self.split_tiles is not None:
            row, nth = _div(piece, self.pieces), jax.lax.rem(piece, jnp.int32(self.pieces))
            return Segment(row, head, nth * self.split_tiles, length, item)
        start = before * self.kv_heads + head * length
        share = plan.share[0]
        low = jnp.maximum(start, cta * share)
        high = jnp.minimum(start + length, (cta + 1) * share)
        return Segment(piece, head, low - start, jnp.maximum(high - low, 0), item + cta)

    def parts(self, plan: WorkPlan, output: jax.Array) -> Parts:
        """Slots of output `row * kv_heads + head`."""
        row, head = _div(output, self.kv_heads), jax.lax.rem(output, jnp.int32(self.kv_heads))
        before = plan.starts[row * self.pieces]
        tiles = plan.starts[(row + 1) * self.pieces] - before
        if self.split_tiles is not None:
            count = _div(tiles + (self.split_tiles - 1), self.split_tiles)
            return Parts(row * (self.pieces * self.kv_heads) + head, count, self.kv_heads)
        start, share = before * self.kv_heads + head * tiles, plan.share[0]
        first, last = _div(start, share), _div(start + tiles - 1, share)
        return Parts(output + first, jnp.where(tiles > 0, last - first + 1, 0), 1)


def _cumulative(values: jax.Array) -> jax.Array:
    """Cumulative sum; as one reduction where that is cheaper than several launches."""
    if values.size > 1024:
        return jnp.cumsum(values, dtype=jnp.int32)
    index = jnp.arange(values.size, dtype=jnp.int32)
    return jnp.sum(jnp.where(index <= index[:, None], values, 0), axis=1, dtype=jnp.int32)


def _div(a: jax.Array, b: int | jax.Array) -> jax.Array:
    """Quotient of non-negative int32: `//` adds a branch for signs, which a kernel pays for."""
    b = jnp.asarray(b, jnp.int32)
    return jax.lax.div(a, b if a.ndim == 0 else jnp.broadcast_to(b, a.shape))
