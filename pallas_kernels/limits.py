"""What the Mosaic GPU kernels can serve together: the one place that says so."""

from typing import NamedTuple

from pallas_kernels.device import HOPPER, DeviceKind

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
MAX_GROUP = 16
"""Query heads of a KV head: they are the 8 or 16 columns of the decode kernel's products."""
MAX_KV_HEADS = 64
"""A token's heads fit the 64 rows that a CTA of the write kernel takes."""


class AttentionSizes(NamedTuple):
    """The sizes and dtypes that decide whether a kernel can serve a model.

    Attributes:
        kv_dtype: storage dtype of the pool, a key of `KV_DTYPES`.
        q_dtype: dtype of the queries.
        head_dim: width of a head.
        block_size: tokens of a block.
        group: query heads of a KV head.
        kv_heads: KV heads.
        static_scales: whether the pool is quantised by scales that it does not carry.
        channel_keys: whether keys have a scale a channel; no op here reads such a pool.
    """

    kv_dtype: str
    q_dtype: str
    head_dim: int
    block_size: int
    group: int
    kv_heads: int
    static_scales: bool = False
    channel_keys: bool = False


def why_not_mosaic_on(device: DeviceKind) -> str | None:
    """Why Mosaic GPU kernels cannot run on a device, or None."""
    if device[:2] != HOPPER[:2]:
        return f"it needs an NVIDIA Hopper GPU (compute capability 9.0) and this is a {device}"
    return None


def why_not_mosaic_pool(kv_dtype: str, static_scales: bool) -> str | None:
    """Why no Mosaic GPU kernel, writing or attending, reads codes stored like this, or None."""
    if kv_dtype == "int4":
        return "the pool is int4; it has no code that unpacks 4 bits (kv=int8 or kv=fp8)"
    if static_scales:
        return "the pool has static scales; it reads a scale a token and head from the pool"
    return None


def why_not_mosaic_for(sizes: AttentionSizes) -> str | None:
    """Why the Mosaic GPU attention kernels cannot serve these sizes, or None."""
    reason = why_not_mosaic_pool(sizes.kv_dtype, sizes.static_scales)
    if reason is not None:
        return reason
    if sizes.channel_keys:
        return "keys have a scale a channel; it reads a scale a token and head from the pool"
    if sizes.kv_dtype == "float32":
        return "the pool is float32; the matrix unit takes 16 bits (kv=bf16, or an 8-bit pool)"
    if sizes.q_dtype not in ("bfloat16", "float16"):
        return f"q is {sizes.q_dtype}; it takes bfloat16 or float16"
    if sizes.kv_dtype in ("bfloat16", "float16") and sizes.q_dtype != sizes.kv_dtype:
        return f"q is {sizes.q_dtype} and the pool {sizes.kv_dtype}; 16-bit ones must agree"
    for name, value, allowed in (
        ("head_dim", sizes.head_dim, HEAD_DIMS),
        ("block_size", sizes.block_size, BLOCK_SIZES),
    ):
        if value not in allowed:
            return f"{name} is {value}; it takes {', '.join(map(str, allowed))}"
    if sizes.group > MAX_GROUP:
        return f"each KV head has {sizes.group} query heads; it takes up to {MAX_GROUP}"
    if sizes.kv_heads > MAX_KV_HEADS:
        return f"there are {sizes.kv_heads} KV heads; it takes up to {MAX_KV_HEADS}"
    return None
