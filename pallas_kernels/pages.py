"""The paged KV pool as a pytree, and the two ways to make and inspect one."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class KVDtype(NamedTuple):
    """How a KV storage dtype is written: its array type and, when quantised, its largest code."""

    dtype: np.dtype
    max_code: float | None

    @property
    def quantised(self) -> bool:
        """Whether values carry one float32 scale per token and head."""
        return self.max_code is not None

    @property
    def stored_as_bytes(self) -> bool:
        """Whether a pool holds the bit patterns, uint8: so it is for 8-bit floats.

        XLA on a CPU cannot scatter them: writing one token would convert the whole pool to float16
        and back, 958 ms a layer where int8 takes 0.2.
        """
        return self.dtype.itemsize == 1 and jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def leaf_dtype(self) -> np.dtype:
        """What the leaves k and v of a pool are made of."""
        return jnp.dtype(jnp.uint8) if self.stored_as_bytes else self.dtype

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one token's K and V in one head, scales included."""
        return 2 * (head_dim * self.dtype.itemsize + 4 * self.quantised)

    def to_leaf(self, codes: jax.Array) -> jax.Array:
        """Turn codes of this dtype into what a leaf holds."""
        return jax.lax.bitcast_convert_type(codes, jnp.uint8) if self.stored_as_bytes else codes

    def widen(self, stored: jax.Array) -> jax.Array:
        """Turn what a leaf holds into float32, exactly; scales are the caller's.

        8-bit floats go through float16, which holds all their finite values: XLA on a CPU widens
        them by branchy bit arithmetic, and float16 has an instruction.
        """
        if not self.stored_as_bytes:
            return stored.astype(jnp.float32)
        bits = stored.astype(jnp.uint16)
        if self.dtype == jnp.float8_e5m2:
            return jax.lax.bitcast_convert_type(bits << 8, jnp.float16).astype(jnp.float32)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = jax.lax.bitcast_convert_type(bits, jnp.float16)
        return half.astype(jnp.float32) * 256.0  # the exponent biases differ by 8


KV_DTYPES: dict[str, KVDtype] = {
    "float32": KVDtype(jnp.dtype(jnp.float32), None),
    "float16": KVDtype(jnp.dtype(jnp.float16), None),
    "bfloat16": KVDtype(jnp.dtype(jnp.bfloat16), None),
    "int8": KVDtype(jnp.dtype(jnp.int8), 127.0),
    "float8_e4m3fn": KVDtype(jnp.dtype(jnp.float8_e4m3fn), 448.0),
    "float8_e5m2": KVDtype(jnp.dtype(jnp.float8_e5m2), 57344.0),
}
"""Storage dtypes of a pool, by name. 8-bit ones are quantised."""

MAX_SLOT_ROWS = 2**31
"""Indices are int32, so `num_blocks * layers * kv_heads * block_size` must stay below this."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """Keys and values of all blocks and layers; every leaf has the block axis first, layer second.

    So a block is one slice of each leaf, scales included. The order of the inner axes is private
    to this package: read with `read_kv`, write with `write_kv`.

    Attributes:
        k: keys, `[num_blocks, layers, kv_heads, block_size, head_dim]`; 8-bit floats as uint8.
        v: values, same shape and dtype.
        k_scale: float32 `[num_blocks, layers, kv_heads, block_size]`, `x ≈ code * scale`; None
            unless quantised.
        v_scale: the same for values.
        float8: the 8-bit float whose bit patterns k and v hold, by name; None for other pools.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    float8: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.k.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers in each block."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.k.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.k.shape[3]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.k.shape[4]

    @property
    def dtype_name(self) -> str:
        """Name of the storage dtype, a key of `KV_DTYPES`."""
        return self.float8 or jnp.dtype(self.k.dtype).name

    @property
    def quantised(self) -> bool:
        """Whether k and v are codes that need their scales."""
        return self.k_scale is not None


def init_pages(
    num_blocks: int, layers: int, kv_heads: int, block_size: int, head_dim: int, dtype: str
) -> KVPages:
    """Allocate an all-zero pool.

    Args:
        num_blocks: blocks in the pool, ≥ 1.
        layers: layers in a block, ≥ 1.
        kv_heads: KV heads of a layer, ≥ 1.
        block_size: tokens in a block, ≥ 1.
        head_dim: width of a head, ≥ 1.
        dtype: a key of `KV_DTYPES`; an 8-bit one adds float32 scales, all 1.

    Raises:
        ValueError: unknown dtype, a size below 1, or a pool too large for int32 indices.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"dtype={dtype!r}: a KV pool stores one of {', '.join(KV_DTYPES)}.")
    sizes = {
        "num_blocks": num_blocks,
        "layers": layers,
        "kv_heads": kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: must be at least 1.")
    check_index_range(num_blocks, layers, kv_heads, block_size)
    shape = (num_blocks, layers, kv_heads, block_size, head_dim)
    storage = KV_DTYPES[dtype]
    scales = {}
    if storage.quantised:
        scales = {name: jnp.ones(shape[:-1], jnp.float32) for name in ("k_scale", "v_scale")}
    return KVPages(
        k=jnp.zeros(shape, storage.leaf_dtype),
        v=jnp.zeros(shape, storage.leaf_dtype),
        float8=dtype if storage.stored_as_bytes else None,
        **scales,
    )


def check_index_range(num_blocks: int, layers: int, kv_heads: int, block_size: int) -> None:
    """Refuse a pool whose token rows an int32 cannot number.

    Raises:
        ValueError: with the largest number of blocks that fits.
    """
    per_block = layers * kv_heads * block_size
    if num_blocks * per_block >= MAX_SLOT_ROWS:
        raise ValueError(
            f"num_blocks * layers * kv_heads * block_size = {num_blocks} * {layers} * {kv_heads} * "
            f"{block_size} = {num_blocks * per_block}: must be below 2^31 = {MAX_SLOT_ROWS}, since "
            f"pages are indexed in 32 bits. At most {(MAX_SLOT_ROWS - 1) // per_block} blocks fit: "
            "lower cache.num_blocks."
        )


def read_kv(
    pages: KVPages, slots: jax.Array, *, layer: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read K and V of some slots back, dequantised.

    Args:
        pages: the pool.
        slots: int `[token]`, each `block_id * block_size + offset`, within the pool.
        layer: which layer; may be traced.

    Returns:
        k and v, float32 `[token, kv_head, dim]`.
    """
    block, offset = slots // pages.block_size, slots % pages.block_size
    storage = KV_DTYPES[pages.dtype_name]
    k = storage.widen(pages.k[block, layer, :, offset])
    v = storage.widen(pages.v[block, layer, :, offset])
    if pages.k_scale is not None and pages.v_scale is not None:
        k = k * pages.k_scale[block, layer, :, offset][..., None]
        v = v * pages.v_scale[block, layer, :, offset][..., None]
    return k, v
