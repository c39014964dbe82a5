"""Groups of layers: layers with one window share block tables, and one pool serves all groups.

A block holds `block_size` tokens of all layers of one group. Groups have equally many places for
layers, so that a block has the same bytes in each; where the layers do not divide evenly, the last
group of a window has places that stay empty.

Source: the idea of a hybrid cache manager is vLLM's; here the size of a group is the one that
leaves the fewest places empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paxkv.cache.layout import KVLayout, blocks_needed, gib, pool_bytes
from paxkv.errors import ConfigError

MAX_GROUPS = 8
"""Each group has a block table: more of them cost the scheduler more than empty places waste."""


class Span(NamedTuple):
    """Which earlier tokens a token sees: the last `window` (itself included) and the first few.

    Attributes:
        window: Tokens; None is all.
        num_sink_tokens: First tokens of the sequence that stay visible whatever the window.
    """

    window: int | None = None
    num_sink_tokens: int = 0


FULL = Span()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables.

    Attributes:
        layers: Their numbers in the model, each at its place in a block.
        span: What their tokens see.
    """

    layers: tuple[int, ...]
    span: Span = FULL

    def sink_blocks(self, block_size: int) -> int:
        """Return the blocks at the start that are kept for their sink tokens."""
        return blocks_needed(self.span.num_sink_tokens, block_size)

    def first_live_block(self, context_len: int | np.ndarray, block_size: int) -> int | np.ndarray:
        """Return the first block, sinks aside, that the token at `context_len` can see into."""
        if self.span.window is None:
            return context_len * 0
        oldest = context_len - self.span.window + 1
        return (
            np.maximum(oldest, 0) // block_size if np.ndim(oldest) else max(oldest, 0) // block_size
        )

    def most_blocks(self, num_tokens: int, block_size: int, chunk_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at once.

        Args:
            num_tokens: Tokens in the cache at its end.
            block_size: Tokens a block.
            chunk_tokens: Most tokens it computes in a step, as by `live_chunk_tokens`: their blocks
                are taken before those outside the window are given back.
        """
        everything = blocks_needed(num_tokens, block_size)
        if self.span.window is None:
            return everything
        span = self.span.window - 1 + min(chunk_tokens, num_tokens)
        # `span` tokens in a row touch one block more than they fill, wherever they start.
        inside = blocks_needed(max(span - 1, 0), block_size) + 1
        return min(everything, self.sink_blocks(block_size) + inside)


def group_layers(spans: Sequence[Span]) -> tuple[LayerGroup, ...]:
    """Put the layers of a model into groups of equally many places.

    Args:
        spans: What the tokens of each layer see, layer 0 first.

    Raises:
        ValueError: There are no layers.
    """
    if not spans:
        raise ValueError("spans=(): a model has at least one layer")
    alike: dict[Span, list[int]] = {}
    for layer, span in enumerate(spans):
        alike.setdefault(span, []).append(layer)
    size = _places(sorted(len(layers) for layers in alike.values()))
    return tuple(
        LayerGroup(tuple(layers[start : start + size]), span)
        for span, layers in alike.items()
        for start in range(0, len(layers), size)
    )


def layers_per_block(groups: Sequence[LayerGroup]) -> int:
    """Return the places for layers in a block: `num_layers` of its `KVLayout`."""
    return max(len(group.layers) for group in groups)


def live_chunk_tokens(chunk_tokens: int, block_size: int, *, open_block_in_row: bool) -> int:
    """Return the most tokens before which a window keeps blocks in a step: those computed in it.

    Where the open block is bound to a row, its tokens count as well: if the row is lost, they are
    computed again, with what they see.
    """
    return chunk_tokens + (block_size - 1 if open_block_in_row else 0)


def most_blocks_of(
    groups: Sequence[LayerGroup], num_tokens: int, block_size: int, chunk_tokens: int
) -> int:
    """Return the most blocks of all groups that a request of `num_tokens` holds at once."""
    return sum(group.most_blocks(num_tokens, block_size, chunk_tokens) for group in groups)


def capacity_tokens(num_blocks: int, groups: Sequence[LayerGroup], layout: KVLayout) -> int:
    """Return how many tokens a pool of so many blocks holds, if no window lets any go."""
    return num_blocks // len(groups) * layout.block_size


def longest_that_fits(
    num_blocks: int,
    groups: Sequence[LayerGroup],
    block_size: int,
    chunk_tokens: int,
    *,
    at_most: int,
) -> int:
    """Return the longest request, up to `at_most` tokens, that a pool of so many blocks holds."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks_of(groups, middle, block_size, chunk_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def check_capacity(
    num_blocks: int,
    groups: Sequence[LayerGroup],
    layout: KVLayout,
    *,
    chunk_tokens: int,
    max_model_len: int,
) -> None:
    """Refuse a pool that cannot hold one request of the longest allowed length.

    Raises:
        ConfigError: With both numbers, the largest length that fits, and what to change.
    """
    size = layout.block_size
    needed = most_blocks_of(groups, max_model_len, size, chunk_tokens)
    if needed <= num_blocks:
        return
    fits = longest_that_fits(num_blocks, groups, size, chunk_tokens, at_most=max_model_len)
    lower = f"engine.max_model_len={fits} or " if fits else ""
    raise ConfigError(
        f"cache: the pool has {num_blocks} blocks of {size} tokens "
        f"({gib(pool_bytes(num_blocks, layout))}); engine.max_model_len={max_model_len} needs "
        f"{needed} blocks ({gib(pool_bytes(needed, layout))}). The largest length that fits is "
        f"{fits}. Try {lower}cache.num_blocks={needed}."
    )


def _places(counts: Sequence[int]) -> int:
    """Return how many layers share a block: as little waste as `MAX_GROUPS` groups allow."""

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = [size for size in range(1, counts[-1] + 1) if groups(size) <= MAX_GROUPS]
    return min(sizes or [counts[-1]], key=lambda size: (groups(size) * size, -size))
