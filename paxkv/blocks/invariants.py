"""Checks of what must hold of the blocks after every step; for tests and `debug=invariants`."""

from collections.abc import Iterable, Sequence

import numpy as np

from paxkv.blocks.evictable import EvictableBlocks
from paxkv.blocks.pool import BlockPool
from paxkv.blocks.prefix import PrefixIndex
from paxkv.errors import InvariantError


def check_pool(
    pool: BlockPool,
    tables: Iterable[Sequence[int] | np.ndarray] | None = None,
    index: PrefixIndex | None = None,
    evictable: EvictableBlocks | None = None,
) -> None:
    """Check a pool on its own, and against whatever else is given. O(num_blocks).

    Args:
        pool: On the host or on a device.
        tables: The block ids that each holder holds (negative entries are padding). All holders:
            a reference that no table explains is an error.
        index: The prefix index that knows this pool's blocks.
        evictable: The order of this pool's cached blocks.

    Raises:
        InvariantError: Names every rule that is broken, with the blocks that break it.
    """
    num_free, num_cached = int(pool.num_free), int(pool.num_cached)
    refs, cached = np.asarray(pool.ref_counts), np.asarray(pool.cached)
    blocks = np.arange(pool.num_blocks)
    problems = []

    def must(holds: np.ndarray, rule: str) -> None:
        if not holds.all():
            problems.append(f"blocks {blocks[~holds][:20].tolist()}: {rule}")

    if not 0 <= num_free <= pool.num_blocks:
        raise InvariantError(f"num_free={num_free}: the pool has {pool.num_blocks} blocks")
    stack = np.asarray(pool.free_ids)[:num_free]
    if stack.size and not 0 <= stack.min() <= stack.max() < pool.num_blocks:
        raise InvariantError(f"free stack {stack.tolist()}: ids are 0 to {pool.num_blocks - 1}")
    times_free = np.bincount(stack, minlength=pool.num_blocks)
    idle = refs == 0
    must(refs >= 0, "negative reference count")
    must(times_free <= 1, "on the free stack twice")
    must((times_free == 1) == (idle & ~cached), "free by the stack or by the counts, not by both")
    if num_cached != np.count_nonzero(idle & cached):
        problems.append(f"num_cached={num_cached}: {np.count_nonzero(idle & cached)} blocks are")
    if tables is not None:
        held = [np.asarray(table, np.int64).ravel() for table in tables]
        ids = np.concatenate([np.zeros(0, np.int64), *held])
        ids = ids[ids >= 0]
        if ids.size and ids.max() >= pool.num_blocks:
            raise InvariantError(f"a table holds block {ids.max()} of {pool.num_blocks}")
        must(np.bincount(ids, minlength=pool.num_blocks) == refs, "references differ from tables")
    if index is not None:
        must(np.isin(blocks, index.block_ids()) == cached, "in the index or flagged, not both")
    if evictable is not None:
        must(np.isin(blocks, list(evictable)) == (idle & cached), "evictable by one record only")
    if problems:
        raise InvariantError("broken block pool: " + "; ".join(problems))
