"""Keys quantised per channel: one scale for a block's keys in each layer, KV head and dimension.

The keys of a model have a few dimensions that are large in every token. A scale of a token's whole
head has to cover them, at the cost of all the others; a scale of a dimension does not. It can only
be found when the block is full. Until then the keys of the block stay in full precision, outside
the block, in the row of their request.

A query sees the keys of its own block, up to itself, in full precision, and those of earlier blocks
quantised, however its tokens came to be computed. So the output does not depend on chunks, batches,
preemption or shared blocks.

Source: KIVI (arXiv 2402.02750): keys per channel, values per token, the latest keys exact. Here a
group of tokens is a block, codes are symmetric, and what stays exact is the open block.
Assumes: the large dimensions of keys stay the same for as long as a block.
Cost: `head_dim` scales a block and KV head, as much as a scale a token where a block has `head_dim`
tokens; one block of keys in full precision for each row, layer group and layer. Attention reads the
whole width of a row's table, row by row: made to be right, not to be fast.
"""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels import KV_DTYPES
from pallas_kernels.kv_write.quantise import quantise
from pallas_kernels.paged_attention.products import einsum
from pallas_kernels.pages import check_index_range
from paxkv.cache.groups import Span
from paxkv.cache.layout import KVLayout, storage_dtype

Index = int | jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChannelBlocks:
    """The part of the cache that lies in blocks: every leaf has the block axis first.

    Attributes:
        k: Codes of keys, `[block, place, kv_head, block_size, head_dim]` as in `KVPages`; those of
            a block that was never full mean nothing.
        v: Codes of values, the same shape.
        k_scale: float32 `[block, place, kv_head, head_dim]`.
        v_scale: float32 `[block, place, kv_head, block_size]`.
        kv_dtype: Storage type by name, a key of `pallas_kernels.KV_DTYPES`.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array
    kv_dtype: str = field(metadata={"static": True})

    def read(self, block_ids: jax.Array, place: Index) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of blocks, float32 `[block, kv_head, block_size, head_dim]`.

        Args:
            block_ids: int32 `[block]`, within the pool.
            place: Of the layer in a block.
        """
        storage = KV_DTYPES[self.kv_dtype]
        k = storage.widen(self.k[block_ids, place]) * self.k_scale[block_ids, place, :, None]
        v = storage.widen(self.v[block_ids, place]) * self.v_scale[block_ids, place, ..., None]
        return k, v


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChannelPages:
    """A cache with keys quantised per channel.

    Attributes:
        blocks: What is swapped, copied and shared.
        open: The keys of each row's last block while it is not full, in the model's dtype:
            `[row, group, place, kv_head, block_size, head_dim]`. They leave with the row.
    """

    blocks: ChannelBlocks
    open: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Where the tokens of a step stand; the same for all layers.

    Attributes:
        rows: int32 `[row]`, the rows of the scheduler's batch.
        before: int32 `[row]`, tokens in the cache before the step.
        after: int32 `[row]`, tokens in the cache after it; 0 for padding.
        row: int32 `[token]`, which of the rows a token belongs to: those of row 0 first.
        position: int32 `[token]`, 0 or more.
        valid: bool `[token]`, False for padding.
        queries: int32 `[query row, query]`, the tokens whose queries attention takes together;
            anything within the tokens for padding.
    """

    rows: jax.Array
    before: jax.Array
    after: jax.Array
    row: jax.Array
    position: jax.Array
    valid: jax.Array
    queries: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ExactKeys:
    """One layer's keys in full precision in a step: new ones, and those of blocks left open before.

    Attributes:
        tokens: Where the new ones stand.
        new: `[token, kv_head, head_dim]`.
        held: `[row, kv_head, block_size, head_dim]`, of the block in which a row's step begins.
    """

    tokens: StepTokens
    new: jax.Array
    held: jax.Array

    def of_blocks(self, token: jax.Array) -> jax.Array:
        """Return the keys of tokens' own blocks; what comes after the token is anything.

        Args:
            token: int32 `[n]`, numbers of tokens of the step.

        Returns:
            `[n, kv_head, block_size, head_dim]`.
        """
        tokens, block_size = self.tokens, self.held.shape[2]
        position, row = tokens.position[token], tokens.row[token]
        ahead = jnp.arange(block_size) - (position % block_size)[:, None]  # [n, block_size]
        is_new = position[:, None] + ahead >= tokens.before[row][:, None]
        number = jnp.clip(token[:, None] + ahead, 0, self.new.shape[0] - 1)
        new = self.new[number].swapaxes(1, 2)
        return jnp.where(is_new[:, None, :, None], new, self.held[row])


def init_channel_pages(
    num_blocks: int, layout: KVLayout, *, num_rows: int, num_groups: int
) -> ChannelPages:
    """Allocate an all-zero cache.

    Raises:
        ValueError: No rows, or a pool too large for int32 indices.
    """
    if num_rows < 1:
        raise ValueError(
            f"num_rows={num_rows}: keys quantised per channel need a place for the open block of "
            "each row, so at least 1."
        )
    places, heads, dim = layout.num_layers, layout.num_kv_heads, layout.head_dim
    check_index_range(num_blocks, places, heads, layout.block_size)
    storage = KV_DTYPES[layout.kv_dtype]
    lead = (num_blocks, places, heads)
    codes = (*lead, layout.block_size, storage.leaf_dim(dim))
    assert layout.open_dtype is not None
    return ChannelPages(
        blocks=ChannelBlocks(
            k=jnp.zeros(codes, storage.leaf_dtype),
            v=jnp.zeros(codes, storage.leaf_dtype),
            k_scale=jnp.ones((*lead, dim), jnp.float32),
            v_scale=jnp.ones((*lead, layout.block_size), jnp.float32),
            kv_dtype=layout.kv_dtype,
        ),
        open=jnp.zeros(
            (num_rows, num_groups, places, heads, layout.block_size, dim),
            storage_dtype(layout.open_dtype),
        ),
    )


def exact_keys(
    k: jax.Array, cache: ChannelPages, tokens: StepTokens, group: Index, place: Index
) -> ExactKeys:
    """Collect a layer's keys in full precision; before the step writes its own.

    Args:
        k: The step's keys, `[token, kv_head, head_dim]`.
        cache: Only read.
        tokens: Where they stand.
        group: Of the layer.
        place: Of the layer in a block.
    """
    # The barrier makes XLA read them once and now: read again where they are needed, after the step
    # has written its own, they would make it keep a copy of all rows.
    held = jax.lax.optimization_barrier(cache.open[tokens.rows, group, place])
    return ExactKeys(tokens=tokens, new=k.astype(held.dtype), held=held)


def write_channel(
    v: jax.Array, cache: ChannelPages, keys: ExactKeys, slots: jax.Array, group: Index, place: Index
) -> ChannelPages:
    """Write values, the keys of blocks that the step fills, and those of blocks it leaves open.

    Args:
        v: `[token, kv_head, head_dim]`.
        cache: Consumed.
        keys: The step's.
        slots: int32 `[token]`, -1 for padding.
        group: Of the layer.
        place: Of the layer in a block.
    """
    blocks, tokens = cache.blocks, keys.tokens
    storage = KV_DTYPES[blocks.kv_dtype]
    num_blocks, block_size = blocks.k.shape[0], blocks.k.shape[3]
    # Out of range on purpose where nothing is to be written: mode="drop" skips those.
    block = jnp.where(slots < 0, num_blocks, slots // block_size)
    offset = tokens.position % block_size
    v_codes, v_scale = quantise(v, storage)

    last = _block_ends(tokens, block_size)
    full = keys.of_blocks(jnp.minimum(last, len(slots) - 1))
    k_codes, k_scale = quantise(full.swapaxes(2, 3), storage)  # along the tokens of a channel
    filled = jnp.take(block, last, mode="fill", fill_value=num_blocks)

    # Each row keeps the block of its last token, and reads nothing of it where that was full.
    last_of_row = jnp.cumsum(tokens.after - tokens.before) - 1
    open_row = jnp.where(tokens.after > 0, tokens.rows, cache.open.shape[0])
    left_open = keys.of_blocks(jnp.clip(last_of_row, 0, len(slots) - 1))
    return ChannelPages(
        blocks=dataclasses.replace(
            blocks,
            k=blocks.k.at[filled, place].set(storage.to_leaf(k_codes.swapaxes(2, 3)), mode="drop"),
            k_scale=blocks.k_scale.at[filled, place].set(k_scale, mode="drop"),
            v=blocks.v.at[block, place, :, offset].set(storage.to_leaf(v_codes), mode="drop"),
            v_scale=blocks.v_scale.at[block, place, :, offset].set(v_scale, mode="drop"),
        ),
        open=cache.open.at[open_row, group, place].set(left_open, mode="drop"),
    )


def attend_channel(
    q: jax.Array,
    cache: ChannelPages,
    keys: ExactKeys,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    place: Index,
    span: Span,
    scale: float | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attend with a chunk of queries a row, as `paged_prefill` does; one row after the other.

    Args:
        q: `[query row, query, head, dim]`.
        cache: The step is written; only read.
        keys: The step's.
        block_tables: int32 `[query row, max_blocks]`.
        context_lens: int32 `[query row]`, tokens up to the row's last query.
        query_lens: int32 `[query row]`; 0 for padding.
        place: Of the layer in a block.
        span: What the tokens of the layer see.
        scale: Multiplies the scores; None is `dim ** -0.5`.
        soft_cap: Bound of the scores; None is none.

    Returns:
        As q; zeros for padding.
    """
    blocks = cache.blocks
    chunk, heads, dim = q.shape[1:]
    kv_heads, block_size = blocks.k.shape[2:4]
    width = block_tables.shape[1]
    number = jnp.arange(width * block_size).reshape(width, block_size)

    def row(of_row: tuple[jax.Array, ...]) -> jax.Array:
        q, table, context_len, query_len, tokens = of_row
        position = context_len - query_len + jnp.arange(chunk)
        seen = _seen(number, position, jnp.arange(chunk) < query_len, span)
        k, v = blocks.read(jnp.clip(table, 0, blocks.k.shape[0] - 1), place)
        # 0 * NaN is NaN: what no query may see must leave V itself, not only its weight.
        v = jnp.where(jnp.any(seen, axis=0)[:, None, :, None], v, 0.0)
        grouped = q.astype(jnp.float32).reshape(chunk, kv_heads, heads // kv_heads, dim)
        own = keys.of_blocks(tokens).astype(jnp.float32)
        own_scores = einsum("chgd,chsd->chgs", grouped, own)
        scores = einsum("chgd,bhsd->chgbs", grouped, k)
        is_own = jnp.arange(width) == (position // block_size)[:, None]  # [query, block]
        scores = jnp.where(is_own[:, None, None, :, None], own_scores[:, :, :, None], scores)
        weights = _softmax(
            scores, seen[:, None, None], dim**-0.5 if scale is None else scale, soft_cap
        )
        return einsum("chgbs,bhsd->chgd", weights, v).reshape(chunk, heads, dim)

    out = jax.lax.map(row, (q, block_tables, context_lens, query_lens, keys.tokens.queries))
    return out.astype(q.dtype)


def _block_ends(tokens: StepTokens, block_size: int) -> jax.Array:
    """Return the tokens that fill a block, int32 `[n]`; past the tokens where there are fewer."""
    count = len(tokens.position)
    most = min(count, count // block_size + len(tokens.rows))
    ends = tokens.valid & (tokens.position % block_size == block_size - 1)
    return jnp.nonzero(ends, size=most, fill_value=count)[0]


def _seen(number: jax.Array, position: jax.Array, valid: jax.Array, span: Span) -> jax.Array:
    """Return which places of a table `[block, block_size]` queries see, bool `[query, ...]`."""
    position = position[:, None, None]
    seen = number <= position
    if span.window is not None:
        seen &= (number > position - span.window) | (number < span.num_sink_tokens)
    return seen & valid[:, None, None]


def _softmax(scores: jax.Array, seen: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Return weights over the last two axes; zeros where nothing is seen."""
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    top = jnp.max(scores, axis=(-2, -1), keepdims=True, where=seen, initial=-jnp.inf)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=(-2, -1), keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)
