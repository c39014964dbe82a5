"""How much a KV dtype costs in quality: perplexity through the paged cache.

Every key and value is written to the cache in the given dtype and read back before it is
attended to, as in serving, so that quantisation counts in full.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import KVPages, init_pages, paged_prefill, write_kv
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
) -> Perplexity:
    """Measure a text, teacher-forced, with keys and values stored in a KV dtype.

    Args:
        model: Computes in the dtype it was loaded in.
        token_ids: The text, at least two tokens, at most the model's length.
        kv_dtype: Storage dtype of the pool, a key of `pallas_kernels.KV_DTYPES`.
        block_size: Tokens a block.
        chunk: Tokens computed at once; the result does not depend on it beyond rounding.

    Raises:
        ValueError: Fewer than two tokens, or more than the model's length.

    Source: the usual definition; each token but the first is predicted from all before it, in
    one context (no sliding evaluation window).
    """
    config = model.config
    if not 2 <= len(token_ids) <= config.max_model_len:
        raise ValueError(
            f"token_ids has {len(token_ids)} tokens: perplexity needs 2 to {config.max_model_len}."
        )
    num_blocks = -(-len(token_ids) // block_size)
    pages = init_pages(
        num_blocks,
        config.num_layers,
        config.num_kv_heads,
        block_size,
        config.head_dim,
        kv_dtype,
    )
    graph, state = nnx.split(model.decoder)
    table = jnp.arange(num_blocks, dtype=jnp.int32)
    padded = np.zeros(-(-len(token_ids) // chunk) * chunk + 1, np.int32)
    padded[: len(token_ids)] = token_ids
    parts = []
    for start in range(0, len(token_ids), chunk):
        tokens = padded[start : start + chunk + 1]
        count = min(chunk, len(token_ids) - start)
        nll, pages = _score_chunk(graph, state, pages, tokens, table, start, count)
        parts.append(np.asarray(nll))
    nll = np.concatenate(parts)[: len(token_ids) - 1]
    return Perplexity(float(nll.astype(np.float64).mean()), nll)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="pages")
def _score_chunk(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    pages: KVPages,
    tokens: jax.Array,
    table: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, KVPages]:
    """Run tokens[:-1] as one prefill chunk and score tokens[1:]; donates pages.

    Args:
        graph: The decoder without its weights.
        state: The weights.
        pages: Holds the tokens before `start`.
        tokens: i32 [chunk + 1].
        table: i32 [block].
        start: Tokens in the cache before this chunk.
        count: Tokens of the chunk that are no padding.
    """
    decoder = nnx.merge(graph, state)
    index = jnp.arange(tokens.shape[0] - 1, dtype=jnp.int32)
    positions = start + index
    block = table[positions // pages.block_size]
    slots = block * pages.block_size + positions % pages.block_size
    slots = jnp.where(index < count, slots, -1)

    def attend(q, k, v, pages, layer):
        pages = write_kv(k, v, pages, slots, layer=layer)
        out = paged_prefill(
            q[None], pages, table[None], (start + count)[None], count[None], layer=layer
        )
        return out[0], pages

    hidden, pages = decoder.hidden(tokens[:-1], positions, pages, attend)
    log_probs = jax.nn.log_softmax(decoder.logits(hidden))
    nll = -jnp.take_along_axis(log_probs, tokens[1:, None], axis=1)[:, 0]
    return nll, pages
