"""The public attention ops: checks, then the chosen implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checks import Scale, check_attention, check_static_scales
from pallas_kernels.device import device_kind
from pallas_kernels.dispatch import Implementation, later, run_op
from pallas_kernels.limits import AttentionSizes, why_not_mosaic_for, why_not_mosaic_on
from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.row_by_row import row_by_row
from pallas_kernels.pages import KVPages


def _why_not_mosaic(q: jax.Array, pages: KVPages, *_: Any, **__: Any) -> str | None:
    sizes = AttentionSizes(
        kv_dtype=pages.dtype_name,
        q_dtype=q.dtype.name,
        head_dim=pages.head_dim,
        block_size=pages.block_size,
        group=q.shape[-2] // pages.num_kv_heads,
        kv_heads=pages.num_kv_heads,
        static_scales=pages.static_scales,
    )
    return why_not_mosaic_on(device_kind()) or why_not_mosaic_for(sizes)


_DECODE = {
    "reference": Implementation(row_by_row(reference.paged_decode)),
    "xla": Implementation(row_by_row(xla.paged_decode)),
    "mosaic": Implementation(
        later("pallas_kernels.paged_attention.mosaic.decode", "paged_decode"), _why_not_mosaic
    ),
}
_PREFILL = {
    "reference": Implementation(reference.paged_prefill),
    "xla": Implementation(xla.paged_prefill),
    "mosaic": Implementation(
        later("pallas_kernels.paged_attention.mosaic.prefill", "paged_prefill"), _why_not_mosaic
    ),
}


def paged_decode(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    soft_cap: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    deterministic: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Attend with one query token a row over the row's cached tokens.

    Args:
        q: `[row, head, dim]`, float; head h uses KV head `h // (heads // kv_heads)`.
        pages: the pool; K and V of the query token are already written.
        block_tables: int32 `[row, max_blocks]`; entries of blocks that no query sees, past the
            length or between sinks and window, may be anything.
        context_lens: int32 `[row]`, tokens in the cache, the query's own included.
        layer: which layer; may be traced.
        scale: multiplies the scores; None is `dim ** -0.5`.
        window: attend to the last `window` tokens only; None is all.
        num_sink_tokens: first tokens that stay visible whatever the window.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        k_scale: static scale of this layer's keys, a number or float32 `[kv_head]`, for a pool
            that carries no scales of its own; None for any other.
        v_scale: the same for values.
        deterministic: make a row's bits independent of the other rows: mosaic cuts every row after
            a fixed number of its tokens, the others attend row by row.
        implementation: a name from `available_implementations()`, or None to pick by device.

    Returns:
        `[row, head, dim]` in q's dtype; zeros for a row with context_len 0.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or an unknown implementation.
        UnsupportedError: the named implementation cannot serve them.
    """
    block_tables, context_lens = jnp.asarray(block_tables), jnp.asarray(context_lens)
    check_attention(
        q,
        ("row", "head", "dim"),
        pages,
        block_tables,
        {"context_lens": context_lens},
        layer=layer,
        scale=scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
    )
    scales = check_static_scales(pages, k_scale, v_scale)
    if q.size == 0:
        return q
    out = run_op(
        "paged_decode",
        _DECODE,
        implementation,
        q if scales is None else _scaled(q, scales.k),
        pages,
        block_tables,
        context_lens,
        layer=layer,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
        deterministic=deterministic,
    )
    return out if scales is None else _scaled(out, scales.v).astype(q.dtype)


def paged_prefill(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    layer: int | jax.Array,
    scale: float | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    soft_cap: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attend with a chunk of query tokens a row, each causally over the row's cached tokens.

    Query i of a row stands at position `context_len - query_len + i`.

    Args:
        q: `[row, chunk, head, dim]`, float; entries past `query_lens` are padding.
        pages: the pool; K and V of the query tokens are already written.
        block_tables: int32 `[row, max_blocks]`; entries of blocks that no query sees, past the
            length or between sinks and window, may be anything.
        context_lens: int32 `[row]`, tokens in the cache, the query tokens included.
        query_lens: int32 `[row]`, at most `chunk` and at most `context_lens`.
        layer: which layer; may be traced.
        scale: multiplies the scores; None is `dim ** -0.5`.
        window: attend to the last `window` tokens only; None is all.
        num_sink_tokens: first tokens that stay visible whatever the window.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        k_scale: static scale of this layer's keys, a number or float32 `[kv_head]`, for a pool
            that carries no scales of its own; None for any other.
        v_scale: the same for values.
        implementation: a name from `available_implementations()`, or None to pick by device.

    Returns:
        `[row, chunk, head, dim]` in q's dtype; zeros in the padding.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or an unknown implementation.
        UnsupportedError: the named implementation cannot serve them.
    """
    block_tables, context_lens = jnp.asarray(block_tables), jnp.asarray(context_lens)
    query_lens = jnp.asarray(query_lens)
    check_attention(
        q,
        ("row", "chunk", "head", "dim"),
        pages,
        block_tables,
        {"context_lens": context_lens, "query_lens": query_lens},
        layer=layer,
        scale=scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
    )
    scales = check_static_scales(pages, k_scale, v_scale)
    if q.size == 0:
        return q
    out = run_op(
        "paged_prefill",
        _PREFILL,
        implementation,
        q if scales is None else _scaled(q, scales.k),
        pages,
        block_tables,
        context_lens,
        query_lens,
        layer=layer,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        num_sink_tokens=num_sink_tokens,
        soft_cap=soft_cap,
    )
    return out if scales is None else _scaled(out, scales.v).astype(q.dtype)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply heads, `[..., head, dim]`, by the static scale of their KV head; in float32.

    Scores are linear in K and outputs in V, so the scales of a layer's codes need not be applied to
    each of them: those of K go onto q, before any soft cap, and those of V onto the output.
    """
    each = jnp.repeat(scale, x.shape[-2] // scale.shape[0])
    each = each.reshape((1,) * (x.ndim - 2) + (-1, 1))
    return x.astype(jnp.float32) * each
