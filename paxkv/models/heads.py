"""How many KV heads the cache holds; each class here is a `_target_` of `conf/heads/*.yaml`.

The rows of the K and V projections are repeated or averaged as they are read, so that everything
after, from the planner to the kernels, sees a model that simply has another number of KV heads.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig
from paxkv.models.weights import TensorSource

_CHANGED = tuple(f"{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias"))


class Heads(Protocol):
    """Changes the number of KV heads of a model; pure."""

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the config of the changed model.

        Raises:
            ConfigError: The model's heads cannot be changed so.
        """
        ...

    def source(self, source: TensorSource, model: ModelConfig) -> TensorSource:
        """Return a source of the changed model's tensors.

        Args:
            source: Of the tensors as they are stored.
            model: The config of the stored model, not of the changed one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Native:
    """Keep the KV heads that the model was trained with.

    Source: the model.
    Assumes: nothing.
    Cost: none.
    """

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the model's config."""
        return model

    def source(self, source: TensorSource, model: ModelConfig) -> TensorSource:
        """Return the source."""
        return source


@dataclass(frozen=True, kw_only=True)
class Mha:
    """Give every query head a KV head of its own: what the model would cost without GQA.

    Source: multi-head attention is what grouped-query attention (arXiv 2305.13245) saves from; each
    KV head is repeated for the query heads of its group.
    Assumes: nothing; the output is the model's own up to rounding.
    Cost: the cache is larger by the size of a group, and so is what attention reads.
    """

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the config with as many KV heads as query heads."""
        return dataclasses.replace(model, num_kv_heads=model.num_heads)

    def source(self, source: TensorSource, model: ModelConfig) -> TensorSource:
        """Return a source whose K and V heads are repeated."""
        group = model.num_heads // model.num_kv_heads
        return _ChangedHeads(source, model, lambda heads: np.repeat(heads, group, axis=0))


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Average groups of neighbouring KV heads, without the training that would mend the loss.

    Source: mean pooling is how the GQA paper (arXiv 2305.13245) converts a checkpoint; there the
    model is trained on for 5 % of its original steps, here it is not.
    Assumes: heads of a group hold similar keys and values, which nobody trained them to.
    Cost: the output changes and quality falls; the cache is smaller by the size of a group.

    Attributes:
        num_kv_heads: KV heads left in each layer; divides the model's own number.
    """

    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        if type(self.num_kv_heads) is not int or self.num_kv_heads < 1:
            raise ConfigError(
                f"heads.num_kv_heads={self.num_kv_heads}: a whole number from 1 is needed. "
                "Try heads.num_kv_heads=1."
            )

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the config with fewer KV heads.

        Raises:
            ConfigError: The model's number of KV heads is no multiple of `num_kv_heads`.
        """
        own = model.num_kv_heads
        if own % self.num_kv_heads:
            fitting = max(n for n in range(1, own + 1) if own % n == 0 and n <= self.num_kv_heads)
            raise ConfigError(
                f"heads.num_kv_heads={self.num_kv_heads}: must divide the {own} KV heads of the "
                f"model. Try heads.num_kv_heads={fitting}."
            )
        return dataclasses.replace(model, num_kv_heads=self.num_kv_heads)

    def source(self, source: TensorSource, model: ModelConfig) -> TensorSource:
        """Return a source whose K and V heads are averaged."""

        def mean(heads: np.ndarray) -> np.ndarray:
            groups = heads.reshape(self.num_kv_heads, -1, *heads.shape[1:])
            return groups.astype(np.float32).mean(axis=1)

        return _ChangedHeads(source, model, mean)


@dataclass(frozen=True)
class _ChangedHeads:
    """A source whose K and V projections, biases included, have other heads.

    Attributes:
        change: Maps [kv_head, dim, ...] of the stored model to that of the changed one.
    """

    stored: TensorSource
    model: ModelConfig
    change: Callable[[np.ndarray], np.ndarray]

    @property
    def description(self) -> str:
        """The stored source's, for messages."""
        return self.stored.description

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return self.stored.has(name)

    def read(self, name: str) -> np.ndarray:
        """Return the tensor, changed where it is a K or V projection."""
        tensor = self.stored.read(name)
        rows = self.model.num_kv_heads * self.model.head_dim
        # A tensor of another shape is left alone: who reads it says what does not fit.
        if not name.endswith(_CHANGED) or tensor.shape[0] != rows:
            return tensor
        heads = tensor.reshape(self.model.num_kv_heads, self.model.head_dim, *tensor.shape[1:])
        changed = self.change(heads)
        return changed.reshape(-1, *tensor.shape[1:])
