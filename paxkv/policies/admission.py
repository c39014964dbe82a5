"""Admission: may the first waiting request start now, and which blocks does it take on entry."""

import math
from dataclasses import dataclass
from typing import Protocol

from paxkv.errors import ConfigError
from paxkv.policies.view import PoolView


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionNeed:
    """What the request at the head of the queue needs.

    Attributes:
        context_tokens: Tokens whose K and V must be in the cache before its next token.
        open_tokens: Tokens it may still generate before its limit.
        chunk_blocks: Blocks to allocate for the first step that computes it, beyond those it
            shares from the prefix cache.
        context_blocks: The same for its whole context; less where windows let blocks go.
        max_blocks: Most blocks it can ever hold.
        revived_blocks: Shared blocks that are evictable now and stop being so.
    """

    context_tokens: int
    open_tokens: int
    chunk_blocks: int
    context_blocks: int
    max_blocks: int
    revived_blocks: int


class AdmissionPolicy(Protocol):
    """Decides whether the request at the head of the queue starts; pure."""

    def choose(self, view: PoolView, need: AdmissionNeed) -> bool:
        """Return True to admit; the scheduler then allocates `need.new_blocks` at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class FullPrompt:
    """Admit when the whole remaining context fits above the watermark.

    The blocks of the whole context are taken on entry, so that two requests admitted in one step
    count each other. An idle engine admits whatever fits: the watermark protects running
    requests, and without one there is nothing to protect.

    Source: vLLM's `can_allocate` (PagedAttention, SOSP 2023, section 4.5); there the watermark also
    applies to an idle engine.

    Assumes: outputs grow slowly against the pool, so a few free blocks avoid most preemptions.
    Cost: O(1) a request.

    Attributes:
        watermark: Share of the pool kept free, 0 to below 1.
    """

    watermark: float = 0.02

    def __post_init__(self):
        if not 0.0 <= self.watermark < 1.0:  # also refuses NaN
            raise ConfigError(
                f"admit.watermark={self.watermark}: the share of blocks kept free lies in [0, 1). "
                "Try admit.watermark=0.02."
            )

    def choose(self, view: PoolView, need: AdmissionNeed) -> bool:
        """Return True if the free blocks left are at least the watermark's share of the pool."""
        left = view.available_blocks - need.revived_blocks - need.new_blocks
        reserve = math.ceil(self.watermark * view.num_blocks) if view.num_running else 0
        return left >= reserve
