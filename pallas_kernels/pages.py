"""The paged KV pool as a pytree, and the two ways to make and inspect one."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SCALE_BYTES = 4  # float32


class KVDtype(NamedTuple):
    """How a KV storage dtype is written.

    Attributes:
        dtype: of one value, or of one code before it is packed.
        max_code: the largest code; None unless quantised.
        packed: whether codes have 4 bits and two share a byte: those of dims i and
            `i + head_dim / 2`, the former in the low half.
    """

    dtype: np.dtype
    max_code: float | None
    packed: bool = False

    @property
    def quantised(self) -> bool:
        """Whether values are codes that a float32 scale turns into numbers."""
        return self.max_code is not None

    @property
    def stored_as_bytes(self) -> bool:
        """Whether a pool holds bit patterns, uint8: so it is for 8-bit floats and packed codes.

        XLA on a CPU cannot scatter 8-bit floats: writing one token would convert the whole pool to
        float16 and back, 958 ms a layer where int8 takes 0.2.
        """
        is_float8 = self.dtype.itemsize == 1 and jnp.issubdtype(self.dtype, jnp.floating)
        return is_float8 or self.packed

    @property
    def leaf_dtype(self) -> np.dtype:
        """What the leaves k and v of a pool are made of."""
        return jnp.dtype(jnp.uint8) if self.stored_as_bytes else self.dtype

    def leaf_dim(self, head_dim: int) -> int:
        """Length of a leaf's last axis for heads of this width."""
        return head_dim // 2 if self.packed else head_dim

    def head_dim(self, leaf_dim: int) -> int:
        """Width of the heads that a leaf with a last axis of this length holds."""
        return 2 * leaf_dim if self.packed else leaf_dim

    def token_bytes(self, head_dim: int, *, scaled: bool = True) -> int:
        """Bytes of one token's K and V in one head, and of their scales where the pool has them.

        Args:
            head_dim: width of the head.
            scaled: whether a quantised pool carries a scale a token and head.
        """
        scale_bytes = SCALE_BYTES if self.quantised and scaled else 0
        return 2 * (self.leaf_dim(head_dim) * self.leaf_dtype.itemsize + scale_bytes)

    def to_leaf(self, codes: jax.Array) -> jax.Array:
        """Turn codes of this dtype, `[..., head_dim]`, into what a leaf holds."""
        if not self.stored_as_bytes:
            return codes
        stored = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        if not self.packed:
            return stored
        low, high = jnp.split(stored, 2, axis=-1)
        return (low & 15) | (high << 4)

    def widen(self, stored: jax.Array) -> jax.Array:
        """Turn what a leaf holds, heads along its last axis, into float32; scales are the caller's.

        8-bit floats go through float16, which holds all their finite values: XLA on a CPU widens
        them by branchy bit arithmetic, and float16 has an instruction.
        """
        if not self.stored_as_bytes:
            return stored.astype(jnp.float32)
        if self.packed:
            return _unpack(stored)
        bits = stored.astype(jnp.uint16)
        if self.dtype == jnp.float8_e5m2:
            return jax.lax.bitcast_convert_type(bits << 8, jnp.float16).astype(jnp.float32)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = jax.lax.bitcast_convert_type(bits, jnp.float16)
        return half.astype(jnp.float32) * 256.0  # the exponent biases differ by 8


def _unpack(stored: jax.Array) -> jax.Array:
    """Return the two codes of each byte, `[..., dim / 2]`, as float32 `[..., dim]`."""
    # In 32 bits, shifting left and back extends the sign, and every step is a vector instruction.
    wide = stored.astype(jnp.int32)
    codes = jnp.stack([(wide << 28) >> 28, (wide << 24) >> 28], axis=-2)
    return codes.astype(jnp.float32).reshape(*stored.shape[:-1], -1)


KV_DTYPES: dict[str, KVDtype] = {
    "float32": KVDtype(jnp.dtype(jnp.float32), None),
    "float16": KVDtype(jnp.dtype(jnp.float16), None),
    "bfloat16": KVDtype(jnp.dtype(jnp.bfloat16), None),
    "int8": KVDtype(jnp.dtype(jnp.int8), 127.0),
    "float8_e4m3fn": KVDtype(jnp.dtype(jnp.float8_e4m3fn), 448.0),
    "float8_e5m2": KVDtype(jnp.dtype(jnp.float8_e5m2), 57344.0),
    "int4": KVDtype(jnp.dtype(jnp.int8), 7.0, packed=True),
}
"""Storage dtypes of a pool, by name. Those of 8 and 4 bits are quantised."""

MAX_SLOT_ROWS = 2**31
"""Indices are int32, so `num_blocks * layers * kv_heads * block_size` must stay below this."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """Keys and values of all blocks and layers; every leaf has the block axis first, layer second.

    So a block is one slice of each leaf, scales included. The order of the inner axes is private
    to this package: read with `read_kv`, write with `write_kv`.

    Attributes:
        k: keys, `[num_blocks, layers, kv_heads, block_size, head_dim]`; 8-bit floats as uint8, and
            two 4-bit codes in a uint8, `[..., head_dim / 2]`.
        v: values, same shape and dtype.
        k_scale: float32 `[num_blocks, layers, kv_heads, block_size]`, `x ≈ code * scale`; None
            unless quantised, and where scales are static: then the ops are given them.
        v_scale: the same for values.
        coded_as: the storage dtype whose bit patterns k and v hold, by name; None where the dtype
            of k says it.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    coded_as: str | None = dataclasses.field(default=None, metadata={"static": True})

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
        return KV_DTYPES[self.dtype_name].head_dim(self.k.shape[4])

    @property
    def dtype_name(self) -> str:
        """Name of the storage dtype, a key of `KV_DTYPES`."""
        return self.coded_as or jnp.dtype(self.k.dtype).name

    @property
    def quantised(self) -> bool:
        """Whether k and v are codes that need scales."""
        return KV_DTYPES[self.dtype_name].quantised

    @property
    def static_scales(self) -> bool:
        """Whether k and v are codes whose scales the pool does not carry."""
        return self.quantised and self.k_scale is None


def init_pages(
    num_blocks: int,
    layers: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: str,
    *,
    scaled: bool = True,
) -> KVPages:
    """Allocate an all-zero pool.

    Args:
        num_blocks: blocks in the pool, ≥ 1.
        layers: layers in a block, ≥ 1.
        kv_heads: KV heads of a layer, ≥ 1.
        block_size: tokens in a block, ≥ 1.
        head_dim: width of a head, ≥ 1; even for int4.
        dtype: a key of `KV_DTYPES`.
        scaled: give a quantised pool a float32 scale a token and head, all 1; without them the
            ops take static scales.

    Raises:
        ValueError: unknown dtype, a size below 1, an odd head_dim in int4, or a pool too large for
            int32 indices.
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
    storage = KV_DTYPES[dtype]
    if storage.packed and head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: must be even, since {dtype} packs two in a byte.")
    check_index_range(num_blocks, layers, kv_heads, block_size)
    shape = (num_blocks, layers, kv_heads, block_size, storage.leaf_dim(head_dim))
    scales = {}
    if storage.quantised and scaled:
        scales = {name: jnp.ones(shape[:-1], jnp.float32) for name in ("k_scale", "v_scale")}
    return KVPages(
        k=jnp.zeros(shape, storage.leaf_dtype),
        v=jnp.zeros(shape, storage.leaf_dtype),
        coded_as=dtype if storage.stored_as_bytes else None,
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
    """Read K and V of some slots back, dequantised; in units of static scales where there are any.

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
