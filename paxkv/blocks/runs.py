"""Runs of free blocks with consecutive ids: how broken up the free space is, and first fit in it.

For allocators that give a request all its blocks side by side. The pool is the same `BlockPool`;
only the choice of ids differs, so sharing, release and the invariants are those of `pool`. Host
only: first fit walks the pool, O(num_blocks).
"""

import numpy as np

from paxkv.blocks.host_array import HostArray
from paxkv.blocks.pool import BlockPool

_NONE = np.zeros(0, np.int32)


def largest_free_run(pool: BlockPool, also: np.ndarray = _NONE) -> int:
    """Return the length of the longest run of free blocks, 0 if none is free. O(num_blocks).

    Args:
        pool: On the host.
        also: int [n], blocks to count as free.
    """
    _, lengths = _free_runs(pool, also)
    return int(lengths.max(initial=0))


def allocate_run(pool: BlockPool, count: int) -> tuple[BlockPool, np.ndarray | None]:
    """Take `count` consecutive free blocks where they first fit, each with one reference.

    Args:
        pool: On the host; kept valid.
        count: At least 1.

    Returns:
        The new pool and the ids, ascending, int32; the same pool and None where no run is as long.

    Source: first fit, Knuth, The Art of Computer Programming, volume 1, section 2.5.
    """
    starts, lengths = _free_runs(pool)
    fitting = np.flatnonzero(lengths >= count)
    if not len(fitting):
        return pool, None
    first = int(starts[fitting[0]])
    ids = np.arange(first, first + count, dtype=np.int32)
    stack = pool.free_ids.peek()[: pool.num_free]
    left = stack[(stack < first) | (stack >= first + count)]
    free_ids = np.zeros(pool.num_blocks, np.int32)
    free_ids[: len(left)] = left
    refs = pool.ref_counts.set(ids.astype(np.intp), 1, before=0)
    return BlockPool(HostArray(free_ids), len(left), refs, pool.cached, pool.num_cached), ids


def _free_runs(pool: BlockPool, also: np.ndarray = _NONE) -> tuple[np.ndarray, np.ndarray]:
    """Return the first id and the length of each run of free blocks, by ascending id."""
    free = np.zeros(pool.num_blocks + 2, np.int8)
    free[pool.free_ids.peek()[: pool.num_free] + 1] = 1
    free[also + 1] = 1
    edges = np.diff(free)
    starts = np.flatnonzero(edges == 1)
    return starts, np.flatnonzero(edges == -1) - starts
