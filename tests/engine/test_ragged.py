"""Every token of a ragged batch is in exactly one tile, at its own position."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.engine.ragged import TILE, lay_out

NUM_TOKENS, NUM_ROWS = 128, 4
run = jax.jit(lambda lens, contexts: lay_out(lens, contexts, NUM_TOKENS))


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 60), min_size=NUM_ROWS, max_size=NUM_ROWS).filter(
        lambda lens: 0 < sum(lens) <= NUM_TOKENS
    ),
    st.lists(st.integers(0, 40), min_size=NUM_ROWS, max_size=NUM_ROWS),
)
def test_tiles_cover_the_tokens(query_lens, cached):
    lens = np.array(query_lens, np.int32)
    before = np.where(lens > 0, cached, 0).astype(np.int32)
    ragged = jax.tree.map(np.asarray, run(lens, before + lens))
    token, seen = 0, set()
    for row, count in enumerate(query_lens):
        for place in range(count):
            assert ragged.valid[token]
            assert ragged.row[token] == row
            position = before[row] + place
            assert ragged.position[token] == position
            tile, at = int(ragged.token_tile[token]), int(ragged.token_place[token])
            assert (tile, at) not in seen
            seen.add((tile, at))
            assert ragged.tile_row[tile] == row
            assert ragged.tile_tokens[tile, at] == token
            # The op reads a query's position off its tile's lengths.
            first = ragged.tile_context_lens[tile] - ragged.tile_query_lens[tile]
            assert first + at == position
            token += 1
        if count:
            assert ragged.last_token[row] == token - 1
    assert not ragged.valid[token:].any()
    assert int(ragged.tile_query_lens.sum()) == token
    assert ragged.tile_query_lens.max() <= TILE
    assert not ragged.tile_context_lens[ragged.tile_query_lens == 0].any()
