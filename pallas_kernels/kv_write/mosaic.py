"""`write_kv` as one Mosaic GPU kernel (Hopper): quantise in registers, scatter in place by TMA.

A CTA takes 64 vectors of K or of V, whole tokens with all their heads. Each token arrives by one
TMA copy, is quantised along its heads' vectors, and leaves by one TMA copy into its slot; the
scales follow as scalar stores. Nothing but the slots is touched.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_write.quantise import quantise
from pallas_kernels.pages import KV_DTYPES, KVDtype, KVPages

_TILE_ROWS = 64  # vectors of a CTA: what the register layout below needs
_SMEM_ALIGNMENT = 128  # bytes; where a TMA copy may start
_TMA_BYTES = 16  # a TMA copy's rows are a multiple of this
_MAX_DIM = 256  # elements of a TMA copy along one axis


class _Tile(NamedTuple):
    """How the vectors of some tokens lie in the 64 rows of a CTA."""

    tokens: int
    rows_per_token: int  # its heads, then padding, so that each token starts aligned


def _plan_tile(kv_heads: int, row_bytes: int) -> _Tile | None:
    """Lay tokens out in a tile; None when one token's heads do not fit."""
    rows = 1
    while rows < kv_heads or rows * row_bytes % _SMEM_ALIGNMENT:
        rows *= 2
    return _Tile(_TILE_ROWS // rows, rows) if rows <= _TILE_ROWS else None


def unsupported(
    k: jax.Array, v: jax.Array, pages: KVPages, slot_mapping: jax.Array, *, layer: int | jax.Array
) -> str | None:
    """Why this implementation cannot serve a call, or None."""
    del slot_mapping, layer
    storage = KV_DTYPES[pages.dtype_name]
    if pages.dtype_name == "float32":
        return "the pool is float32; it writes bfloat16, float16 and 8-bit pools"
    if k.dtype != v.dtype:
        return f"k is {k.dtype} and v {v.dtype}; it takes one dtype for both"
    itemsize = storage.dtype.itemsize
    if pages.head_dim * itemsize % _TMA_BYTES or pages.head_dim % 8 or pages.head_dim > _MAX_DIM:
        return (
            f"head_dim is {pages.head_dim}; a {pages.dtype_name} pool needs a multiple of "
            f"{max(8, _TMA_BYTES // itemsize)} up to {_MAX_DIM}"
        )
    if _plan_tile(pages.num_kv_heads, pages.head_dim * itemsize) is None:
        return f"it has {pages.num_kv_heads} KV heads; at most {_TILE_ROWS} fit a tile"
    return None


def write_kv(
    k: jax.Array, v: jax.Array, pages: KVPages, slot_mapping: jax.Array, *, layer: int | jax.Array
) -> KVPages:
    """See `pallas_kernels.write_kv`."""
    tokens, kv_heads, dim = k.shape
    if tokens == 0:
        return pages
    storage = KV_DTYPES[pages.dtype_name]
    tile = _plan_tile(kv_heads, dim * storage.dtype.itemsize)
    assert tile is not None, (kv_heads, dim)
    names = ("k", "v", "k_scale", "v_scale") if storage.quantised else ("k", "v")
    leaves = {name: getattr(pages, name) for name in names}
    # [block, layer, ...] to [page, ...]: a bitcast.
    refs = {name: jax.new_ref(leaf.reshape(-1, *leaf.shape[2:])) for name, leaf in leaves.items()}
    kernel = plgpu.kernel(
        functools.partial(
            _write_tile, tile=tile, storage=storage, layers=pages.num_layers, tokens=tokens
        ),
        kernel_name="write_kv",
        grid=(-(-tokens // tile.tokens), 2),
        grid_names=("tile", "leaf"),
        scratch_types={
            "new_smem": plgpu.SMEM((_TILE_ROWS, dim), k.dtype),
            "stored_smem": plgpu.SMEM((_TILE_ROWS, dim), storage.leaf_dtype),
            "scale_smem": plgpu.SMEM((_TILE_ROWS,), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=tile.tokens),
        },
    )
    kernel(k, v, slot_mapping, jnp.asarray(layer, jnp.int32).reshape(1), refs)
    written = {name: ref[...].reshape(leaves[name].shape) for name, ref in refs.items()}
    return dataclasses.replace(pages, **written)


def _write_tile(
    k: Any,  # [token, kv_head, dim]
    v: Any,
    slot_mapping: Any,  # i32 [token]
    layer: Any,  # i32 [1]
    pool: dict[str, Any],  # [page, kv_head, block_size, dim], scales [page, kv_head, block_size]
    *,
    new_smem: Any,  # [row, dim]
    stored_smem: Any,  # [row, dim]
    scale_smem: Any,  # f32 [row]
    arrived: Any,
    tile: _Tile,
    storage: KVDtype,
    layers: int,
    tokens: int,
) -> None:
    """Write the tokens of one tile into the leaf of K or of V."""
    first = lax.axis_index("tile") * tile.tokens
    for number, (name, new) in enumerate((("k", k), ("v", v))):

        @pl.when(lax.axis_index("leaf") == number)
        def _(name: str = name, new: Any = new) -> None:
            pages, scales = pool[name], pool.get(f"{name}_scale")
            _, kv_heads, block_size, _ = pages.shape

            def rows(i: jax.Array) -> Any:
                return pl.ds(i * tile.rows_per_token, kv_heads)

            @pl.loop(0, tile.tokens)
            def _(i: jax.Array) -> None:
                token = jnp.minimum(first + i, tokens - 1)  # what is past the end is not stored
                plgpu.copy_gmem_to_smem(new.at[token], new_smem.at[rows(i)], arrived)

            plgpu.barrier_wait(arrived)
            _encode(new_smem, stored_smem, scale_smem, storage)
            plgpu.commit_smem()

            @pl.loop(0, tile.tokens)
            def _(i: jax.Array) -> None:
                slot = slot_mapping[jnp.minimum(first + i, tokens - 1)]
                inside = (slot >= 0) & (slot < pages.shape[0] // layers * block_size)

                @pl.when(inside & (first + i < tokens))
                def _() -> None:
                    page = lax.div(slot, block_size) * layers + layer[0]
                    offset = lax.rem(slot, block_size)
                    plgpu.copy_smem_to_gmem(stored_smem.at[rows(i)], pages.at[page, :, offset])
                    if scales is not None:
                        for head in range(kv_heads):
                            scales[page, head, offset] = scale_smem[i * tile.rows_per_token + head]

            plgpu.wait_smem_to_gmem(0)


def _encode(new_smem: Any, stored_smem: Any, scale_smem: Any, storage: KVDtype) -> None:
    """Turn a tile of new vectors into what a leaf holds, and their scales."""
    new = plgpu.load(new_smem, (), layout=plgpu.Layout.WGMMA)
    if not storage.quantised:
        stored_smem[...] = new.astype(storage.dtype)
        return
    codes, scale = quantise(new, storage)
    stored_smem[...] = storage.to_leaf(codes)
    scale_smem[...] = scale
