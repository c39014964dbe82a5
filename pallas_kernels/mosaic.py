"""What the Mosaic GPU kernels share: the device they are cut for, shared memory, arithmetic."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import HOPPER, device_kind, traced_for
from pallas_kernels.pages import KVPages

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""An accumulator of the matrix unit."""

_SMEM_ALIGNMENT = 1024
_HOPPER_SMS = 132  # an H100 or H200 (SXM); other counts work, only less evenly

MAX_SMEM_BYTES = 232_448
"""Shared memory that one CTA may use on sm_90."""

SMEM_PER_SM_BYTES = 233_472
"""Shared memory of an SM on sm_90, of which each resident CTA costs `CTA_SMEM_BYTES` besides."""

CTA_SMEM_BYTES = 1_024
"""What the driver keeps for itself for each CTA."""

REDUCTION_BYTES = 2_048
"""Shared memory for reductions across the warps of a warpgroup."""

LOG2E = 1.4426950408889634
"""Turns exp into exp2, which the GPU has as an instruction."""

MASKED = -1e30
"""Score of a key that is not seen: finite, so that a maximum over none of them is no NaN."""


@contextlib.contextmanager
def interpret(*, detect_races: bool = True) -> Iterator[None]:
    """Run the Mosaic kernels called inside in the GPU interpreter, on a CPU: slow, and checked.

    Args:
        detect_races: print `RACE DETECTED` for accesses to memory that nothing orders.
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    with traced_for(HOPPER._replace(interpreted=True)), plgpu.force_gpu_interpret_mode(params):
        yield


def interpreting() -> bool:
    """Whether kernels traced now run in the GPU interpreter."""
    return device_kind().interpreted


def num_sms() -> int:
    """Streaming multiprocessors that a persistent grid is cut for; few in the interpreter."""
    return 2 if interpreting() else _HOPPER_SMS


def compute_dtype(pool_dtype: str, q_dtype: np.dtype) -> np.dtype:
    """The 16-bit dtype that the matrix unit sees.

    8-bit floats become float16, exactly and by an instruction; sm_90 has none to bfloat16.
    """
    if pool_dtype.startswith("float8"):
        return jnp.dtype(jnp.float16)
    if pool_dtype == "int8":
        return jnp.dtype(q_dtype)
    return jnp.dtype(pool_dtype)


def swizzled(*shape: int, dtype: np.dtype, swizzle: int | None = None) -> Any:
    """Shared memory for an array that TMA fills or `wgmma` reads.

    Args:
        *shape: of the array; the last axis is a row's bytes.
        dtype: of its elements.
        swizzle: bytes of the swizzle; None is the widest that divides a row. Both operands of a
            `wgmma` need the same.
    """
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    if swizzle is None:
        swizzle = widest_swizzle(shape[-1] * bits // 8)
    if swizzle is None:
        return plgpu.SMEM(shape, dtype)
    tiling: Any = plgpu.TilingTransform  # pyright takes both classes for abstract ones
    swizzling: Any = plgpu.SwizzleTransform
    transforms = (tiling((8, swizzle * 8 // bits)), swizzling(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def widest_swizzle(row_bytes: int) -> int | None:
    """Largest swizzle that divides a row; None where none does (a row of 80 bytes)."""
    return next((swizzle for swizzle in (128, 64, 32) if row_bytes % swizzle == 0), None)


def smem_bytes(array_bytes: int) -> int:
    """What an array takes of shared memory: each starts where the widest swizzle begins anew."""
    return -(-array_bytes // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT


def score_factor(scale: float, soft_cap: float | None) -> float:
    """What q·k is multiplied by: the scale, in units of log2 unless a cap comes between."""
    return scale if soft_cap is not None else scale * LOG2E


def soft_capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(scores / cap)`, through exp2: the GPU's own tanh is only good to 5e-4."""
    if cap is None:
        return scores
    grown = jnp.exp2(scores * (2 * LOG2E / cap))
    return cap - (2 * cap) * (1.0 / (grown + 1.0))  # a reciprocal is one instruction


def widen(codes: jax.Array, pool_dtype: str, dtype: np.dtype) -> jax.Array:
    """Codes as a pool holds them, in registers, to the 16-bit dtype; scales are the caller's."""
    if pool_dtype.startswith("float8"):
        codes = jax.lax.bitcast_convert_type(codes, jnp.dtype(pool_dtype))
    return codes.astype(dtype)


def product(a: Any, b: Any, shape: tuple[int, ...]) -> jax.Array:
    """One float32 product of the matrix unit, waited for; `b` is in shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, ACC(shape, jnp.float32))


def page_leaves(pages: KVPages) -> dict[str, jax.Array]:
    """Leaves of a pool by name, as pages `[block * layer, kv_head, block_size, ...]`.

    A view: blocks and layers are both outermost, so pages of a layer stand `layers` apart.
    """
    names = ("k", "v", "k_scale", "v_scale") if pages.quantised else ("k", "v")
    leaves = {name: getattr(pages, name) for name in names}
    return {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in leaves.items()}


def page_ids(block_tables: jax.Array, pages: KVPages, layer: int | jax.Array) -> jax.Array:
    """Block tables as ids of a layer's pages; what stands past a row's end becomes some page."""
    ids = jnp.clip(block_tables, 0, pages.num_blocks - 1) * pages.num_layers + layer
    return jnp.clip(ids, 0, pages.num_blocks * pages.num_layers - 1)


def fetch_page(page: Any, target: Any, barrier: Any) -> None:
    """Start the copy of a page, or a part of one, into shared memory.

    Page ids are clipped, so it lies within the pool. Saying so makes the copy of a few scales a
    plain one, which starts at any 16 bytes; a tensor copy must start at 128.
    """
    plgpu.copy_gmem_to_smem(page, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
