"""Checks on the arguments of the public ops: each says what came and what was expected."""

import jax
import jax.numpy as jnp

from pallas_kernels.pages import KV_DTYPES, KVPages, check_index_range


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
    quantised = KV_DTYPES[pages.dtype_name].quantised
    for name in ("k_scale", "v_scale"):
        scale = getattr(pages, name)
        if quantised and (scale is None or scale.shape != shape[:-1]):
            came = "missing" if scale is None else str(list(scale.shape))
            raise ValueError(
                f"pages.{name} is {came}: a {pages.dtype_name} pool needs float32 scales "
                f"[num_blocks, layers, kv_heads, block_size] = {list(shape[:-1])}."
            )
        if not quantised and scale is not None:
            raise ValueError(f"pages.{name} is given: a {pages.dtype_name} pool has no scales.")
    check_index_range(*shape[:-1])


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
