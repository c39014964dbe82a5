"""What a CTA of the Mosaic prefill kernel is made of and which keys it reads: no kernel code here.

Sizes are chosen when the kernel is traced. Spans are int32 scalars of one CTA; the functions of
them are plain arithmetic, inside a kernel or out of it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import mosaic

ROWS = 64
"""Query rows of a tile: what the matrix instruction of one warpgroup takes."""

_SMEM_RESERVED = 1024  # barriers
_MAX_STAGES = 4

# --- sizes ----------------------------------------------------------------------------------------


class QueryTile(NamedTuple):
    """What the rows of a query tile hold.

    Attributes:
        heads: query heads, a divisor of the group.
        tokens: consecutive tokens of each, a power of two and at least 8, as the tiles of shared
            memory are 8 rows high. Row `head * tokens + token`.
    """

    heads: int
    tokens: int


class CtaLayout(NamedTuple):
    """Warpgroups and shared memory of a CTA.

    Attributes:
        keys: tokens of a key tile.
        pass_keys: as many of them as a compute warpgroup takes at a time.
        warpgroups: compute warpgroups, each with a query tile of its own.
        stages: 16-bit tiles of keys, and of values.
        code_stages: 8-bit ones that wait to be widened; 0 for 16-bit pools.
        registers: of a thread of the memory warpgroup and of the compute warpgroups. An SM has 512
            for each of 128 threads: three warpgroups start with 168 apiece and shift some; of two,
            each has all it can use (None).
        smem_bytes: bytes that all of it takes, alignment included.
    """

    keys: int
    pass_keys: int
    warpgroups: int
    stages: int
    code_stages: int
    registers: tuple[int, int] | None
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


def choose_layout(
    head_dim: int, itemsize: int, query_tiles: int, *, stage_in_smem: bool = False
) -> CtaLayout:
    """Pick the largest key tiles whose arithmetic fits the registers, then the most stages.

    A compute thread holds `(head_dim + keys) / 2` accumulators, `keys / 4` packed weights and, for
    an 8-bit pool, `keys / 4` scales at a time.

    Args:
        head_dim: width of a head.
        itemsize: bytes of a stored value, 1 or 2; 1 means quantised.
        query_tiles: query tiles that one row and KV head has.
        stage_in_smem: whether the weights go through shared memory too.
    """
    quantised = itemsize == 1
    keys = 64 if quantised or head_dim > 128 else 128
    pass_keys = 32 if head_dim > 128 else keys
    for warpgroups in (2, 1) if query_tiles > 1 else (1,):
        registers = _split_registers(head_dim, quantised) if warpgroups == 2 else None
        for stages in range(2 if quantised else _MAX_STAGES, 1, -1):
            for code_stages in (2, 1) if quantised else (0,):
                used = _smem_bytes(head_dim, keys, warpgroups, stages, code_stages, stage_in_smem)
                if used <= mosaic.MAX_SMEM_BYTES:
                    return CtaLayout(
                        keys, pass_keys, warpgroups, stages, code_stages, registers, used
                    )
    raise AssertionError(f"no layout for head_dim={head_dim}, itemsize={itemsize}")


def _split_registers(head_dim: int, quantised: bool) -> tuple[int, int]:
    """Found by compiling every variant: these are the splits at which none spills."""
    if quantised:
        return 104, 200
    return (40, 232) if head_dim > 128 else (72, 216)


def _smem_bytes(
    head_dim: int, keys: int, warpgroups: int, stages: int, code_stages: int, stage_in_smem: bool
) -> int:
    tile = keys * head_dim
    arrays = [warpgroups * ROWS * head_dim * 2, *[stages * tile * 2] * 2, warpgroups * keys * 4]
    if code_stages:
        arrays += [code_stages * tile] * 2 + [code_stages * keys * 4] * 2 + [stages * keys * 4] * 3
    if stage_in_smem:
        arrays.append(warpgroups * ROWS * keys * 2)  # or less
    return sum(map(mosaic.smem_bytes, arrays)) + _SMEM_RESERVED


class PrefillStatic(NamedTuple):
    """Everything the kernel body knows when it is traced."""

    query: QueryTile
    layout: CtaLayout
    query_tiles: int  # of a row and KV head
    group: int
    head_dim: int
    block_size: int
    pool_dtype: str
    dtype: np.dtype  # of the matrix unit's operands
    out_dtype: np.dtype
    scale: float
    window: int | None
    num_sink_tokens: int
    soft_cap: float | None
    stage_in_smem: bool

    @property
    def quantised(self) -> bool:
        """Whether the pool holds codes and scales."""
        return self.layout.code_stages > 0

    @property
    def score_factor(self) -> float:
        """What q·k is multiplied by: the scale, in units of log2 unless a cap comes between."""
        return mosaic.score_factor(self.scale, self.soft_cap)

    @property
    def value_swizzle(self) -> int:
        """Bytes; a product sums over whole swizzles, so no more than the keys of a pass fill."""
        return mosaic.widest_swizzle(math.gcd(self.head_dim, self.layout.pass_keys) * 2) or 0

    @property
    def subgroups(self) -> int:
        """Query tiles that the heads of a group fill, for the same tokens."""
        return self.group // self.query.heads

    @property
    def copy_tokens(self) -> int:
        """Tokens of one copy: a page, or the part of it that fills a tile."""
        return min(self.block_size, self.layout.keys)

    @property
    def copies(self) -> int:
        """Copies that fill a key tile."""
        return self.layout.keys // self.copy_tokens


# --- which keys -----------------------------------------------------------------------------------


class Span(NamedTuple):
    """The queries of a CTA, or of one of its query tiles, and the key tiles they can see.

    Key tiles are numbered by position from the start of the row. A CTA takes `sink_tiles` of them
    from 0 on, then the others from `first_tile` on.
    """

    length: jax.Array  # tokens of the row
    first_query: jax.Array  # position
    last_query: jax.Array
    first_page: jax.Array  # where the window of the first query starts
    sink_tiles: jax.Array
    first_tile: jax.Array
    num_tiles: jax.Array

    def tile(self, step: jax.Array) -> jax.Array:
        """Number of the key tile of a step."""
        return jnp.where(step < self.sink_tiles, step, step - self.sink_tiles + self.first_tile)


def find_span(
    static: PrefillStatic, length: jax.Array, queries: jax.Array, first: jax.Array, end: jax.Array
) -> Span:
    """Span of a row's queries from `first` up to `end`, of which `queries` are real.

    No tiles where none of them is.
    """
    keys = jnp.int32(static.layout.keys)
    end = jnp.minimum(end, queries)
    first_query, last_query = length - queries + first, length - queries + end - 1
    seen_from = first_tile = sink_tiles = jnp.int32(0)
    if static.window is not None:
        seen_from = jnp.maximum(first_query - (static.window - 1), 0)
        first_tile = lax.div(seen_from, keys)
        sink_tiles = jnp.minimum(-(-static.num_sink_tokens // static.layout.keys), first_tile)
    num_tiles = sink_tiles + lax.div(last_query, keys) + 1 - first_tile
    return Span(
        length=length,
        first_query=first_query,
        last_query=last_query,
        first_page=lax.div(seen_from, jnp.int32(static.block_size)),
        sink_tiles=sink_tiles,
        first_tile=first_tile,
        num_tiles=jnp.where(first < end, num_tiles, 0),
    )


def page_columns(
    static: PrefillStatic, span: Span, step: jax.Array, max_blocks: int
) -> list[jax.Array]:
    """Columns of the block table that a step's tile is filled from, one a copy.

    A page that no query sees is replaced by one that some query does, so that nothing else is read.
    """
    block_size = jnp.int32(static.block_size)
    last_page = jnp.minimum(lax.div(span.length - 1, block_size), max_blocks - 1)
    last_sink_page = (static.num_sink_tokens - 1) // static.block_size  # -1 without sinks
    start = span.tile(step) * static.layout.keys
    columns = []
    for nth in range(static.copies):
        column = lax.div(start + nth * static.copy_tokens, block_size)
        if static.window is not None:
            unseen = (column > last_sink_page) & (column < span.first_page)
            # The last sink page is whole where it stands in: the window starts in a later tile.
            stand_in = jnp.where(step < span.sink_tiles, max(last_sink_page, 0), span.first_page)
            column = jnp.where(unseen, stand_in, column)
        columns.append(jnp.minimum(column, last_page))
    return columns


def may_hold_anything(static: PrefillStatic, span: Span, tile: jax.Array) -> jax.Array:
    """Whether a tile has slots past the row's length; true of a row's last tile only, if at all."""
    return (tile + 1) * static.layout.keys > span.length


def is_kept(static: PrefillStatic, span: Span, position: jax.Array) -> jax.Array:
    """Whether the slots at these positions hold a token, read from its own page."""
    kept = position < span.length
    if static.window is not None:
        sinks_end = -(-static.num_sink_tokens // static.block_size) * static.block_size
        kept &= (position < sinks_end) | (position >= span.first_page * static.block_size)
    return kept
