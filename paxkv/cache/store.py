"""Moves of whole blocks: to host memory, back, and within the device pool.

A block is one slice of every array of the pool, scales included, so nothing here knows what the
arrays mean. Moves run in pieces of 64, 16, 4 and 1 blocks: four shapes to compile, no padding, and
a bound on the memory that a move needs on the device.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from paxkv.cache.host import HostSpace
from paxkv.errors import InvariantError

PIECES = (64, 16, 4, 1)


def swap_out(pages: Any, block_ids: Any, host: HostSpace, host_ids: Any) -> int:
    """Copy blocks to host memory; returns when the copies are there.

    The pool is only read; the blocks may be given to somebody else afterwards.

    Args:
        pages: Pool, a pytree whose every leaf has the block axis first.
        block_ids: int [n]. Blocks of the pool.
        host: Where to; its blocks `host_ids` are overwritten.
        host_ids: int [n]. Any numbering.

    Returns:
        Bytes moved.

    Raises:
        InvariantError: The layouts differ, or ids are out of range, repeated or not as many.
    """
    host.check_layout(pages)
    block_ids, host_ids = _pairs(block_ids, _num_blocks(pages), host_ids, host.num_blocks)
    leaves, underway = jax.tree.leaves(pages), None
    for piece in [*_pieces(len(block_ids)), None]:
        # The device copies this piece while the host stores the one before.
        started = piece and (piece, _to_host_memory(_gather(leaves, block_ids[piece])))
        if underway:
            host.write(host_ids[underway[0]], [np.asarray(leaf) for leaf in underway[1]])
        underway = started
    return len(block_ids) * host.bytes_per_block


def swap_in(pages: Any, block_ids: Any, host: HostSpace, host_ids: Any) -> Any:
    """Copy blocks back from host memory, bit for bit. Donates `pages`; returns the new pool.

    Args:
        pages: As in `swap_out`; invalid afterwards.
        block_ids: int [n]. Blocks of the pool, overwritten. Needn't be those they came from.
        host: Where from.
        host_ids: int [n].

    Raises:
        InvariantError: As for `swap_out`, or a host block that was never written.
    """
    host.check_layout(pages)
    host_ids, block_ids = _pairs(host_ids, host.num_blocks, block_ids, _num_blocks(pages))
    leaves, treedef = jax.tree.flatten(pages)
    host.check_written(host_ids)  # before the pool is given away
    for piece in _pieces(len(block_ids)):
        leaves = _scatter(leaves, block_ids[piece], host.read(host_ids[piece]))
    return jax.tree.unflatten(treedef, leaves)


def copy_blocks(pages: Any, src: Any, dst: Any) -> Any:
    """Copy blocks within the pool. Donates `pages`; returns the new pool.

    Args:
        pages: As in `swap_out`; invalid afterwards.
        src: int [n]. Blocks to read; repeats are fine.
        dst: int [n]. Blocks to overwrite; none may be read in the same call.

    Raises:
        InvariantError: Ids are out of range, not as many, or overwritten twice or while read.
    """
    src, dst = _pairs(src, _num_blocks(pages), dst, _num_blocks(pages))
    both = np.intersect1d(src, dst)
    if both.size:
        raise InvariantError(f"copy: blocks {both.tolist()} are read and overwritten in one call")
    leaves, treedef = jax.tree.flatten(pages)
    for piece in _pieces(len(src)):
        leaves = _copy(leaves, src[piece], dst[piece])
    return jax.tree.unflatten(treedef, leaves)


def warm_up(pages: Any) -> Any:
    """Compile every move that swapping needs. Donates `pages`; returns them unchanged."""
    leaves, treedef = jax.tree.flatten(pages)
    for size in PIECES:
        ids = np.zeros(size, np.int32)
        content = [np.asarray(leaf) for leaf in _to_host_memory(_gather(leaves, ids))]
        leaves = _scatter(leaves, ids, content)
    return jax.tree.unflatten(treedef, leaves)


def warm_up_copies(pages: Any) -> Any:
    """Compile every copy within the pool. Donates `pages`; returns them unchanged."""
    leaves, treedef = jax.tree.flatten(pages)
    for size in PIECES:
        ids = np.zeros(size, np.int32)
        leaves = _copy(leaves, ids, ids)
    return jax.tree.unflatten(treedef, leaves)


@jax.jit
def _gather(leaves: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
    return [leaf[ids] for leaf in leaves]


def _scatter_impl(
    leaves: list[jax.Array], ids: jax.Array, content: list[jax.Array]
) -> list[jax.Array]:
    return [leaf.at[ids].set(new) for leaf, new in zip(leaves, content, strict=True)]


_scatter = jax.jit(_scatter_impl, donate_argnums=0)


def _copy_impl(leaves: list[jax.Array], src: jax.Array, dst: jax.Array) -> list[jax.Array]:
    return [leaf.at[dst].set(leaf[src]) for leaf in leaves]


_copy = jax.jit(_copy_impl, donate_argnums=0)


def _to_host_memory(leaves: list[jax.Array]) -> list[jax.Array]:
    """Start the copies to page-locked host memory where the device has it (a CPU is there already).

    Page-locked memory is what the device can copy to on its own, while the host goes on.
    """
    (device,) = leaves[0].devices()
    if not _has_pinned_host(device):
        return leaves
    return jax.device_put(leaves, leaves[0].sharding.with_memory_kind("pinned_host"))


def _has_pinned_host(device: Any) -> bool:
    kinds = [memory.kind for memory in device.addressable_memories()]
    return device.platform != "cpu" and "pinned_host" in kinds


def _num_blocks(pages: Any) -> int:
    return jax.tree.leaves(pages)[0].shape[0]


def _pieces(num_blocks: int) -> Iterator[slice]:
    start = 0
    for size in PIECES:
        while num_blocks - start >= size:
            yield slice(start, start + size)
            start += size


def _pairs(src: Any, num_src: int, dst: Any, num_dst: int) -> tuple[np.ndarray, np.ndarray]:
    """Return both as i32 [n]. JAX would wrap or drop a wrong index in silence: refuse it here."""
    src, dst = np.asarray(src, np.int32).ravel(), np.asarray(dst, np.int32).ravel()
    if len(src) != len(dst):
        raise InvariantError(f"move: {len(src)} blocks against {len(dst)}; each needs its partner")
    for ids, limit in ((src, num_src), (dst, num_dst)):
        wrong = ids[(ids < 0) | (ids >= limit)]
        if wrong.size:
            raise InvariantError(f"move: block ids {wrong.tolist()}; the pool has {limit} blocks")
    if len(np.unique(dst)) != len(dst):
        raise InvariantError(f"move: two blocks into one of {dst.tolist()}")
    return src, dst
