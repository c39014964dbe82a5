"""Groups of layers and what their windows keep, against brute force over tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.cache.groups import (
    FULL,
    MAX_GROUPS,
    LayerGroup,
    Span,
    group_layers,
    layers_per_block,
    most_blocks_of,
)

SPANS = st.builds(Span, st.none() | st.integers(1, 12), st.just(0)) | st.builds(
    Span, st.integers(1, 12), st.integers(1, 6)
)


def sees(span, query, key):
    """Whether the token at `query` sees the one at `key`."""
    if key > query:
        return False
    return span.window is None or query - key < span.window or key < span.num_sink_tokens


def blocks_seen(span, query, size):
    """Blocks below the query's that hold a token which it or a later token of it sees."""
    return {key // size for key in range(query) if sees(span, query, key)}


@settings(deadline=None)
@given(span=SPANS, context_len=st.integers(0, 40), size=st.integers(1, 6))
def test_live_blocks_are_those_the_next_token_sees(span, context_len, size):
    group = LayerGroup((0,), span)
    first, sinks = group.first_live_block(context_len, size), group.sink_blocks(size)
    filled = range(-(-context_len // size))
    kept = {block for block in filled if block < sinks or block >= first}
    seen = blocks_seen(span, context_len, size)
    assert seen <= kept
    # What is kept besides is a sink block, or the one that the next token is written to.
    assert kept - seen <= set(range(sinks)) | {context_len // size}
    later = [block for query in range(context_len, 60) for block in blocks_seen(span, query, size)]
    assert not (set(filled) - kept) & set(later)


def test_arrays_of_lengths_give_arrays():
    group = LayerGroup((0,), Span(5))
    lengths = np.arange(20)
    firsts = group.first_live_block(lengths, 4)
    assert firsts.tolist() == [group.first_live_block(n, 4) for n in range(20)]
    assert LayerGroup((0,)).first_live_block(lengths, 4).tolist() == [0] * 20


@settings(deadline=None)
@given(
    span=SPANS,
    size=st.integers(1, 6),
    chunk=st.integers(1, 12),
    num_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_no_way_to_chunk_a_request_holds_more_than_most_blocks(span, size, chunk, num_tokens, data):
    group = LayerGroup((0,), span)
    most, held_most, context_len = group.most_blocks(num_tokens, size, chunk), 0, 0
    while context_len < num_tokens:
        take = data.draw(st.integers(1, min(chunk, num_tokens - context_len)))
        first, sinks = group.first_live_block(context_len, size), group.sink_blocks(size)
        end = -(-(context_len + take) // size)
        held_most = max(held_most, sum(b < sinks or b >= first for b in range(end)))
        context_len += take
    assert held_most <= most
    assert most <= -(-num_tokens // size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_most_blocks_is_reached(size):
    # Every chunk size from every place is possible, so for some length the bound is tight.
    group, chunk = LayerGroup((0,), Span(7, 3)), 4
    reached = 0
    for context_len in range(100):
        first, sinks = group.first_live_block(context_len, size), group.sink_blocks(size)
        end = -(-(context_len + chunk) // size)
        reached = max(reached, sum(b < sinks or b >= first for b in range(end)))
    assert reached == group.most_blocks(200, size, chunk)


def test_groups_add_up():
    groups = (LayerGroup((0,)), LayerGroup((1,), Span(4)))
    assert most_blocks_of(groups, 40, 4, 1) == 10 + 2


@settings(deadline=None)
@given(spans=st.lists(st.sampled_from([FULL, Span(8), Span(8, 2)]), min_size=1, max_size=30))
def test_every_layer_is_in_one_group_of_its_span(spans):
    groups = group_layers(spans)
    layers = [layer for group in groups for layer in group.layers]
    assert sorted(layers) == list(range(len(spans)))
    assert all(spans[layer] == group.span for group in groups for layer in group.layers)
    assert len(groups) <= MAX_GROUPS
    places = layers_per_block(groups)
    used = len(groups) * places
    # No other size of a group leaves fewer places empty within the bound on groups.
    counts = [spans.count(span) for span in set(spans)]
    for size in range(1, max(counts) + 1):
        number = sum(-(-count // size) for count in counts)
        assert number > MAX_GROUPS or number * size >= used


@pytest.mark.parametrize(
    ("spans", "sizes"),
    [
        ([FULL] * 30, [30]),
        ([Span(8), Span(8), Span(8), Span(8), Span(8), FULL] * 4, [4] * 6),  # five to one
        ([Span(8), FULL] * 12, [12, 12]),
        ([FULL] * 12 + [Span(4)], [2] * 6 + [1]),
    ],
)
def test_mixes_that_models_have(spans, sizes):
    groups = group_layers(spans)
    assert sorted((len(group.layers) for group in groups), reverse=True) == sizes


def test_more_kinds_than_groups_still_work():
    spans = [Span(window) for window in range(1, MAX_GROUPS + 3)]
    groups = group_layers(spans)
    assert len(groups) == MAX_GROUPS + 2
    assert layers_per_block(groups) == 1


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        group_layers([])
