"""Eviction: which cached blocks that nobody holds are dropped to make room."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paxkv.blocks.evictable import Evictable


class EvictionPolicy(Protocol):
    """Chooses cached blocks to drop; pure."""

    def choose(self, evictable: Evictable, need_blocks: int) -> Sequence[int]:
        """Return `need_blocks` different block ids out of `evictable`, without changing it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lru:
    """Drop the blocks that were used longest ago; of one request, its last blocks first.

    Source: vLLM's free-block queue; the end of a prefix goes first because the start is of use to
    more prompts.

    Cost: O(need_blocks).
    """

    def choose(self, evictable: Evictable, need_blocks: int) -> Sequence[int]:
        """Return the oldest blocks."""
        return evictable.oldest(need_blocks)
