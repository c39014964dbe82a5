"""Victim: which running request gives its blocks back when the pool is full."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paxkv.policies.view import RequestView


class VictimPolicy(Protocol):
    """Chooses whom to preempt; pure."""

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return one of `candidates`.

        Args:
            candidates: Running requests in the order in which they were admitted; the one that
                needs the blocks is among them and may be chosen.
            need_blocks: Blocks still missing; asked again while one victim does not suffice.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Lifo:
    """Preempt the request that was admitted last.

    Source: vLLM, which pops the tail of its running list.

    Assumes: the oldest request is nearest to its end, so the youngest loses least.
    Cost: O(1).
    """

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return the last of the candidates."""
        del need_blocks
        return candidates[-1]
