"""Eviction: which cached blocks that nobody holds are dropped to make room."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from paxkv.blocks.evictable import CachedBlock


class EvictionPolicy(Protocol):
    """Chooses cached blocks to drop; pure."""

    def choose(self, oldest_first: Iterator[CachedBlock], need_blocks: int) -> Sequence[int]:
        """Return the ids of `need_blocks` different blocks.

        Args:
            oldest_first: The evictable blocks, the longest unused first; at least `need_blocks`.
            need_blocks: How many to drop.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Lru:
    """Drop the blocks that were used longest ago; of one request, its last blocks first.

    Source: vLLM's free-block queue; the end of a prefix goes first because the start is of use to
    more prompts.

    Assumes: what was used lately is used again.
    Cost: O(need_blocks).
    """

    def choose(self, oldest_first: Iterator[CachedBlock], need_blocks: int) -> Sequence[int]:
        """Return the first blocks."""
        return [block.block_id for block in islice(oldest_first, need_blocks)]


@dataclass(frozen=True, kw_only=True)
class Lfu:
    """Drop the blocks that the fewest prompts were served from; of equal ones, as `Lru` does.

    Source: least frequently used, as sglang offers it for its radix tree.

    Assumes: what was used often is used again. A block is as good as its past: one that was popular
    and no longer is stays for long.
    Cost: O(cached × log need_blocks).
    """

    def choose(self, oldest_first: Iterator[CachedBlock], need_blocks: int) -> Sequence[int]:
        """Return the blocks with the fewest uses."""
        # nsmallest keeps the order of equal ones, which is the longest unused first.
        fewest = heapq.nsmallest(need_blocks, oldest_first, key=lambda block: block.num_uses)
        return [block.block_id for block in fewest]


@dataclass(frozen=True, kw_only=True)
class Priority:
    """Drop the blocks of the least urgent requests; of equal ones, as `Lru` does.

    A block counts as the request's that held it last.

    Source: TensorRT-LLM's retention priorities; there the user gives them range by range and for a
    time, here they are those of the requests.

    Assumes: requests of one class share prompts, and an urgent class is worth its idle blocks.
    Cost: O(cached × log need_blocks).
    """

    def choose(self, oldest_first: Iterator[CachedBlock], need_blocks: int) -> Sequence[int]:
        """Return the blocks with the largest priority value."""
        least_urgent = heapq.nsmallest(need_blocks, oldest_first, key=lambda block: -block.priority)
        return [block.block_id for block in least_urgent]
