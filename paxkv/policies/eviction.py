"""Eviction: which cached blocks that nobody holds are dropped to make room."""

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

    Cost: O(need_blocks).
    """

    def choose(self, oldest_first: Iterator[CachedBlock], need_blocks: int) -> Sequence[int]:
        """Return the first blocks."""
        return [block.block_id for block in islice(oldest_first, need_blocks)]
