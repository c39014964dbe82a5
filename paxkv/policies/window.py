"""Window: how many recent tokens each layer attends to, and so keeps in the cache."""

from dataclasses import dataclass
from typing import Protocol

from paxkv.cache.groups import Span
from paxkv.policies.checks import refuse, with_fix
from paxkv.workload.checks import count_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerView:
    """A layer of the model as a window policy sees it.

    Attributes:
        layer: Its number, from 0.
        window: Its own window in tokens, the query's counted; None where it attends to all.
    """

    layer: int
    num_layers: int
    window: int | None


class WindowPolicy(Protocol):
    """Sets the window of each layer, once, before the cache is laid out; pure."""

    def choose(self, layer: LayerView) -> Span:
        """Return what the layer attends to; layers with equal answers share a group of blocks."""
        ...


@dataclass(frozen=True, kw_only=True)
class Full:
    """Leave the model as it is: layers that come with a window keep it.

    Source: the model.

    Assumes: nothing.
    Cost: the cache grows with the request, in layers without a window of their own.
    """

    def choose(self, layer: LayerView) -> Span:
        """Return the layer's own window."""
        return Span(layer.window)


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """Let every layer attend to the last `size` tokens only.

    Source: sliding window attention, as in Longformer (arXiv 2004.05150) and Mistral 7B (arXiv
    2310.06825); here it is imposed on a model that was trained without, which changes its output.

    Assumes: what matters is near; a model that was trained with full attention loses quality as
    soon as its first tokens leave the window.
    Cost: blocks of a request are bounded by the window; those outside are freed at once.

    Attributes:
        size: Tokens, the query's counted; a layer whose own window is smaller keeps it.
    """

    size: int = 256

    def __post_init__(self) -> None:
        refuse(_size_problems(self.size))

    def choose(self, layer: LayerView) -> Span:
        """Return the smaller of `size` and the layer's own window."""
        return Span(_narrower(layer.window, self.size))


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """Let every layer attend to the first few tokens and to the last `size`.

    Source: StreamingLLM (arXiv 2309.17453); there positions are counted within the cache, here they
    stay those of the request, so a request is no longer than the model was made for.

    Assumes: attention that has nothing to look at goes to the first tokens, so keeping them keeps
    the model's quality; what lies between them and the window does not matter.
    Cost: blocks of a request are bounded by the window and the sinks.

    Attributes:
        size: Recent tokens, the query's counted; a layer whose own window is no larger keeps that,
            without sinks: it never saw them in training.
        num_sink_tokens: First tokens that stay visible.
    """

    size: int = 256
    num_sink_tokens: int = 4

    def __post_init__(self) -> None:
        refuse(
            [
                *_size_problems(self.size),
                *with_fix(
                    count_problem("window.num_sink_tokens", self.num_sink_tokens),
                    "window.num_sink_tokens=4, or window=sliding for none",
                ),
            ]
        )

    def choose(self, layer: LayerView) -> Span:
        """Return `size` and the sinks, or the layer's own window if that is no larger."""
        if layer.window is not None and layer.window <= self.size:
            return Span(layer.window)
        return Span(self.size, self.num_sink_tokens)


def _narrower(own: int | None, size: int) -> int:
    return size if own is None else min(own, size)


def _size_problems(size: object) -> list[str]:
    return with_fix(count_problem("window.size", size), "window.size=256, or window=full for all")
