"""Admission: may the first waiting request start now, and which blocks does it take on entry."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from paxkv.cache.layout import blocks_needed
from paxkv.policies.checks import is_number, refuse, with_fix
from paxkv.policies.view import PoolView
from paxkv.workload.checks import count_problem, number_problem

AdmissionDecision = Literal["wait", "chunk", "context", "guarantee"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionNeed:
    """What the request at the head of the queue needs.

    Attributes:
        context_tokens: Tokens whose K and V must be in the cache before its next token.
        open_tokens: Tokens it may still generate before its limit, and that need new blocks.
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

    def choose(self, view: PoolView, need: AdmissionNeed) -> AdmissionDecision:
        """Return what becomes of the request.

        `wait`: it stays at the head of the queue. Otherwise it starts, and the scheduler allocates
        at once: `chunk`: the blocks of its first step; `context`: those of its whole context;
        `guarantee`: the same, and promises it all others up to `need.max_blocks`, so that it is
        never preempted.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class _Watermarked:
    """Keeps a share of the pool free while anything runs.

    An idle engine admits whatever fits: the watermark protects running requests, and without one
    there is nothing to protect.

    Attributes:
        watermark: Share of the pool kept free, 0 to below 1.
    """

    watermark: float = 0.02

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> list[str]:
        if is_number(self.watermark) and 0.0 <= self.watermark < 1.0:  # also refuses NaN
            return []
        return [
            f"admit.watermark={self.watermark}: the share of blocks kept free lies in [0, 1). "
            "Try admit.watermark=0.02."
        ]

    def _leaves_enough(self, view: PoolView, taken_blocks: int, growth_blocks: int = 0) -> bool:
        """Return whether the blocks left cover the watermark, and growth to come on top of it."""
        left = view.available_blocks - taken_blocks
        if view.num_running == 0 or view.is_due:
            return left >= 0
        return left >= math.ceil(self.watermark * view.num_blocks) + growth_blocks


@dataclass(frozen=True, kw_only=True)
class FullPrompt(_Watermarked):
    """Admit when the whole remaining context fits above the watermark.

    The blocks of the whole context are taken on entry, so that two requests admitted in one step
    count each other.

    Source: vLLM's `can_allocate` (PagedAttention, SOSP 2023, section 4.5); there the watermark also
    applies to an idle engine.

    Assumes: outputs grow slowly against the pool, so a few free blocks avoid most preemptions.
    Cost: O(1) a request.

    Attributes:
        watermark: Share of the pool kept free, 0 to below 1.
    """

    def choose(self, view: PoolView, need: AdmissionNeed) -> AdmissionDecision:
        """Return `context` if the free blocks left are at least the watermark's share."""
        taken = need.revived_blocks + need.context_blocks
        return "context" if self._leaves_enough(view, taken) else "wait"


@dataclass(frozen=True, kw_only=True)
class FirstChunk(_Watermarked):
    """Admit when the first chunk of the context fits above the watermark.

    Prompts start earliest this way; one that outgrows the pool halfway preempts others or itself.

    Source: vLLM V1, whose scheduler allocates for the tokens of the coming step only.

    Assumes: blocks come free about as fast as the admitted prompts are prefilled.
    Cost: O(1) a request; more preemptions than `full_prompt` where prompts are long.

    Attributes:
        watermark: Share of the pool kept free, 0 to below 1.
    """

    def choose(self, view: PoolView, need: AdmissionNeed) -> AdmissionDecision:
        """Return `chunk` if the free blocks left are at least the watermark's share."""
        taken = need.revived_blocks + need.chunk_blocks
        return "chunk" if self._leaves_enough(view, taken) else "wait"


@dataclass(frozen=True, kw_only=True)
class Guaranteed:
    """Admit when the longest output the request may have fits too, and promise it those blocks.

    Nothing that is admitted this way is ever preempted.

    Source: reservation of the longest possible request, as in Orca (OSDI 2022); here the blocks are
    promised and not taken, so other requests may not use them, but no place in them is fixed.

    Assumes: a preemption is worse than an idle block, or limits are close to what outputs use.
    Cost: O(1) a request; the blocks between an output and its limit stay idle.
    """

    def choose(self, view: PoolView, need: AdmissionNeed) -> AdmissionDecision:
        """Return `guarantee` if all blocks it can ever hold can be promised."""
        fits_now = need.revived_blocks + need.context_blocks <= view.available_blocks
        return "guarantee" if fits_now and need.max_blocks <= view.promisable_blocks else "wait"


@dataclass(frozen=True, kw_only=True)
class Expected(_Watermarked):
    """Admit when the context fits, and the tokens that it and the running ones will generate.

    How many those are is learnt from the requests that have ended: the share of its limit that a
    request uses, times the tokens that are open. The watermark stays free on top of that, as the
    margin for what the expectation gets wrong.

    Source: admission by predicted output length, as in S3 (arXiv 2306.06000); there a model
    predicts each request's length from its prompt, here one share is learnt for all.

    Assumes: outputs to come are like those that ended. Short outputs end first, so the share is
    too small while a run warms up; the prior is there for that. That all requests are at their
    longest at the same time, which overestimates.
    Cost: O(1) a request.

    Attributes:
        watermark: Share of the pool kept free, 0 to below 1.
        prior_share: Share of its limit that a request uses, as believed before any has ended.
        prior_tokens: How many tokens of ended requests' limits that belief is worth.
    """

    prior_share: float = 0.5
    prior_tokens: int = 1024

    def _problems(self) -> list[str]:
        return [
            *super()._problems(),
            *with_fix(
                number_problem("admit.prior_share", self.prior_share, high=1.0),
                "admit.prior_share=0.5",
            ),
            *with_fix(
                count_problem("admit.prior_tokens", self.prior_tokens), "admit.prior_tokens=1024"
            ),
        ]

    def choose(self, view: PoolView, need: AdmissionNeed) -> AdmissionDecision:
        """Return `context` if the blocks left cover the expected growth and the watermark."""
        taken = need.revived_blocks + need.context_blocks
        growth = self._growth_blocks(view, need)
        return "context" if self._leaves_enough(view, taken, growth) else "wait"

    def _growth_blocks(self, view: PoolView, need: AdmissionNeed) -> int:
        """Return the blocks that the running requests and this one are expected to need yet."""
        open_tokens = view.running_open_tokens + need.open_tokens
        tokens = math.ceil(self.expected_share(view) * open_tokens)
        return blocks_needed(tokens, view.block_size) * view.num_groups

    def expected_share(self, view: PoolView) -> float:
        """Return the expected share of its limit that a request uses, 0 to 1."""
        used = self.prior_share * self.prior_tokens + view.ended_output_tokens
        return used / (self.prior_tokens + view.ended_limit_tokens)
