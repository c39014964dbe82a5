"""Preemption mode: what becomes of a victim's cache."""

from dataclasses import dataclass
from typing import Literal, Protocol

from paxkv.errors import ConfigError
from paxkv.policies.view import RequestView

PreemptionMode = Literal["recompute", "swap"]


class PreemptionPolicy(Protocol):
    """Chooses the mode for one victim; pure."""

    def host_capacity(self, num_blocks: int) -> int:
        """Return the blocks of host memory to set aside beside a device pool of `num_blocks`."""
        ...

    def choose(self, victim: RequestView, host_free_blocks: int) -> PreemptionMode:
        """Return the mode; `swap` needs `victim.num_blocks <= host_free_blocks`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Drop the victim's blocks; on resume prefill its prompt and the tokens it has generated.

    Blocks that are in the prefix cache stay there until evicted, so a quick resume is cheap.

    Source: PagedAttention (SOSP 2023), section 4.5.
    Cost: the prefill of `context_len` tokens, less what the prefix cache still holds.
    """

    def host_capacity(self, num_blocks: int) -> int:
        """Return 0: nothing is kept in host memory."""
        del num_blocks
        return 0

    def choose(self, victim: RequestView, host_free_blocks: int) -> PreemptionMode:
        """Return `recompute`."""
        del victim, host_free_blocks
        return "recompute"


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Copy the victim's blocks to host memory and back; recompute when host memory is full.

    Source: PagedAttention (SOSP 2023), section 4.5; here the fallback is decided per request.
    Cost: two copies of `num_blocks` blocks over the host link.

    Attributes:
        host_blocks: Blocks of host memory; None takes as many as the device pool has.
    """

    host_blocks: int | None = None

    def __post_init__(self):
        if self.host_blocks is not None and self.host_blocks < 0:
            raise ConfigError(
                f"preempt.host_blocks={self.host_blocks}: a count of blocks, 0 or more. "
                "Try preempt.host_blocks=null for as many as the device pool has."
            )

    def host_capacity(self, num_blocks: int) -> int:
        """Return `host_blocks`, or the size of the device pool."""
        return num_blocks if self.host_blocks is None else self.host_blocks

    def choose(self, victim: RequestView, host_free_blocks: int) -> PreemptionMode:
        """Return `swap` if the victim's blocks fit into host memory."""
        return "swap" if victim.num_blocks <= host_free_blocks else "recompute"
