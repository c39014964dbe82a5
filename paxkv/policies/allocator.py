"""Allocator: blocks one at a time, anywhere, or one run of neighbours set aside in advance."""

from dataclasses import dataclass
from typing import ClassVar, Protocol


class AllocatorPolicy(Protocol):
    """Says how much room a request takes when it starts; pure.

    Attributes:
        contiguous: Whether a request's blocks are neighbours in memory, reserved when it starts.
    """

    contiguous: ClassVar[bool]

    def reserve_tokens(
        self, context_tokens: int, max_total_tokens: int, max_model_len: int
    ) -> int | None:
        """Return the tokens to reserve room for; None takes blocks one at a time, anywhere.

        Args:
            context_tokens: Tokens that the request starts with: its prompt.
            max_total_tokens: Prompt and output when it reaches its limit; at least
                `context_tokens`, at most `max_model_len`.
            max_model_len: Longest request that the engine takes.

        Returns:
            From `max_total_tokens` up to `max_model_len`, or None.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Take a block when the last one is full, wherever one is free.

    Source: PagedAttention (SOSP 2023), section 4.

    Assumes: kernels find a request's blocks through a table.
    Cost: at most the last block of a request is partly unused.
    """

    contiguous: ClassVar[bool] = False

    def reserve_tokens(
        self, context_tokens: int, max_total_tokens: int, max_model_len: int
    ) -> int | None:
        """Return None: nothing is reserved."""
        del context_tokens, max_total_tokens, max_model_len
        return None


@dataclass(frozen=True, kw_only=True)
class ContiguousMax:
    """Reserve room for the longest request that the engine takes.

    Source: the baseline "Orca (Max)" of PagedAttention (SOSP 2023), section 6; there memory is
    handed out by a buddy allocator, here by first fit.

    Assumes: nothing is known of the output.
    Cost: all that a request does not use stays empty until it ends.
    """

    contiguous: ClassVar[bool] = True

    def reserve_tokens(
        self, context_tokens: int, max_total_tokens: int, max_model_len: int
    ) -> int | None:
        """Return `max_model_len`."""
        del context_tokens, max_total_tokens
        return max_model_len


@dataclass(frozen=True, kw_only=True)
class ContiguousPow2:
    """Reserve room for the output rounded up to a power of two.

    Source: the baseline "Orca (Pow2)" of PagedAttention (SOSP 2023), section 6; there memory is
    handed out by a buddy allocator, here by first fit. What is rounded is the limit of the output;
    where the end token is ignored it is the output, as in the paper.

    Assumes: the output is known within a factor of two.
    Cost: less than half of what is reserved for the output stays empty, if it reaches its limit.
    """

    contiguous: ClassVar[bool] = True

    def reserve_tokens(
        self, context_tokens: int, max_total_tokens: int, max_model_len: int
    ) -> int | None:
        """Return the prompt and a power of two for the rest, at most `max_model_len`."""
        reserved = context_tokens + _power_of_two(max_total_tokens - context_tokens)
        return min(reserved, max_model_len)


@dataclass(frozen=True, kw_only=True)
class ContiguousOracle:
    """Reserve room for the request's limit, and no more.

    Source: the baseline "Orca (Oracle)" of PagedAttention (SOSP 2023), section 6; there memory is
    handed out by a buddy allocator, here by first fit. The paper's oracle knows the output; this
    one knows `max_tokens`, which is the same where the end token is ignored.

    Assumes: the output is known before it is generated.
    Cost: room for the output stays empty until it is written.
    """

    contiguous: ClassVar[bool] = True

    def reserve_tokens(
        self, context_tokens: int, max_total_tokens: int, max_model_len: int
    ) -> int | None:
        """Return `max_total_tokens`."""
        del context_tokens, max_model_len
        return max_total_tokens


def _power_of_two(num_tokens: int) -> int:
    """Return the smallest power of two that is not less; 0 for 0."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens > 0 else 0
