"""Batches in the few shapes that get compiled: tokens, rows and tables padded up to buckets."""

from dataclasses import dataclass

import numpy as np

from paxkv.engine.step import RowBatch

MIN_CHUNK_TOKENS = 16
"""Smallest bucket of prefill tokens: fewer take as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Rows padded to buckets; a padding row has `context_lens` and `query_lens` 0.

    Attributes:
        num_rows: Real rows; they come first.
        rows: int32 `[padded row]`, the places in the scheduler's batch.
        tokens: int32 `[padded token]`, the rows' tokens one after the other, padding last.
        query_lens: int32 `[padded row]`, tokens of each row.
        context_lens: int32 `[padded row]`, tokens in the cache once these are written.
        block_tables: int32 `[padded row, group, padded blocks]`.
        temperature: float32 `[padded row]`.
        top_p: float32 `[padded row]`.
        seed: uint32 `[padded row]`.
        output_index: int32 `[padded row]`.
    """

    num_rows: int
    rows: np.ndarray
    tokens: np.ndarray
    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray
    output_index: np.ndarray


def decode_bucket(num_rows: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 16, 24, 32, 48, 64, ... that holds so many rows.

    From 16 on there is one between each pair of powers of two, so at most a third of a bucket is
    padding. Below, padding is free or better: XLA:CPU multiplies a matrix by 12 columns at 8.6
    GFLOP/s and by 16 at 28.
    """
    return _bucket(num_rows, smallest=1, steps=2 if num_rows > 16 else 1)


def prefill_bucket(num_tokens: int) -> int:
    """Return the smallest of 16, 24, 32, 48, 64, ..., 256, 320, 384, 448, 512, ... that holds them.

    Large steps cost most and compile as fast as small ones, so their buckets are finer.
    """
    return _bucket(num_tokens, smallest=MIN_CHUNK_TOKENS, steps=4 if num_tokens > 256 else 2)


def prefill_row_bucket(num_rows: int) -> int:
    """Return the smallest of 1, 4, 16, 64, ...: rows without tokens cost next to nothing."""
    rows = 1
    while rows < num_rows:
        rows *= 4
    return rows


def table_bucket(num_blocks: int, max_blocks: int) -> int:
    """Return the padded width of block tables: the attention's cost follows lengths, not this."""
    width = 64
    while width < num_blocks:
        width *= 4
    return min(width, max_blocks)


def pad_decodes(batch: RowBatch, max_blocks: int) -> PaddedBatch:
    """Pad decoding rows, one token each."""
    rows = decode_bucket(batch.num_rows)
    return _pad(batch, num_tokens=rows, num_rows=rows, max_blocks=max_blocks)


def pad_prefills(batch: RowBatch, max_blocks: int) -> PaddedBatch:
    """Pad prefill chunks of any lengths: tokens stay side by side, so only their sum is padded."""
    return _pad(
        batch,
        num_tokens=prefill_bucket(len(batch.tokens)),
        num_rows=prefill_row_bucket(batch.num_rows),
        max_blocks=max_blocks,
    )


def _bucket(size: int, *, smallest: int, steps: int) -> int:
    """Return the first of `steps` equal steps from one power of two to the next that holds it."""
    power = smallest
    while power < size:
        power *= 2
    if power == smallest:
        return power
    step = power // 2 // steps
    return power // 2 + -(-(size - power // 2) // step) * step


def _pad(batch: RowBatch, *, num_tokens: int, num_rows: int, max_blocks: int) -> PaddedBatch:
    def padded(values: np.ndarray, size: int = num_rows) -> np.ndarray:
        out = np.zeros(size, values.dtype)
        out[: len(values)] = values
        return out

    _, groups, width = batch.block_tables.shape
    tables = np.zeros((num_rows, groups, table_bucket(width, max_blocks)), np.int32)
    tables[: batch.num_rows, :, :width] = batch.block_tables
    sampling = batch.sampling
    return PaddedBatch(
        num_rows=batch.num_rows,
        rows=padded(batch.rows),
        tokens=padded(batch.tokens, num_tokens),
        query_lens=padded(batch.query_lens),
        context_lens=padded(batch.context_lens),
        block_tables=tables,
        temperature=padded(sampling.temperature),
        top_p=padded(sampling.top_p),
        seed=padded(sampling.seed),
        output_index=padded(sampling.output_index),
    )
