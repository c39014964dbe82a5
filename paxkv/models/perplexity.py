"""How much a KV dtype costs in quality: perplexity through the paged cache.

Every key and value is written to the cache in the given dtype and read back before it is
attended to, as in serving, so that quantisation counts in full.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import init_pages
from paxkv.cache.attend import PagedAttention, model_spans
from paxkv.cache.groups import Span, group_layers, layers_per_block
from paxkv.cache.layout import blocks_needed
from paxkv.cache.mixed import Cache
from paxkv.models.decoder import Decoder
from paxkv.models.source import LoadedModel


class Perplexity(NamedTuple):
    """What a model makes of a text.

    Attributes:
        mean_nll: Mean negative log-likelihood of tokens 2 to n, nats.
        nll: f32 [n - 1], nats a token.
    """

    mean_nll: float
    nll: np.ndarray

    @property
    def perplexity(self) -> float:
        """exp(mean_nll)."""
        return math.exp(self.mean_nll)


def perplexity(
    model: LoadedModel,
    token_ids: list[int],
    kv_dtype: str,
    block_size: int = 16,
    chunk: int = 128,
    spans: Sequence[Span] | None = None,
) -> Perplexity:
    """Measure a text, teacher-forced, with keys and values stored in a KV dtype.

    Args:
        model: Computes in the dtype it was loaded in.
        token_ids: The text, at least two tokens, at most the model's length.
        kv_dtype: Storage dtype of the pool, a key of `pallas_kernels.KV_DTYPES`.
        block_size: Tokens a block.
        chunk: Tokens computed at once; the result does not depend on it beyond rounding.
        spans: What the tokens of each layer see; None: what the model's own windows say.

    Raises:
        ValueError: Fewer than two tokens, or more than the model's length.

    Source: the usual definition; each token but the first is predicted from all before it, in
    one context (no sliding evaluation window).
    """
    config = model.config
    groups = group_layers(model_spans(config.windows) if spans is None else spans)
    attention = PagedAttention(
        groups=groups,
        block_size=block_size,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
    )
    pages = init_pages(
        len(groups) * blocks_needed(len(token_ids), block_size),
        layers_per_block(groups),
        config.num_kv_heads,
        block_size,
        config.head_dim,
        kv_dtype,
    )
    return score(model, token_ids, attention, pages, chunk=chunk)


def score(
    model: LoadedModel,
    token_ids: list[int],
    attention: PagedAttention,
    pages: Cache,
    *,
    chunk: int = 128,
) -> Perplexity:
    """Measure a text, teacher-forced, through a pool of the caller's; donates pages.

    Args:
        model: Computes in the dtype it was loaded in.
        token_ids: The text, at least two tokens, at most the model's length.
        attention: Writes to the pool and attends over it.
        pages: At least the blocks of the text for each group of `attention`.
        chunk: Tokens computed at once.

    Raises:
        ValueError: Fewer than two tokens, or more than the model's length.
    """
    count, longest = len(token_ids), model.config.max_model_len
    if not 2 <= count <= longest:
        raise ValueError(f"token_ids has {count} tokens: perplexity needs 2 to {longest}.")
    graph, state = nnx.split(model.decoder)
    blocks = blocks_needed(count, attention.block_size)
    num_groups = len(attention.groups)
    tables = jnp.arange(num_groups * blocks, dtype=jnp.int32).reshape(num_groups, blocks)
    padded = np.zeros(-(-count // chunk) * chunk + 1, np.int32)
    padded[:count] = token_ids
    parts = []
    for start in range(0, count, chunk):
        tokens = padded[start : start + chunk + 1]
        length = min(chunk, count - start)
        nll, pages = _score_chunk(graph, attention, state, pages, tokens, tables, start, length)
        parts.append(np.asarray(nll))
    nll = np.concatenate(parts)[: count - 1]
    return Perplexity(float(nll.astype(np.float64).mean()), nll)


@functools.partial(jax.jit, static_argnames=("graph", "attention"), donate_argnames="pages")
def _score_chunk(
    graph: nnx.GraphDef[Decoder],
    attention: PagedAttention,
    state: nnx.State,
    pages: Cache,
    tokens: jax.Array,
    tables: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Run tokens[:-1] as one prefill chunk and score tokens[1:]; donates pages.

    Args:
        graph: The decoder without its weights.
        attention: Writes to the pages and attends over them.
        state: The weights.
        pages: Holds the tokens before `start`.
        tokens: i32 [chunk + 1].
        tables: i32 [group, block].
        start: Tokens in the cache before this chunk.
        count: Tokens of the chunk that are no padding.
    """
    decoder = nnx.merge(graph, state)
    positions, attend = attention.one_row(tables, start, count, tokens.shape[0] - 1)
    hidden, pages = decoder.hidden(tokens[:-1], positions, pages, attend)
    log_probs = jax.nn.log_softmax(decoder.logits(hidden))
    nll = -jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]
    return nll, pages
