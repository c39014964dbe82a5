"""Two policies outside the package: one Python file, one YAML each, nothing to register."""

from collections.abc import Sequence
from dataclasses import dataclass

from paxkv.cache.groups import Span
from paxkv.policies.view import RequestView
from paxkv.policies.window import LayerView


@dataclass(frozen=True, kw_only=True)
class MostBlocks:
    """Preempt the request that frees the most blocks, among those with enough output left.

    Attributes:
        min_left: Output tokens a request must still have before its limit to be worth it.
    """

    min_left: int = 4

    def choose(self, candidates: Sequence[RequestView], need_blocks: int) -> RequestView:
        """Return one of the candidates."""
        del need_blocks
        worth = [r for r in candidates if r.max_total_tokens - r.num_tokens >= self.min_left]
        return max(worth or candidates, key=lambda request: request.exclusive_blocks)


@dataclass(frozen=True, kw_only=True)
class EveryOther:
    """Let every other layer see a window only, as Gemma 2 was trained to.

    Attributes:
        size: Tokens that the layers 0, 2, 4, ... see.
    """

    size: int = 64

    def choose(self, layer: LayerView) -> Span:
        """Return what one layer's tokens see."""
        return Span(window=self.size) if layer.layer % 2 == 0 else Span(window=layer.window)
