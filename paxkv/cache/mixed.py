"""The pool of a layout: one array a leaf; two pools where some layers stay unquantised; blocks and
the keys of open blocks where keys are quantised per channel.

What differs between the kinds is known here and in `channel`: callers write and attend at a layer's
place in a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages, init_pages, write_kv
from paxkv.cache.channel import ChannelPages, init_channel_pages
from paxkv.cache.layout import KVLayout

Place = int | jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixedPages:
    """Two pools of equally many blocks; a block is a slice of every leaf of both.

    Attributes:
        coded: Holds the places that are quantised.
        plain: Holds the others, in the model's dtype.
        plain_places: The places of a block that `plain` holds, ascending.
    """

    coded: KVPages
    plain: KVPages
    plain_places: tuple[int, ...] = field(metadata={"static": True})

    @property
    def num_places(self) -> int:
        """Places of a block."""
        return self.coded.num_layers + self.plain.num_layers

    def is_plain(self) -> np.ndarray:
        """Return which places `plain` holds, bool `[place]`."""
        return np.isin(np.arange(self.num_places), self.plain_places)

    def place_within(self) -> np.ndarray:
        """Return each place's number in the pool that holds it, int32 `[place]`."""
        plain = self.is_plain()
        return (np.where(plain, np.cumsum(plain), np.cumsum(~plain)) - 1).astype(np.int32)


Cache = KVPages | MixedPages | ChannelPages


def init_cache(
    num_blocks: int, layout: KVLayout, *, num_rows: int = 0, num_groups: int = 1
) -> Cache:
    """Allocate an all-zero cache.

    Args:
        num_blocks: Blocks.
        layout: Of a block.
        num_rows: Rows of the batch; only for a layout that keeps keys outside of blocks.
        num_groups: Groups of layers; likewise.
    """
    if layout.open_dtype is not None:
        return init_channel_pages(num_blocks, layout, num_rows=num_rows, num_groups=num_groups)

    def pool(places: int, dtype: str, *, scaled: bool) -> KVPages:
        return init_pages(
            num_blocks,
            places,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
            dtype,
            scaled=scaled,
        )

    if layout.plain_dtype is None:
        return pool(layout.num_layers, layout.kv_dtype, scaled=layout.scaled)
    num_plain = len(layout.plain_places)
    return MixedPages(
        coded=pool(layout.num_layers - num_plain, layout.kv_dtype, scaled=layout.scaled),
        plain=pool(num_plain, layout.plain_dtype, scaled=True),
        plain_places=layout.plain_places,
    )


def block_part(cache: Cache) -> Any:
    """Return what moves with blocks, a pytree whose every leaf has the block axis first."""
    return cache.blocks if isinstance(cache, ChannelPages) else cache


def with_block_part(cache: Cache, part: Any) -> Cache:
    """Return the cache with another block part; what stays with rows is kept."""
    return replace(cache, blocks=part) if isinstance(cache, ChannelPages) else part


def write_at(
    k: jax.Array,
    v: jax.Array,
    cache: KVPages | MixedPages,
    slots: jax.Array,
    place: Place,
    *,
    scales: dict[str, jax.Array],
    implementation: str | None,
) -> KVPages | MixedPages:
    """Write K and V `[token, kv_head, dim]` to slots, int32 `[token]`, of a place.

    Args:
        k: As in `write_kv`.
        v: As in `write_kv`.
        cache: Consumed.
        slots: As in `write_kv`.
        place: Of the layer in a block; may be traced.
        scales: The layer's static scales, `k_scale` and `v_scale`; empty where there are none.
        implementation: As in `write_kv`.
    """
    if isinstance(cache, KVPages):
        return write_kv(k, v, cache, slots, layer=place, implementation=implementation, **scales)
    plain = jnp.asarray(cache.is_plain())[place]
    within = jnp.asarray(cache.place_within())[place]
    # Both pools are written, one of them nowhere: a conditional would copy what it returns.
    coded_slots, plain_slots = jnp.where(plain, -1, slots), jnp.where(plain, slots, -1)
    return MixedPages(
        coded=write_kv(
            k, v, cache.coded, coded_slots, layer=within, implementation=implementation, **scales
        ),
        plain=write_kv(k, v, cache.plain, plain_slots, layer=within, implementation=implementation),
        plain_places=cache.plain_places,
    )


def attend_at(
    op: Callable[..., jax.Array],
    q: jax.Array,
    cache: KVPages | MixedPages,
    *arguments: jax.Array,
    place: Place,
    scales: dict[str, jax.Array],
    **options: Any,
) -> jax.Array:
    """Run `paged_decode` or `paged_prefill` over a place.

    Args:
        op: Which of the two.
        q: As in `op`.
        cache: Only read.
        arguments: Those of `op` after the pool.
        place: Of the layer in a block; may be traced.
        scales: As in `write_at`.
        options: Keyword arguments of `op`.
    """
    if isinstance(cache, KVPages):
        return op(q, cache, *arguments, layer=place, **scales, **options)
    within = jnp.asarray(cache.place_within())[place]
    return jax.lax.cond(
        jnp.asarray(cache.is_plain())[place],
        lambda: op(q, cache.plain, *arguments, layer=within, **options),
        lambda: op(q, cache.coded, *arguments, layer=within, **scales, **options),
    )
