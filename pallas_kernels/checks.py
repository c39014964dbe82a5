"""Checks on the arguments of the public ops: each says what came and what was expected."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.pages import KV_DTYPES, KVPages, check_index_range

type Scale = float | np.ndarray | jax.Array
"""A static scale: one number of a layer, or float32 `[kv_head]`."""


class StaticScales(NamedTuple):
    """Static scales of one layer, float32 `[kv_head]` each."""

    k: jax.Array
    v: jax.Array


def check_pages(pages: KVPages) -> None:
    """Refuse a pool whose leaves do not fit together or that int32 cannot index."""
    shape = pages.k.shape
    if len(shape) != 5:
        raise ValueError(
            f"pages.k{list(shape)}: expected [num_blocks, layers, kv_heads, block_size, head_dim]."
        )
    if pages.dtype_name not in KV_DTYPES:
        raise TypeError(
            f"pages.k is {pages.dtype_name}: a KV pool stores one of {', '.join(KV_DTYPES)}."
        )
    leaf_dtype = KV_DTYPES[pages.dtype_name].leaf_dtype
    if pages.k.dtype != leaf_dtype:
        raise TypeError(
            f"pages.k is {pages.k.dtype}: a {pages.dtype_name} pool holds {leaf_dtype}, as "
            "init_pages makes it."
        )
    if pages.v.shape != shape or pages.v.dtype != pages.k.dtype:
        raise ValueError(
            f"pages.v is {pages.v.dtype}{list(pages.v.shape)}: expected that of pages.k, "
            f"{pages.k.dtype}{list(shape)}."
        )
    bare = pages.k_scale is None and pages.v_scale is None
    for name in ("k_scale", "v_scale"):
        scale = getattr(pages, name)
        if pages.quantised and not bare and (scale is None or scale.shape != shape[:-1]):
            came = "missing" if scale is None else str(list(scale.shape))
            raise ValueError(
                f"pages.{name} is {came}: a {pages.dtype_name} pool needs float32 scales "
                f"[num_blocks, layers, kv_heads, block_size] = {list(shape[:-1])} for K and V, or "
                "neither."
            )
        if not pages.quantised and scale is not None:
            raise ValueError(f"pages.{name} is given: a {pages.dtype_name} pool has no scales.")
    check_index_range(*shape[:-1])


def why_not_scale(scale: Scale) -> str | None:
    """Why values cannot be scales of codes, or None: the one place that says so.

    Args:
        scale: numbers that are known, not traced.
    """
    values = np.asarray(scale, np.float32)
    bad = values[~(np.isfinite(values) & (values > 0))]
    return f"{bad.flat[0]} is no scale: must be positive and finite" if bad.size else None


def check_static_scales(
    pages: KVPages, k_scale: Scale | None, v_scale: Scale | None
) -> StaticScales | None:
    """Refuse static scales that are missing, not wanted, or no scales; traced ones are trusted.

    Returns:
        Them for each KV head, or None for a pool that has none.
    """
    made = {}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if pages.static_scales:
                raise ValueError(
                    f"{name} is missing: a {pages.dtype_name} pool without scales of its own needs "
                    f"{name} of the layer, a number or float32 [kv_head]."
                )
            continue
        if not pages.static_scales:
            why = "carries a scale a token and head" if pages.quantised else "is not quantised"
            raise ValueError(f"{name} is given: this {pages.dtype_name} pool {why}.")
        if not isinstance(scale, Tracer) and (reason := why_not_scale(scale)):
            raise ValueError(f"{name}: {reason}.")
        array = jnp.asarray(scale, jnp.float32)
        if array.ndim:
            check_shape(name, array, {"kv_head": pages.num_kv_heads})
        made[name[0]] = jnp.broadcast_to(array, (pages.num_kv_heads,))
    return StaticScales(**made) if made else None


def check_shape(name: str, x: jax.Array, axes: dict[str, int | None]) -> None:
    """Refuse an array whose shape is not the one named; None leaves an axis free."""
    sizes = tuple(axes.values())
    if x.ndim != len(sizes) or any(
        want not in (None, got) for want, got in zip(sizes, x.shape, strict=False)
    ):
        numbers = ", ".join(axis if size is None else str(size) for axis, size in axes.items())
        raise ValueError(
            f"{name} has shape {list(x.shape)}: expected [{', '.join(axes)}] = [{numbers}]."
        )


def check_float(name: str, x: jax.Array) -> None:
    """Refuse anything but float32, float16 and bfloat16."""
    if x.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise TypeError(f"{name} is {x.dtype}: expected float32, float16 or bfloat16.")


def check_int32(name: str, x: jax.Array) -> None:
    """Refuse anything but int32."""
    if x.dtype != jnp.int32:
        raise TypeError(f"{name} is {x.dtype}: expected int32.")


def check_layer(layer: int | jax.Array, pages: KVPages) -> None:
    """Refuse a layer outside the pool; a traced one cannot be checked."""
    if isinstance(layer, int) and not 0 <= layer < pages.num_layers:
        raise ValueError(f"layer={layer}: the pool has layers 0 to {pages.num_layers - 1}.")


def check_attention(
    q: jax.Array,
    q_axes: tuple[str, ...],
    pages: KVPages,
    block_tables: jax.Array,
    lengths: dict[str, jax.Array],
    *,
    layer: int | jax.Array,
    scale: float | None,
    window: int | None,
    num_sink_tokens: int,
    soft_cap: float | None,
) -> None:
    """Check what both attention ops share; `q_axes` are `row, ..., head, dim`."""
    check_pages(pages)
    check_shape("q", q, {**dict.fromkeys(q_axes), "dim": pages.head_dim})
    check_float("q", q)
    rows, heads = q.shape[0], q.shape[-2]
    if heads % pages.num_kv_heads:
        raise ValueError(
            f"q has {heads} heads: expected a multiple of the pool's {pages.num_kv_heads} KV heads."
        )
    check_shape("block_tables", block_tables, {"row": rows, "max_blocks": None})
    check_int32("block_tables", block_tables)
    if block_tables.shape[1] < 1:
        raise ValueError("block_tables has max_blocks 0: expected at least 1.")
    for name, array in lengths.items():
        check_shape(name, array, {"row": rows})
        check_int32(name, array)
    check_layer(layer, pages)
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1 token, or None for no window.")
    if num_sink_tokens < 0:
        raise ValueError(f"num_sink_tokens={num_sink_tokens}: must be at least 0.")
    for name, value in (("soft_cap", soft_cap), ("scale", scale)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value}: must be positive and finite, or None.")
