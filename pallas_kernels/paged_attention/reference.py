"""The plain float32 form: gather each row's whole table into contiguous rows, masked softmax.

It reads the padded table and holds every score at once; it is here to be read and compared with.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.products import einsum
from pallas_kernels.pages import KVPages, read_kv


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
    """See `pallas_kernels.paged_prefill`."""
    rows, chunk, heads, dim = q.shape
    kv_heads, block_size = pages.num_kv_heads, pages.block_size
    slots = jnp.clip(block_tables, 0, pages.num_blocks - 1)[:, :, None] * block_size
    slots = (slots + jnp.arange(block_size)).reshape(-1)
    k, v = read_kv(pages, slots, layer=layer)
    k = k.reshape(rows, -1, kv_heads, dim)
    v = v.reshape(rows, -1, kv_heads, dim)

    key_pos = jnp.arange(k.shape[1])
    query_pos = (context_lens - query_lens)[:, None] + jnp.arange(chunk)
    seen = key_pos <= query_pos[:, :, None]  # and so below context_len, as every query is
    if window is not None:
        inside = key_pos > query_pos[:, :, None] - window
        seen &= inside | (key_pos < num_sink_tokens)
    seen &= (jnp.arange(chunk) < query_lens[:, None])[:, :, None]  # [row, chunk, key]
    # 0 * NaN is NaN: what no query may see must leave V itself, not only its weight.
    v = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], v, 0.0)
    grouped = q.astype(jnp.float32).reshape(rows, chunk, kv_heads, heads // kv_heads, dim)
    scores = scale * einsum("rchgd,rkhd->rhgck", grouped, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = seen[:, None, None]
    top = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = einsum("rhgck,rkhd->rchgd", weights, v)
    return out.reshape(q.shape).astype(q.dtype)


def paged_decode(
    q: jax.Array,  # [row, head, dim]
    pages: KVPages,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float,
    window: int | None,
    num_sink_tokens: int,
    soft_cap: float | None,
) -> jax.Array:
    """See `pallas_kernels.paged_decode`."""
    out = paged_prefill(
        q[:, None],
        pages,
        block_tables,
        context_lens,
        jnp.minimum(context_lens, 1),
        layer=layer,
        scale=scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
    )
    return out[:, 0]
