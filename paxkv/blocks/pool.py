"""The block allocator: pure functions on a pytree, the same on NumPy (host) and inside `jax.jit`.

A block is free (on the stack), live (held by `ref_counts` tables), or cached (held by nobody, but
findable in the prefix index and so kept until it is evicted). Each operation takes a whole engine
step's ids at once and returns a new pool; the old one stays valid.

On the host a wrong id raises InvariantError and nothing is changed. Inside jit nothing can be
raised: ids out of range, releases of a block nobody holds and the like are ignored.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.blocks.host_array import HostArray
from paxkv.errors import InvariantError

INVALID = -1
"""The id of no block: pads id arrays, and stands for a block that was refused."""

# NumPy takes an array of rank 0 twice as fast as a Python int, on arrays as short as ours.
_ZERO, _ONE, _ZERO64 = np.zeros((), np.int32), np.ones((), np.int32), np.zeros((), np.int64)

type Array = Any
"""A HostArray on the host, a jax.Array on a device or inside jit; an ndarray is copied into one."""

type Scalar = Any
"""An int on the host, else as Array."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockPool:
    """The state of every block; build it with `init_pool` or `jax.device_put(init_pool(n))`.

    As a pytree its leaves are plain arrays; flattening a host pool copies them (O(num_blocks)).

    Attributes:
        free_ids: i32 [num_blocks]. Stack of free ids; entries at `num_free` and above mean nothing.
        num_free: i32 []. Height of the stack.
        ref_counts: i32 [num_blocks]. Tables that hold the block.
        cached: bool [num_blocks]. Whether the prefix index can find the block.
        num_cached: i32 []. Blocks with the flag `cached` that nobody holds: evictable.
    """

    free_ids: Array
    num_free: Scalar
    ref_counts: Array
    cached: Array
    num_cached: Scalar

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, whatever their state."""
        return self.ref_counts.shape[0]


class AllocResult(NamedTuple):
    """What `allocate` gives.

    Attributes:
        pool: The new pool.
        block_ids: i32 [capacity]. Entry i's ids lie at `cumsum(counts)[i] - counts[i]` and on;
            INVALID where an entry was refused, and beyond the last entry.
        ok: bool [n]. Whether the entry got all it asked for (else it got nothing).
    """

    pool: BlockPool
    block_ids: Any
    ok: Any


class PoolCounts(NamedTuple):
    """How many blocks are in each state; the three add up to the pool."""

    free: Any
    live: Any
    cached: Any


def init_pool(num_blocks: int) -> BlockPool:
    """Return a host pool of free blocks; the first allocations give ids 0, 1, 2, ...

    Raises:
        ValueError: `num_blocks` is negative or does not fit an int32 id.
    """
    if not 0 <= num_blocks < 2**31:
        raise ValueError(f"num_blocks={num_blocks}: a pool needs 0 to 2**31 - 1 blocks")
    return BlockPool(
        free_ids=HostArray(np.arange(num_blocks - 1, -1, -1, dtype=np.int32)),
        num_free=num_blocks,
        ref_counts=HostArray(np.zeros(num_blocks, np.int32)),
        cached=HostArray(np.zeros(num_blocks, np.bool_)),
        num_cached=0,
    )


def allocate(pool: BlockPool, counts: Any, *, capacity: int | None = None) -> AllocResult:
    """Take `counts[i]` free blocks for each entry i, in order, each with one reference.

    An entry is granted iff everything asked for up to and including it fits into what is free (and
    into `capacity`), or it asks for nothing; a refused entry changes nothing.

    Args:
        pool: Kept valid.
        counts: int [n], ≥ 0.
        capacity: Length of the returned ids. None means `sum(counts)`; inside jit it is required.

    Raises:
        ValueError: A negative count on the host, or no capacity inside jit.
    """
    pool, xp = _side(pool)
    if xp is np:
        counts = np.asarray(counts, np.int64)
        ok = counts >= _ZERO64
        if np.count_nonzero(ok) < ok.size:
            raise ValueError(f"counts={counts.tolist()}: an entry asks for at least 0 blocks")
        asked = int(counts.sum())
        capacity = asked if capacity is None else capacity
        room, taken = min(pool.num_free, capacity), asked
        if asked > room:
            ends = counts.cumsum()
            ok = (ends <= room) | (counts == 0)
            taken = int(np.max(ends, where=ok & (counts > 0), initial=0))
        height = pool.num_free - taken
        ids = pool.free_ids.peek()[height : height + taken][::-1].copy()
        if taken:
            refs = pool.ref_counts.set(ids.astype(np.intp), 1, before=0)
            pool = BlockPool(pool.free_ids, height, refs, pool.cached, pool.num_cached)
        if taken < capacity:
            ids = np.concatenate([ids, np.full(capacity - taken, INVALID, np.int32)])
        return AllocResult(pool, ids, ok)
    if capacity is None:
        raise ValueError("capacity=None: inside jit the number of ids is static; pass capacity=")
    counts = jnp.maximum(jnp.asarray(counts, jnp.int32), 0)
    ends = jnp.cumsum(counts)
    ok = (ends <= jnp.minimum(pool.num_free, capacity)) | (counts == 0)
    taken = jnp.max(ends, where=ok & (counts > 0), initial=0)
    place = jnp.arange(capacity, dtype=jnp.int32)
    ids = pool.free_ids.at[pool.num_free - 1 - place].get(mode="clip")
    ids = jnp.where(place < taken, ids, INVALID)
    refs = _put(pool.ref_counts, ids, 1, where=place < taken)
    pool = BlockPool(pool.free_ids, pool.num_free - taken, refs, pool.cached, pool.num_cached)
    return AllocResult(pool, ids, ok)


def share(pool: BlockPool, ids: Any) -> BlockPool:
    """Add one reference for each id (repeats add up); a cached block that nobody held lives again.

    Args:
        pool: Kept valid.
        ids: int [n]. INVALID entries are skipped.

    Raises:
        InvariantError: On the host: an id out of range or of a free block.
    """
    pool, xp = _side(pool)
    ids, repeats, first = _clean(pool, xp, ids)
    if xp is np and not ids.size:
        return pool
    refs, cached = _take(pool.ref_counts, ids, 0), _take(pool.cached, ids, False)
    idle = refs == _ZERO
    shareable = ~idle | cached
    if xp is np:
        _require(shareable, ids, "shared, but free: only a live or a cached block can be shared")
    return BlockPool(
        pool.free_ids,
        pool.num_free,
        _put(pool.ref_counts, ids, refs + repeats, before=refs, where=shareable),
        pool.cached,
        pool.num_cached - _count(xp, _both(idle & cached, first)),
    )


def release(pool: BlockPool, ids: Any) -> BlockPool:
    """Drop one reference for each id (repeats add up).

    A block that nobody holds any more goes on the free stack, in the order of `ids` (the last is
    given out next), or, if the prefix index can find it, stays as cached.

    Args:
        pool: Kept valid.
        ids: int [n]. INVALID entries are skipped.

    Raises:
        InvariantError: On the host: an id out of range, or released more often than held.
    """
    pool, xp = _side(pool)
    ids, repeats, first = _clean(pool, xp, ids)
    if xp is np and not ids.size:
        return pool
    refs, cached = _take(pool.ref_counts, ids, 0), _take(pool.cached, ids, False)
    left = refs - repeats
    if xp is np:
        if min(left.tolist()) < 0:
            _require(left >= _ZERO, ids, "released more often than it is held")
        emptied = _both(left == _ZERO, first)
    else:
        left = jnp.maximum(left, 0)
        emptied = _both((left == 0) & (refs > 0), first)
    free_ids, num_free = _push(pool, xp, ids, emptied > cached)
    return BlockPool(
        free_ids,
        num_free,
        _put(pool.ref_counts, ids, left, before=refs),
        pool.cached,
        pool.num_cached + _count(xp, emptied) - (num_free - pool.num_free),
    )


def mark_cached(pool: BlockPool, ids: Any) -> BlockPool:
    """Flag live blocks as findable in the prefix index, so that they outlive their last holder.

    Args:
        pool: Kept valid.
        ids: int [n]. INVALID entries are skipped; a flagged block stays as it is.

    Raises:
        InvariantError: On the host: an id out of range or of a free block.
    """
    pool, xp = _side(pool)
    ids, _, _ = _clean(pool, xp, ids)
    if xp is np and not ids.size:
        return pool
    live = _take(pool.ref_counts, ids, 0) > _ZERO
    if xp is np:
        _require(live | pool.cached[ids], ids, "marked as cached, but free")
    cached = _put(pool.cached, ids, True, where=live)
    return BlockPool(pool.free_ids, pool.num_free, pool.ref_counts, cached, pool.num_cached)


def evict(pool: BlockPool, ids: Any) -> BlockPool:
    """Free cached blocks that nobody holds, in the order of `ids`; the index must drop them too.

    Args:
        pool: Kept valid.
        ids: int [n], no repeats. INVALID entries are skipped.

    Raises:
        InvariantError: On the host: an id out of range, repeated, held by somebody, or not cached.
    """
    pool, xp = _side(pool)
    ids, _, first = _clean(pool, xp, ids)
    if xp is np and not ids.size:
        return pool
    idle = (_take(pool.ref_counts, ids, 1) == _ZERO) & _take(pool.cached, ids, False)
    idle = _both(idle, first)
    if xp is np:
        _require(idle, ids, "evicted, but held, not cached, or named twice")
    free_ids, num_free = _push(pool, xp, ids, idle)
    return BlockPool(
        free_ids,
        num_free,
        pool.ref_counts,
        _put(pool.cached, ids, False, where=idle),
        pool.num_cached - _count(xp, idle),
    )


def evictable(pool: BlockPool, ids: Any) -> Any:
    """Return bool [n]: which of the blocks are cached and held by nobody. Ids must be in range."""
    pool, xp = _side(pool)
    ids = xp.asarray(ids, xp.int32)
    return pool.cached[ids] & (pool.ref_counts[ids] == _ZERO)


def counts(pool: BlockPool) -> PoolCounts:
    """Return how many blocks are free, live and cached. O(1)."""
    return PoolCounts(
        free=pool.num_free,
        live=pool.num_blocks - pool.num_free - pool.num_cached,
        cached=pool.num_cached,
    )


def _side(pool: BlockPool) -> tuple[Any, Any]:
    """Return the pool and the array module it lives in; plain NumPy fields are taken over first."""
    if isinstance(pool.ref_counts, HostArray):
        return pool, np
    if isinstance(pool.ref_counts, np.ndarray):
        host = BlockPool(
            HostArray(pool.free_ids),
            int(pool.num_free),
            HostArray(pool.ref_counts),
            HostArray(pool.cached),
            int(pool.num_cached),
        )
        return host, np
    return pool, jnp


def _clean(pool: BlockPool, xp: Any, ids: Any) -> tuple[Any, Any, Any]:
    """Check ids and count repeats: (ids, how often each occurs, whether this is its first place).

    On the host INVALID is left out, and the last is None if no id repeats, which is the rule there.
    Inside jit what is not an id becomes `num_blocks`, out of range for what follows.
    """
    if xp is jnp:
        ids = jnp.asarray(ids, jnp.int32)
        ids = jnp.where((ids < 0) | (ids >= pool.num_blocks), pool.num_blocks, ids)
        return ids, *_repeats(jnp, ids)
    # NumPy indexes five times faster with intp than with i32. Either way the array is our own.
    ids = ids.astype(np.intp) if isinstance(ids, np.ndarray) else np.array(ids, np.intp)
    distinct = set(ids.tolist())
    if distinct and (min(distinct) < 0 or max(distinct) >= pool.num_blocks):
        wrong = sorted(i for i in distinct if i < INVALID or i >= pool.num_blocks)
        if wrong:
            raise InvariantError(
                f"block ids {wrong}: the pool has blocks 0 to {pool.num_blocks - 1}"
            )
        distinct.discard(INVALID)
        ids = ids[ids != INVALID]
    if len(distinct) == ids.size:
        return ids, _ONE, None
    return ids, *_repeats(np, ids)


def _repeats(xp: Any, ids: Any) -> tuple[Any, Any]:
    order = xp.argsort(ids, stable=True)
    ranked = ids[order]
    start = xp.searchsorted(ranked, ids, side="left")
    repeats = xp.searchsorted(ranked, ids, side="right") - start
    return repeats.astype(xp.int32), xp.argsort(order) == start


def _require(holds: np.ndarray, ids: np.ndarray, otherwise: str) -> None:
    if False in holds.tolist():
        raise InvariantError(f"blocks {np.unique(ids[~holds]).tolist()}: {otherwise}")


def _both(mask: Any, first: Any) -> Any:
    return mask if first is None else mask & first


def _take(values: Any, ids: Any, otherwise: Any) -> Any:
    if isinstance(values, HostArray):
        return values[ids]
    return values.at[ids].get(mode="fill", fill_value=otherwise)


def _put(values: Any, ids: Any, new: Any, *, where: Any = None, before: Any = None) -> Any:
    """Write `new` at `ids`; on the host the caller has checked that the mask `where` is all true
    or that writing elsewhere changes nothing, inside jit the mask and the range are applied.
    """
    if isinstance(values, HostArray):
        return values.set(ids, new, before)
    if where is not None:
        ids = jnp.where(where, ids, values.shape[0])
    return values.at[ids].set(new, mode="drop")


def _push(pool: BlockPool, xp: Any, ids: Any, chosen: Any) -> tuple[Any, Any]:
    """Return the free stack with the chosen ids on top, in their order, and its height."""
    if xp is np:
        ids = ids[chosen]
        top = pool.num_free + ids.size
        if not ids.size:
            return pool.free_ids, top
        return pool.free_ids.set(slice(pool.num_free, top), ids), top
    place = pool.num_free + jnp.cumsum(chosen, dtype=jnp.int32) - 1
    free_ids = _put(pool.free_ids, place, ids, where=chosen)
    return free_ids, pool.num_free + _count(xp, chosen)


def _count(xp: Any, mask: Any) -> Any:
    return mask.tolist().count(True) if xp is np else mask.sum(dtype=jnp.int32)


def _flatten(pool: BlockPool) -> tuple[tuple[Any, ...], None]:
    leaves = (pool.free_ids, pool.num_free, pool.ref_counts, pool.cached, pool.num_cached)
    if not isinstance(pool.ref_counts, HostArray):
        return leaves, None
    # Copies: JAX may alias a NumPy buffer, and ours changes with the next operation.
    return tuple(np.asarray(x, np.bool_ if x is pool.cached else np.int32) for x in leaves), None


jax.tree_util.register_pytree_node(BlockPool, _flatten, lambda _, leaves: BlockPool(*leaves))
