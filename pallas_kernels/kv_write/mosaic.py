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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_write.quantise import quantise
from pallas_kernels.mosaic import page_leaves, swizzled
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
    # A ref of a donated pool is the pool itself, within a scan too: nothing is copied.
    refs = {name: jax.new_ref(leaf) for name, leaf in page_leaves(pages).items()}
    scratch = {
        "arrived": plgpu.Barrier(num_arrivals=tile.tokens),
        "slot_smem": plgpu.SMEM((tile.tokens,), jnp.int32),
        "new_smem": _tile_smem(dim, k.dtype, kv_heads),
    }
    if k.dtype != storage.dtype:
        scratch["stored_smem"] = _tile_smem(dim, storage.leaf_dtype, kv_heads)
    if storage.quantised:
        scratch["scale_smem"] = plgpu.SMEM((_TILE_ROWS,), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_write_tile, tile=tile, storage=storage, num_layers=pages.num_layers),
        kernel_name="write_kv",
        grid=(-(-tokens // tile.tokens), 2),
        grid_names=("tile", "leaf"),
        scratch_types=scratch,
    )
    kernel(k, v, slot_mapping, jnp.asarray(layer, jnp.int32).reshape(1), refs)
    written = {name: ref[...].reshape(getattr(pages, name).shape) for name, ref in refs.items()}
    return dataclasses.replace(pages, **written)


def _tile_smem(dim: int, dtype: np.dtype, kv_heads: int) -> Any:
    """Shared memory for a tile, of which TMA copies the heads of one token at a time.

    Swizzled, against bank conflicts, where those heads are whole groups of 8 rows. It is said, not
    left to Mosaic GPU to infer: for some sizes that took minutes.
    """
    if kv_heads % 8 == 0:
        return swizzled(_TILE_ROWS, dim, dtype=dtype)
    return plgpu.SMEM((_TILE_ROWS, dim), dtype)


def _write_tile(
    k: Any,  # [token, kv_head, dim]
    v: Any,
    slot_mapping: Any,  # i32 [token]
    layer: Any,  # i32 [1]
    pool: dict[str, Any],  # [page, kv_head, block_size, dim], scales [page, kv_head, block_size]
    *,
    arrived: Any,
    slot_smem: Any,  # i32 [token of the tile]
    new_smem: Any,  # [row, dim]
    stored_smem: Any = None,  # [row, dim]; None where new_smem already holds what is stored
    scale_smem: Any = None,  # f32 [row]; None unless quantised
    tile: _Tile,
    storage: KVDtype,
    num_layers: int,
) -> None:
    """Write the tokens of one tile into the leaf of K or of V."""
    num_tokens, kv_heads, _ = k.shape
    num_pages, _, block_size, _ = pool["k"].shape
    num_slots = num_pages // num_layers * block_size
    first = lax.axis_index("tile") * tile.tokens
    this_layer = layer[0]

    def load(new: Any) -> None:
        @pl.loop(0, tile.tokens)
        def _(i: jax.Array) -> None:
            token = jnp.minimum(first + i, num_tokens - 1)  # past the end: read, never stored
            rows = pl.ds(i * tile.rows_per_token, kv_heads)
            plgpu.copy_gmem_to_smem(new.at[token], new_smem.at[rows], arrived)

    def store(leaf: Any, scales: Any) -> None:
        @pl.loop(0, tile.tokens)
        def _(i: jax.Array) -> None:
            slot = slot_smem[i]

            @pl.when((first + i < num_tokens) & (slot >= 0) & (slot < num_slots))
            def _() -> None:
                page = lax.div(slot, block_size) * num_layers + this_layer
                offset = lax.rem(slot, block_size)
                row = i * tile.rows_per_token
                plgpu.copy_smem_to_gmem(source.at[pl.ds(row, kv_heads)], leaf.at[page, :, offset])
                if scales is not None:
                    for head in range(kv_heads):
                        scales[page, head, offset] = scale_smem[row + head]

    is_k = lax.axis_index("leaf") == 0
    lax.cond(is_k, lambda: load(k), lambda: load(v))
    # All slots meanwhile: one round trip to memory, not one a token in the loop that needs them.
    slots = [slot_mapping[jnp.minimum(first + i, num_tokens - 1)] for i in range(tile.tokens)]
    for i, slot in enumerate(slots):
        slot_smem[i] = slot
    plgpu.barrier_wait(arrived)
    # Outside the branches: the search for register layouts grows with what it has to lay out.
    if stored_smem is not None:
        _encode(new_smem, stored_smem, scale_smem, storage)
        plgpu.commit_smem()
    source = new_smem if stored_smem is None else stored_smem
    lax.cond(
        is_k,
        lambda: store(pool["k"], pool.get("k_scale")),
        lambda: store(pool["v"], pool.get("v_scale")),
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # SMEM must outlive the copies out of it


def _encode(new_smem: Any, stored_smem: Any, scale_smem: Any, storage: KVDtype) -> None:
    """Turn a tile of new vectors into what a leaf holds, and their scales."""
    # Loads and stores that are not promised to be free of bank conflicts are not searched for one.
    new = plgpu.load(new_smem, layout=plgpu.Layout.WGMMA, optimized=False)
    if storage.quantised:
        codes, scale = quantise(new, storage)
        scale_smem[...] = plgpu.layout_cast(scale, plgpu.Layout.WGMMA.reduce(1))
        stored = storage.to_leaf(codes)
    else:
        stored = new.astype(storage.dtype)
    stored_smem[...] = plgpu.layout_cast(stored, plgpu.Layout.WGMMA)
