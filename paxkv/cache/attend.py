"""Attention over the paged pool, layer by layer: which group's tables, which place, which window.

The model's layers are numbered as in the model; a block of the pool holds the layers of one group
at its places. What a layer needs to know of that is here, and only here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages, paged_decode, paged_prefill
from paxkv.cache.channel import (
    ChannelPages,
    ExactKeys,
    StepTokens,
    attend_channel,
    exact_keys,
    write_channel,
)
from paxkv.cache.groups import FULL, LayerGroup, Span
from paxkv.cache.mixed import Cache, MixedPages, attend_at, write_at
from paxkv.cache.scales import StaticScales

Layer = int | jax.Array


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """Writes K and V to their group's blocks and attends over them; traced inside a step.

    Attributes:
        groups: The model's layers, each in one group.
        block_size: Tokens a block.
        scale: Multiplies the scores; None is `head_dim ** -0.5`.
        soft_cap: Bound of the scores; None is none.
        kv_scales: Static scales of a pool that carries none of its own; None for any other.
        implementation: Attention implementation by name; None picks by device.
        deterministic: Decode attention does not depend on the batch's other rows; prefill attention
            never does.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    scale: float | None = None
    soft_cap: float | None = None
    kv_scales: StaticScales | None = None
    implementation: str | None = None
    deterministic: bool = False

    def slots(self, block_tables: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
        """Return where the K and V of tokens go in each group.

        Args:
            block_tables: int32 `[token, group, blocks]`: the tables of each token's row.
            positions: int32 `[token]`.
            valid: bool `[token]`, False for padding.

        Returns:
            int32 `[group, token]`; -1 where there is no token.
        """
        place = jnp.clip(positions // self.block_size, 0, block_tables.shape[2] - 1)
        blocks = jnp.take_along_axis(block_tables, place[:, None, None], axis=2)[..., 0].T
        slots = blocks * self.block_size + positions % self.block_size
        return jnp.where(valid, slots, -1)

    def exact_keys(
        self, k: jax.Array, pages: Cache, tokens: StepTokens, layer: Layer
    ) -> ExactKeys | None:
        """Return what a layer's queries see in full precision, before `write`; None: nothing."""
        if not isinstance(pages, ChannelPages):
            return None
        return exact_keys(k, pages, tokens, self._group(layer), self._place(layer))

    def write(
        self,
        k: jax.Array,
        v: jax.Array,
        pages: Cache,
        slots: jax.Array,
        layer: Layer,
        exact: ExactKeys | None = None,
    ) -> Cache:
        """Write one layer's K and V `[token, kv_head, dim]` to `slots` `[group, token]`.

        `exact` is what `exact_keys` returned for them, here and where they are attended to.
        """
        slots = self._of_group(slots, layer)
        if isinstance(pages, ChannelPages):
            assert exact is not None
            group, place = self._group(layer), self._place(layer)
            return write_channel(v, pages, exact, slots, group, place)
        return write_at(
            k,
            v,
            pages,
            slots,
            self._place(layer),
            scales=self._scales(layer),
            implementation=self.implementation,
        )

    def decode(
        self,
        q: jax.Array,
        pages: Cache,
        block_tables: jax.Array,
        context_lens: jax.Array,
        layer: Layer,
        exact: ExactKeys | None = None,
    ) -> jax.Array:
        """Attend with one query a row: `paged_decode` with tables `[row, group, blocks]`."""
        if isinstance(pages, ChannelPages):
            ones = jnp.minimum(context_lens, 1)
            out = self.prefill(q[:, None], pages, block_tables, context_lens, ones, layer, exact)
            return out[:, 0]
        return self._attend(
            paged_decode,
            q,
            pages,
            block_tables,
            context_lens,
            layer=layer,
            deterministic=self.deterministic,
        )

    def prefill(
        self,
        q: jax.Array,
        pages: Cache,
        block_tables: jax.Array,
        context_lens: jax.Array,
        query_lens: jax.Array,
        layer: Layer,
        exact: ExactKeys | None = None,
    ) -> jax.Array:
        """Attend with a chunk a row: `paged_prefill` with tables `[row, group, blocks]`."""
        if not isinstance(pages, ChannelPages):
            return self._attend(
                paged_prefill, q, pages, block_tables, context_lens, query_lens, layer=layer
            )
        assert exact is not None
        tables = self._of_group(block_tables, layer, axis=1)
        return self._by_span(
            lambda span: attend_channel(
                q,
                pages,
                exact,
                tables,
                context_lens,
                query_lens,
                place=self._place(layer),
                span=span,
                scale=self.scale,
                soft_cap=self.soft_cap,
            ),
            layer,
        )

    def one_row(
        self, block_tables: jax.Array, start: jax.Array, count: jax.Array, num_tokens: int
    ) -> tuple[jax.Array, Callable[..., tuple[jax.Array, Cache]]]:
        """Return positions and `Decoder.hidden`'s attend for a chunk of a single sequence.

        Args:
            block_tables: int32 `[group, blocks]`.
            start: int32, tokens in the cache before the chunk.
            count: int32, tokens of the chunk that are no padding.
            num_tokens: Length of the chunk, static.

        Returns:
            int32 `[token]`, and a function of q, k, v, pages and layer.
        """
        index = jnp.arange(num_tokens, dtype=jnp.int32)
        positions = start + index
        tables = jnp.broadcast_to(block_tables, (num_tokens, *block_tables.shape))
        slots = self.slots(tables, positions, index < count)
        row = block_tables[None], (start + count)[None], count[None]
        step = StepTokens(
            rows=jnp.zeros(1, jnp.int32),
            before=start[None],
            after=(start + count)[None],
            row=jnp.zeros(num_tokens, jnp.int32),
            position=positions,
            valid=index < count,
            queries=index[None],
        )

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, pages: Cache, layer: Layer
        ) -> tuple[jax.Array, Cache]:
            exact = self.exact_keys(k, pages, step, layer)
            pages = self.write(k, v, pages, slots, layer, exact)
            return self.prefill(q[None], pages, *row, layer, exact)[0], pages

        return positions, attend

    def _attend(
        self,
        op: Callable[..., jax.Array],
        q: jax.Array,
        pages: KVPages | MixedPages,
        block_tables: jax.Array,
        *lens: jax.Array,
        layer: Layer,
        **options: bool,
    ) -> jax.Array:
        """Run `paged_decode` or `paged_prefill` with the tables, place and window of a layer."""
        tables = self._of_group(block_tables, layer, axis=1)
        return self._by_span(
            lambda span: attend_at(
                op,
                q,
                pages,
                tables,
                *lens,
                place=self._place(layer),
                scales=self._scales(layer),
                scale=self.scale,
                window=span.window,
                num_sink_tokens=span.num_sink_tokens,
                soft_cap=self.soft_cap,
                implementation=self.implementation,
                **options,
            ),
            layer,
        )

    def _of_group(self, array: jax.Array, layer: Layer, axis: int = 0) -> jax.Array:
        """Take the entry of the layer's group along an axis."""
        if len(self.groups) == 1:
            return jax.lax.index_in_dim(array, 0, axis, keepdims=False)
        return jax.lax.dynamic_index_in_dim(array, self._group(layer), axis, keepdims=False)

    def _group(self, layer: Layer) -> Layer:
        """Return the number of the layer's group."""
        return 0 if len(self.groups) == 1 else jnp.asarray(self._group_of_layer)[layer]

    def _place(self, layer: Layer) -> Layer:
        """Return the layer's place in a block."""
        if len(self.groups) == 1:
            return layer
        return jnp.asarray(self._place_of_layer)[layer]

    def _scales(self, layer: Layer) -> dict[str, jax.Array]:
        """Return the layer's static scales as the ops take them."""
        return {} if self.kv_scales is None else self.kv_scales.of_layer(layer)

    def _by_span(self, attend: Callable[[Span], jax.Array], layer: Layer) -> jax.Array:
        """Attend with the layer's own window, which a kernel wants to know when it is compiled."""
        spans = list(dict.fromkeys(group.span for group in self.groups))
        if len(spans) == 1:
            return attend(spans[0])
        number = [spans.index(group.span) for group in self.groups]
        which = np.array(number, np.int32)[self._group_of_layer]
        # Where the layer is a constant (unrolled layers), XLA keeps only its branch.
        branches = [lambda span=span: attend(span) for span in spans]
        return jax.lax.switch(jnp.asarray(which)[layer], branches)

    @property
    def _group_of_layer(self) -> np.ndarray:
        return self._for_layers(lambda group, place: group)

    @property
    def _place_of_layer(self) -> np.ndarray:
        return self._for_layers(lambda group, place: place)

    def _for_layers(self, value: Callable[[int, int], int]) -> np.ndarray:
        found = {
            layer: value(number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return np.array([found[layer] for layer in range(len(found))], np.int32)


def model_spans(windows: Sequence[int | None]) -> tuple[Span, ...]:
    """Return what the tokens of each layer see by the windows of the model itself."""
    return tuple(FULL if window is None else Span(window) for window in windows)
