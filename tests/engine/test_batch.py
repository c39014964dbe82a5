"""Padding to buckets: nothing is lost, nothing is added."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.engine.batch import bucket, group_prefills, pad_decodes, table_bucket
from paxkv.engine.step import RowBatch, Sampling


def batch_of(query_lens):
    rows = len(query_lens)
    query_lens = np.array(query_lens, np.int32)
    return RowBatch(
        rows=np.arange(rows, dtype=np.int32),
        tokens=np.arange(query_lens.sum(), dtype=np.int32) + 1,
        query_lens=query_lens,
        context_lens=query_lens + 3,
        block_tables=np.arange(rows * 2, dtype=np.int32).reshape(rows, 2),
        samples=np.ones(rows, bool),
        sampling=Sampling(
            temperature=np.linspace(0, 1, rows).astype(np.float32),
            top_p=np.ones(rows, np.float32),
            seed=np.arange(rows, dtype=np.uint32) + 100,
            output_index=np.arange(rows, dtype=np.int32),
            all_greedy=False,
        ),
    )


@given(st.integers(1, 5000))
def test_a_bucket_holds_its_size_with_at_most_a_third_of_padding(size):
    padded = bucket(size)
    assert size <= padded
    assert padded - size <= padded / 3 or padded <= 16


def test_buckets_are_few():
    expected = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert sorted({bucket(size) for size in range(1, 65)}) == expected


@pytest.mark.parametrize(
    ("blocks", "limit", "width"), [(1, 512, 64), (65, 512, 256), (300, 512, 512), (5, 16, 16)]
)
def test_table_widths_are_few(blocks, limit, width):
    assert table_bucket(blocks, limit) == width


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_every_chunk_is_in_exactly_one_group(query_lens):
    batch = batch_of(query_lens)
    starts = np.cumsum(query_lens) - query_lens
    seen = []
    for group in group_prefills(batch, max_blocks=8):
        assert group.tokens.shape[0] in (1, 4)
        for row, place in enumerate(group.places):
            seen.append(int(place))
            count = query_lens[place]
            begin = starts[place]
            assert group.query_lens[row] == count
            assert group.context_lens[row] == count + 3
            assert group.seed[row] == 100 + place
            np.testing.assert_array_equal(
                group.tokens[row, :count], batch.tokens[begin : begin + count]
            )
            np.testing.assert_array_equal(group.block_tables[row, :2], batch.block_tables[place])
    assert sorted(seen) == list(range(len(query_lens)))


def test_padding_rows_of_a_decode_hold_nothing():
    padded = pad_decodes(batch_of([1] * 5), max_blocks=8)
    assert padded.tokens.shape == (8, 1)
    assert padded.context_lens.tolist() == [4, 4, 4, 4, 4, 0, 0, 0]
    assert padded.block_tables.shape == (8, 8)


def test_an_empty_batch_has_no_groups():
    assert group_prefills(batch_of([]), max_blocks=8) == []
