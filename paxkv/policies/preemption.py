"""Preemption mode: what becomes of a victim's cache."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

from paxkv.errors import InvariantError
from paxkv.policies.checks import refuse, with_fix
from paxkv.policies.view import HostView, RequestView
from paxkv.workload.checks import count_problem

PreemptionMode = Literal["recompute", "swap"]


class PreemptionDecision(NamedTuple):
    """What becomes of a victim's cache, and what the choice was based on.

    Attributes:
        recompute_s: Estimated seconds that recomputing takes from all requests together; None where
            the policy does not estimate, or nothing was measured yet.
        swap_s: The same for swapping out and in.
    """

    mode: PreemptionMode
    recompute_s: float | None = None
    swap_s: float | None = None


class PreemptionPolicy(Protocol):
    """Chooses the mode for one victim; pure.

    Attributes:
        preempts: Whether the scheduler may preempt at all.
    """

    preempts: ClassVar[bool]

    def host_capacity(self, num_blocks: int) -> int:
        """Return the blocks of host memory to set aside beside a device pool of `num_blocks`."""
        ...

    def choose(self, victim: RequestView, host: HostView) -> PreemptionDecision:
        """Return the decision; `swap` needs `victim.filled_blocks <= host.free_blocks`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Drop the victim's blocks; on resume prefill its prompt and the tokens it has generated.

    Blocks that are in the prefix cache stay there until evicted, so a quick resume is cheap.

    Source: PagedAttention (SOSP 2023), section 4.5.

    Assumes: prefill is fast against the host link, or host memory is short.
    Cost: the prefill of `context_len` tokens, less what the prefix cache still holds.
    """

    preempts: ClassVar[bool] = True

    def host_capacity(self, num_blocks: int) -> int:
        """Return 0: nothing is kept in host memory."""
        del num_blocks
        return 0

    def choose(self, victim: RequestView, host: HostView) -> PreemptionDecision:
        """Return `recompute`."""
        del victim, host
        return PreemptionDecision("recompute")


@dataclass(frozen=True, kw_only=True)
class _UsesHost:
    """Keeps victims' blocks in host memory.

    Attributes:
        host_blocks: Blocks of host memory; None takes as many as the device pool has.
    """

    host_blocks: int | None = None

    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.host_blocks is not None:
            refuse(
                with_fix(
                    count_problem("preempt.host_blocks", self.host_blocks, low=0),
                    "preempt.host_blocks=null for as many as the device pool has",
                )
            )

    def host_capacity(self, num_blocks: int) -> int:
        """Return `host_blocks`, or the size of the device pool."""
        return num_blocks if self.host_blocks is None else self.host_blocks


@dataclass(frozen=True, kw_only=True)
class Swap(_UsesHost):
    """Copy the victim's blocks to host memory and back; recompute when host memory is full.

    Source: PagedAttention (SOSP 2023), section 4.5; here the fallback is decided per request.

    Assumes: the host link is fast against prefill.
    Cost: two copies of `filled_blocks` blocks over the host link.

    Attributes:
        host_blocks: Blocks of host memory; None takes as many as the device pool has.
    """

    def choose(self, victim: RequestView, host: HostView) -> PreemptionDecision:
        """Return `swap` if the victim's blocks fit into host memory."""
        return PreemptionDecision("swap" if _can_swap(victim, host) else "recompute")


@dataclass(frozen=True, kw_only=True)
class Auto(_UsesHost):
    """Swap or recompute, whichever takes less time from all requests by the speeds measured so far.

    Recomputing takes the victim's prefill time from the victim, and from each other running request
    whose steps it fills. Swapping takes two copies from the victim, and from each other one too if
    the engine waits for copies. A speed that was not measured yet is measured by using it: the copy
    first; while prefill is the unknown one, it recomputes.

    Source: PagedAttention (SOSP 2023), section 7.3, compares the two by block size; the choice
    request by request, with the delay of the others, is ours.

    Assumes: times are linear in tokens and blocks, and speeds change slowly. The prefix cache is
    taken to hold nothing when the victim resumes.
    Cost: O(1) a victim.

    Attributes:
        host_blocks: Blocks of host memory; None takes as many as the device pool has.
    """

    def choose(self, victim: RequestView, host: HostView) -> PreemptionDecision:
        """Return the cheaper mode with both estimates; `recompute` if the blocks do not fit."""
        recompute_s, swap_s = _recompute_s(victim, host), _swap_s(victim, host)
        mode: PreemptionMode = "recompute"
        if _can_swap(victim, host) and _swap_is_better(recompute_s, swap_s):
            mode = "swap"
        return PreemptionDecision(mode, recompute_s, swap_s)


@dataclass(frozen=True, kw_only=True)
class Never:
    """Preempt nothing; the scheduler refuses this unless admission promises every block.

    Source: the engines before PagedAttention, which reserve and never preempt.

    Assumes: `admit=guaranteed`.
    Cost: none.
    """

    preempts: ClassVar[bool] = False

    def host_capacity(self, num_blocks: int) -> int:
        """Return 0: nothing is kept in host memory."""
        del num_blocks
        return 0

    def choose(self, victim: RequestView, host: HostView) -> PreemptionDecision:
        """Refuse: nothing may ask for a victim.

        Raises:
            InvariantError: Always.
        """
        del host
        raise InvariantError(
            f"preempt=none: request {victim.request_id} was to be preempted, which must never be. "
            "Only admit=guaranteed promises every block; try that, or preempt=recompute."
        )


def _can_swap(victim: RequestView, host: HostView) -> bool:
    """Return whether there is something to keep, and room for it."""
    return 0 < victim.filled_blocks <= host.free_blocks


def _recompute_s(victim: RequestView, host: HostView) -> float | None:
    if host.prefill_tokens_per_s is None:
        return None
    return victim.context_len / host.prefill_tokens_per_s * (1 + host.num_others)


def _swap_s(victim: RequestView, host: HostView) -> float | None:
    if host.copy_bytes_per_s is None:
        return None
    delayed = 1 + (host.num_others if host.copies_block_engine else 0)
    out_and_in_bytes = 2 * victim.filled_blocks * host.bytes_per_block
    return out_and_in_bytes / host.copy_bytes_per_s * delayed


def _swap_is_better(recompute_s: float | None, swap_s: float | None) -> bool:
    if swap_s is None:
        return True
    return recompute_s is not None and swap_s < recompute_s
