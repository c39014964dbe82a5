"""Padding to buckets: nothing is lost, nothing is added."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.engine.batch import (
    decode_bucket,
    pad_decodes,
    pad_prefills,
    prefill_bucket,
    prefill_row_bucket,
    table_bucket,
)
from paxkv.engine.step import RowBatch, Sampling


def batch_of(query_lens):
    rows = len(query_lens)
    query_lens = np.array(query_lens, np.int32)
    return RowBatch(
        rows=np.arange(rows, dtype=np.int32),
        tokens=np.arange(query_lens.sum(), dtype=np.int32) + 1,
        query_lens=query_lens,
        context_lens=query_lens + 3,
        block_tables=np.arange(rows * 2, dtype=np.int32).reshape(rows, 1, 2),
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
    for padded in (decode_bucket(size), prefill_bucket(size)):
        assert size <= padded
        assert padded - size <= padded / 3 or padded <= 16


def test_buckets_are_few():
    rows = {decode_bucket(size) for size in range(1, 65)}
    assert sorted(rows) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    tokens = {prefill_bucket(size) for size in range(1, 513)}
    assert sorted(tokens) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512]
    assert {prefill_row_bucket(size) for size in range(1, 65)} == {1, 4, 16, 64}


@pytest.mark.parametrize(
    ("blocks", "limit", "width"), [(1, 512, 64), (65, 512, 256), (300, 512, 512), (5, 16, 16)]
)
def test_table_widths_are_few(blocks, limit, width):
    assert table_bucket(blocks, limit) == width


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_chunks_stay_side_by_side(query_lens):
    batch = batch_of(query_lens)
    padded = pad_prefills(batch, max_blocks=8)
    count, total = len(query_lens), sum(query_lens)
    assert padded.num_rows == count
    np.testing.assert_array_equal(padded.tokens[:total], batch.tokens)
    assert not padded.tokens[total:].any()
    assert padded.query_lens.tolist()[:count] == query_lens
    assert not padded.query_lens[count:].any()
    assert not padded.context_lens[count:].any()
    np.testing.assert_array_equal(padded.block_tables[:count, :, :2], batch.block_tables)
    np.testing.assert_array_equal(padded.seed[:count], batch.sampling.seed)


def test_padding_rows_of_a_decode_hold_nothing():
    padded = pad_decodes(batch_of([1] * 5), max_blocks=8)
    assert padded.tokens.shape == (8,)
    assert padded.context_lens.tolist() == [4, 4, 4, 4, 4, 0, 0, 0]
    assert padded.block_tables.shape == (8, 1, 8)
