"""The two steps that the device executor compiles: functions of weights, pages and a batch."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from paxkv.cache.attend import PagedAttention
from paxkv.cache.channel import StepTokens
from paxkv.cache.mixed import Cache
from paxkv.engine import sampler
from paxkv.engine.ragged import lay_out
from paxkv.models.decoder import Decoder

Weights = list[jax.Array]


@dataclass(frozen=True)
class Forward:
    """What a step computes; jit `decode` and `prefill` with the pages donated (argument 1).

    Attributes:
        merge: Makes a decoder of its weights.
        attention: Writes K and V and attends, layer by layer.
        unroll: See `Decoder.hidden`.
    """

    merge: Callable[[Weights], Decoder]
    attention: PagedAttention
    unroll: bool

    def decode(
        self,
        weights: Weights,
        pages: Cache,
        tokens: jax.Array,
        query_lens: jax.Array,
        context_lens: jax.Array,
        block_tables: jax.Array,
        rows: jax.Array,
        *sampling: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """One token a row: write its K and V, attend, draw the next token."""
        del query_lens  # 1, or 0 for padding, which context_lens says as well
        positions = context_lens - 1
        slots = self.attention.slots(block_tables, positions, context_lens > 0)
        number = jnp.arange(len(tokens), dtype=jnp.int32)
        step = StepTokens(
            rows=rows,
            before=positions,
            after=context_lens,
            row=number,
            position=jnp.maximum(positions, 0),
            valid=context_lens > 0,
            queries=number[:, None],
        )

        def attend(q, k, v, pages, layer):
            exact = self.attention.exact_keys(k, pages, step, layer)
            pages = self.attention.write(k, v, pages, slots, layer, exact)
            attended = self.attention.decode(q, pages, block_tables, context_lens, layer, exact)
            return attended, pages

        decoder = self.merge(weights)
        hidden, pages = decoder.hidden(
            tokens, jnp.maximum(positions, 0), pages, attend, unroll=self.unroll
        )
        return pages, self._draw(decoder.logits(hidden), sampling)

    def prefill(
        self,
        weights: Weights,
        pages: Cache,
        tokens: jax.Array,
        query_lens: jax.Array,
        context_lens: jax.Array,
        block_tables: jax.Array,
        rows: jax.Array,
        *sampling: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """A chunk a row: write its K and V, attend causally, draw the token after its last one."""
        ragged = lay_out(query_lens, context_lens, tokens.shape[0])
        slots = self.attention.slots(block_tables[ragged.row], ragged.position, ragged.valid)
        tables = block_tables[ragged.tile_row]
        step = StepTokens(
            rows=rows,
            before=context_lens - query_lens,
            after=context_lens,
            row=ragged.row,
            position=ragged.position,
            valid=ragged.valid,
            queries=ragged.tile_tokens,
        )

        def attend(q, k, v, pages, layer):
            exact = self.attention.exact_keys(k, pages, step, layer)
            pages = self.attention.write(k, v, pages, slots, layer, exact)
            attended = self.attention.prefill(
                q[ragged.tile_tokens],
                pages,
                tables,
                ragged.tile_context_lens,
                ragged.tile_query_lens,
                layer,
                exact,
            )
            return attended[ragged.token_tile, ragged.token_place], pages

        decoder = self.merge(weights)
        hidden, pages = decoder.hidden(tokens, ragged.position, pages, attend, unroll=self.unroll)
        return pages, self._draw(decoder.logits(hidden[ragged.last_token]), sampling)

    def _draw(self, logits: jax.Array, sampling: tuple[jax.Array, ...]) -> jax.Array:
        return sampler.sample(logits, *sampling) if sampling else sampler.greedy(logits)


def split_weights(decoder: Decoder) -> tuple[Weights, Callable[[Weights], Decoder]]:
    """Return a decoder's arrays, and what makes a decoder of such arrays."""
    graph, state = nnx.split(decoder)
    # A flat list: flattening the nested state costs more than the scheduler may, every step.
    leaves, tree = jax.tree.flatten(state)
    return leaves, lambda weights: nnx.merge(graph, jax.tree.unflatten(tree, weights))
