"""The cached blocks that nobody holds, in the order in which they were last used."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from paxkv.blocks.prefix import PrefixIndex
from paxkv.errors import InvariantError


class CachedBlock(NamedTuple):
    """What an eviction policy sees of a block it may evict.

    Attributes:
        last_used_s: When its last holder gave it back.
        num_uses: How often a prompt was served from it.
        depth: Blocks before it in its prompt; without the first, the later ones are of no use.
        tenant: Of the request that held it last.
        priority: Of that request; lower is more urgent.
    """

    block_id: int
    last_used_s: float
    num_uses: int
    depth: int
    tenant: str = "default"
    priority: int = 0


class LastHolder(NamedTuple):
    """Who held a block last, and until when."""

    last_used_s: float
    tenant: str
    priority: int


class EvictableBlocks:
    """Mirrors, in order, the blocks that the pool counts as cached. Plain data: it pickles.

    Adding and removing take O(1) a block.
    """

    def __init__(self) -> None:
        self._holder: OrderedDict[int, LastHolder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holder)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._holder

    def __iter__(self) -> Iterator[int]:
        """Iterate over the blocks, the longest unused first."""
        return iter(self._holder)

    def add(
        self, block_ids: Iterable[int], now: float, *, tenant: str = "default", priority: int = 0
    ) -> None:
        """Add blocks as the most recently used, in this order.

        Give a finished request's blocks last block first: then the end of a prompt is evicted
        before the start without which it can't be found.

        Raises:
            InvariantError: A block is already here.
        """
        holder = LastHolder(now, tenant, priority)
        for block_id in block_ids:
            if block_id in self._holder:
                raise InvariantError(f"block {block_id}: became evictable twice")
            self._holder[int(block_id)] = holder

    def remove(self, block_ids: Iterable[int]) -> None:
        """Take out blocks that are used again or evicted.

        Raises:
            InvariantError: A block isn't here.
        """
        for block_id in block_ids:
            if self._holder.pop(block_id, None) is None:
                raise InvariantError(f"block {block_id}: not evictable, so it cannot be taken out")

    def holder_of(self, block_id: int) -> LastHolder:
        """Return who held an evictable block last.

        Raises:
            KeyError: The block isn't here.
        """
        return self._holder[block_id]

    def view(self, index: PrefixIndex) -> Iterator[CachedBlock]:
        """Iterate over what an eviction policy needs to know, the longest unused first.

        Raises:
            InvariantError: A block here isn't registered in the index.
        """
        for block_id, holder in self._holder.items():
            if block_id not in index:
                raise InvariantError(f"block {block_id}: evictable, but not in the prefix index")
            yield CachedBlock(
                block_id,
                holder.last_used_s,
                index.uses_of(block_id),
                index.depth_of(block_id),
                holder.tenant,
                holder.priority,
            )
