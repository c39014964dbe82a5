"""Victim: which running request gives its blocks back when the pool is full."""

import math
from collections.abc import Callable, Sequence
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
            need_blocks: Blocks still missing, 0 where only a row is; asked again while one victim
                does not suffice.
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


@dataclass(frozen=True, kw_only=True)
class Priority:
    """Preempt the least urgent request; of equal ones, the one that was admitted last.

    Source: vLLM's priority scheduling; there ties go by arrival.

    Assumes: urgency outweighs the work that is lost.
    Cost: O(running).
    """

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return the candidate with the largest priority value."""
        del need_blocks
        return _smallest(candidates, lambda request: -request.priority)


@dataclass(frozen=True, kw_only=True)
class Lcf:
    """Preempt the request with the least computed first: the fewest tokens in the cache.

    Source: the least-work-lost rule of preemptive scheduling.

    Assumes: a restore costs in proportion to the tokens in the cache, and whom it hits hardly
    matters. Short requests free few blocks, so that there may be more victims.
    Cost: O(running).
    """

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return the candidate with the fewest tokens in the cache."""
        del need_blocks
        return _smallest(candidates, lambda request: request.context_len)


@dataclass(frozen=True, kw_only=True)
class FewestOutput:
    """Preempt the request that has generated the fewest tokens.

    Source: sglang, which retracts the requests with the shortest outputs first; there ties go to
    the longest prompt.

    Assumes: a user who has read little of an answer minds the pause least; outputs are about
    equally long, so the one that has just begun holds its blocks for longest.
    Cost: O(running).
    """

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return the candidate with the fewest output tokens."""
        del need_blocks
        return _smallest(candidates, lambda request: request.output_len)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Preempt, among the least urgent, the request whose cache is cheapest to restore.

    Cheap means: few tokens to restore, for a large part of the blocks that are missing, from a
    request that would have kept them for long. The price is the tokens in the cache, divided by the
    part of the need that is met and by the tokens left until the limit. Blocks that others share
    meet no need, so a request that holds nothing of its own comes last.

    Source: ours. The literature has the parts: swapped or recomputed size (PagedAttention, SOSP
    2023, section 4.5), and remaining length, as shortest-remaining-first schedulers use it.

    Assumes: both ways to restore cost in proportion to the tokens in the cache, and the limit says
    how long blocks stay taken.
    Cost: O(running).
    """

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return the least urgent candidate with the lowest price."""
        return _smallest(
            candidates, lambda request: (-request.priority, _restore_price(request, need_blocks))
        )


def _restore_price(request: RequestView, need_blocks: int) -> float:
    """Return tokens to restore per part of the need met, and per token until the limit."""
    met = min(request.exclusive_blocks, need_blocks) / need_blocks if need_blocks > 0 else 1.0
    remaining_tokens = max(1, request.max_total_tokens - request.num_tokens)
    return request.context_len / (met * remaining_tokens) if met > 0 else math.inf


def _smallest(
    candidates: Sequence[RequestView], rank: Callable[[RequestView], float | tuple[float, ...]]
) -> RequestView:
    """Return the candidate with the smallest rank; of equal ones, the one admitted last."""
    return min(reversed(candidates), key=rank)  # type: ignore[arg-type]  # ranks of one kind
