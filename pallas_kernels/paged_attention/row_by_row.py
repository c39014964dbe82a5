"""Decode one row at a time, where the bits of a row must not depend on the others."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def row_by_row(decode: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Give a decode that works on a whole batch at once the `deterministic` option."""

    @functools.wraps(decode)
    def run(
        q: jax.Array,
        pages: Any,
        block_tables: jax.Array,
        context_lens: jax.Array,
        *,
        deterministic: bool,
        **options: Any,
    ) -> jax.Array:
        if not deterministic:
            return decode(q, pages, block_tables, context_lens, **options)

        def one(row: tuple[jax.Array, ...]) -> jax.Array:
            q, table, context_len = (x[None] for x in row)
            return decode(q, pages, table, context_len, **options)[0]

        return jax.lax.map(one, (q, block_tables, context_lens))

    return run
