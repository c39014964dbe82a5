"""One sequence at a time through a model whose K and V are stored in some format."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxkv.cache.attend import PagedAttention, model_spans
from paxkv.cache.groups import Span, group_layers
from paxkv.cache.layout import blocks_needed
from paxkv.cache.mixed import Cache, init_cache
from paxkv.cache.quantize import KVFormat
from paxkv.models.decoder import Decoder
from paxkv.models.perplexity import Perplexity, score
from paxkv.models.source import LoadedModel
from paxkv.quality.calibrate import static_scales

CHUNK = 128
"""Tokens of a prompt that are computed at once."""


class CachedModel:
    """A model and a way to store its K and V: every key and value goes through the cache.

    Args:
        model: Computes in the dtype it was loaded in.
        kv: The format; static scales are measured on the default text.
        spans: What the tokens of each layer see; None: what the model's own windows say.
        block_size: Tokens a block.

    Attributes:
        model: The model.
        layout: Of a block of its cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVFormat,
        *,
        spans: Sequence[Span] | None = None,
        block_size: int = 16,
    ):
        config = model.config
        groups = group_layers(model_spans(config.windows) if spans is None else spans)
        self.model = model
        self.layout = kv.layout(
            model.dtype,
            groups,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
        )
        self._attention = PagedAttention(
            groups=groups,
            block_size=block_size,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            kv_scales=static_scales(model, kv),
        )
        self._graph, self._state = nnx.split(model.decoder)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers, scales included."""
        return len(self._attention.groups) * self.layout.bytes_per_token

    def perplexity(self, token_ids: Sequence[int]) -> Perplexity:
        """Score a text; see `paxkv.models.perplexity.score`."""
        cache = self._cache(len(token_ids))
        return score(self.model, list(token_ids), self._attention, cache, chunk=CHUNK)

    def predict(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the most likely token after each token of a text, int `[token]`."""
        return self._read(token_ids, self._cache(len(token_ids)))[0]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Continue a prompt by its most likely tokens, one at a time; end tokens do not stop it."""
        total = len(prompt) + num_tokens
        predicted, cache = self._read(prompt, self._cache(total), room=total)
        tokens = [int(predicted[-1])]
        for position in range(len(prompt), total - 1):
            predicted, cache = self._read(tokens[-1:], cache, room=total, start=position)
            tokens.append(int(predicted[0]))
        return tokens

    def _cache(self, num_tokens: int) -> Cache:
        blocks = blocks_needed(num_tokens, self.layout.block_size)
        num_groups = len(self._attention.groups)
        return init_cache(num_groups * blocks, self.layout, num_rows=1, num_groups=num_groups)

    def _read(
        self, token_ids: Sequence[int], cache: Cache, *, room: int | None = None, start: int = 0
    ) -> tuple[np.ndarray, Cache]:
        """Compute tokens that follow `start` cached ones; donates the cache, for `room` tokens."""
        num_groups = len(self._attention.groups)
        blocks = blocks_needed(room or len(token_ids), self.layout.block_size)
        tables = jnp.arange(num_groups * blocks, dtype=jnp.int32).reshape(num_groups, blocks)
        size = CHUNK if len(token_ids) > 1 else 1
        parts = []
        for first in range(0, len(token_ids), size):
            tokens = np.zeros(size, np.int32)
            part = token_ids[first : first + size]
            tokens[: len(part)] = part
            predicted, cache = _predict_chunk(
                self._graph,
                self._attention,
                self._state,
                cache,
                tokens,
                tables,
                np.int32(start + first),
                np.int32(len(part)),
            )
            parts.append(np.asarray(predicted)[: len(part)])
        return np.concatenate(parts), cache


@functools.partial(jax.jit, static_argnames=("graph", "attention"), donate_argnames="cache")
def _predict_chunk(
    graph: nnx.GraphDef[Decoder],
    attention: PagedAttention,
    state: nnx.State,
    cache: Cache,
    tokens: jax.Array,
    tables: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Compute a chunk and the most likely token after each of its tokens; donates the cache."""
    decoder = nnx.merge(graph, state)
    positions, attend = attention.one_row(tables, start, count, tokens.shape[0])
    hidden, cache = decoder.hidden(tokens, positions, cache, attend)
    return jnp.argmax(decoder.logits(hidden), axis=1), cache
