"""What is fixed when the decode kernel compiles: sizes, stages, shared memory."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic.work_plan import TILE, LiveSpan, live_span
from pallas_kernels.pages import KV_DTYPES

_MAX_STAGES = 4
_SMALL_BYTES = 2048  # barriers, and an array too small to count, aligned


class DecodeTiling(NamedTuple):
    """What is fixed when the kernel compiles, from sizes alone.

    Attributes:
        heads: columns of the matrix unit: the group padded to 8 or 16.
        stages: tiles of K and V in flight.
        ctas_per_sm: resident CTAs that the shared memory allows, 1 or 2.
        smem_bytes: shared memory of a CTA.
    """

    heads: int
    stages: int
    ctas_per_sm: int
    smem_bytes: int


@functools.cache
def decode_tiling(*, group: int, head_dim: int, itemsize: int) -> DecodeTiling:
    """Choose stages and CTAs: two CTAs an SM hide each other's waiting, more stages hide memory's.

    Args:
        group: query heads of a KV head, at most 16.
        head_dim: width of a head.
        itemsize: bytes of a stored value; 1 means quantised.
    """
    heads = 8 if group <= 8 else 16
    tile = TILE * head_dim
    arrays = [2 * heads * head_dim * 2, heads * TILE * 2, head_dim * heads * 4]  # q, weights, out
    stage = [tile * itemsize] * 2
    if itemsize == 1:
        arrays.append(tile * 2)  # V widened to 16 bits
        stage += [TILE * 4] * 2  # scales
    fixed = sum(map(mosaic.smem_bytes, arrays)) + mosaic.REDUCTION_BYTES + _SMALL_BYTES
    for ctas in (2, 1):
        room = mosaic.SMEM_PER_SM_BYTES // ctas - mosaic.CTA_SMEM_BYTES
        for stages in range(_MAX_STAGES, 1, -1):
            used = fixed + sum(mosaic.smem_bytes(stages * size) for size in stage)
            if used <= min(room, mosaic.MAX_SMEM_BYTES):
                return DecodeTiling(heads, stages, ctas, used)
    raise AssertionError(f"no tiling for group={group}, head_dim={head_dim}, itemsize={itemsize}")


class DecodeStatic(NamedTuple):
    """Everything the kernel body knows at compile time."""

    tiling: DecodeTiling
    block_size: int
    head_dim: int
    pool_dtype: str
    dtype: np.dtype  # of the matrix unit's operands
    scale: float
    window: int | None
    num_sink_tokens: int
    soft_cap: float | None
    stage_in_smem: bool

    @property
    def quantised(self) -> bool:
        """Whether K and V are codes."""
        return KV_DTYPES[self.pool_dtype].quantised

    @property
    def pages_of_tile(self) -> int:
        """Pages that fill a tile; 1 also where a page holds several."""
        return max(1, TILE // self.block_size)

    @property
    def widened_columns(self) -> int:
        """Columns of codes that are widened at a time."""
        return 128 if self.tiling.heads == 8 else 64

    def span(self, context_len: jax.Array) -> LiveSpan:
        """Tiles of a row that the query may see."""
        return live_span(
            context_len,
            block_size=self.block_size,
            window=self.window,
            num_sink_tokens=self.num_sink_tokens,
        )


class DecodeScratch(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [2, heads, dim]
    k: Any  # [stage, TILE, dim]
    v: Any
    weights: Any  # [heads, TILE]
    out_tile: Any  # [dim, heads]
    lse_tile: Any  # [heads]
    q_ready: Any  # barriers
    q_free: Any
    ready: Any
    free: Any
    k_scale: Any = None  # [stage, TILE]
    v_scale: Any = None
    v_wide: Any = None  # [TILE, dim], 16 bits
    k_wide: Any = None  # the same of K, where the interpreter wants it


def decode_scratch(static: DecodeStatic) -> dict[str, Any]:
    """Types of the shared memory, by field of `DecodeScratch`."""
    dim, heads, stages = static.head_dim, static.tiling.heads, static.tiling.stages
    codes = KV_DTYPES[static.pool_dtype].leaf_dtype
    # Blocks of 64 columns of codes are widened at a time: 64 bytes.
    swizzle = 64 if static.quantised and dim % 64 == 0 else None
    wide = mosaic.widest_swizzle(dim * 2)  # one swizzle for both operands of each product
    tile = functools.partial(mosaic.swizzled, TILE, dim, dtype=static.dtype)
    copies = (4 if static.quantised else 2) * static.pages_of_tile
    scratch = {
        "q": mosaic.swizzled(2, heads, dim, dtype=static.dtype),
        "k": mosaic.swizzled(stages, TILE, dim, dtype=codes, swizzle=swizzle),
        "v": mosaic.swizzled(stages, TILE, dim, dtype=codes, swizzle=swizzle),
        "weights": mosaic.swizzled(heads, TILE, dtype=static.dtype, swizzle=wide),
        "out_tile": plgpu.SMEM((dim, heads), jnp.float32),
        "lse_tile": plgpu.SMEM((heads,), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=2),
        "q_free": plgpu.Barrier(num_barriers=2),
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "free": plgpu.Barrier(num_barriers=stages),
    }
    if static.quantised:
        scratch["k_scale"] = scratch["v_scale"] = plgpu.SMEM((stages, TILE), jnp.float32)
        scratch["v_wide"] = tile()
        if static.stage_in_smem:
            scratch["k_wide"] = tile()
    return scratch
