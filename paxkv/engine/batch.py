"""Batches in the few shapes that get compiled: rows, chunks and tables padded up to buckets."""

from dataclasses import dataclass

import numpy as np

from paxkv.engine.step import RowBatch

PREFILL_ROWS = 4
"""Chunks of one bucket run together in this many rows, the rest one by one: two shapes a bucket."""
PREFILL_TOKENS = 512
"""Most tokens of such a group; a longer chunk already fills the machine alone."""
MIN_CHUNK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """Rows padded to a bucket; a padding row has `context_lens` and `query_lens` 0.

    Attributes:
        places: int `[row]`, where the real rows stand in the batch they were taken from.
        tokens: int32 `[padded row, chunk]`.
        query_lens: int32 `[padded row]`.
        context_lens: int32 `[padded row]`.
        block_tables: int32 `[padded row, padded blocks]`.
        temperature: float32 `[padded row]`.
        top_p: float32 `[padded row]`.
        seed: uint32 `[padded row]`.
        output_index: int32 `[padded row]`.
    """

    places: np.ndarray
    tokens: np.ndarray
    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray
    output_index: np.ndarray


def bucket(size: int, smallest: int = 1) -> int:
    """Return the smallest of 1, 2, 4, 8, 16, 24, 32, 48, 64, ... that holds `size`.

    From 16 on there is one between each pair of powers of two, so at most a third of a bucket is
    padding. Below, padding is free or better: XLA:CPU multiplies a matrix by 12 columns at 8.6
    GFLOP/s and by 16 at 28.
    """
    power = smallest
    while power < size:
        between = power // 2 * 3
        if power >= 16 and between >= size:
            return between
        power *= 2
    return power


def table_bucket(num_blocks: int, max_blocks: int) -> int:
    """Return the padded width of block tables: the attention's cost follows lengths, not this."""
    width = 64
    while width < num_blocks:
        width *= 4
    return min(width, max_blocks)


def pad_decodes(batch: RowBatch, max_blocks: int) -> PaddedBatch:
    """Pad all decoding rows into one batch of one token a row."""
    return _pad(
        batch,
        np.arange(batch.num_rows),
        starts=np.arange(batch.num_rows),
        rows=bucket(batch.num_rows),
        chunk=1,
        max_blocks=max_blocks,
    )


def group_prefills(batch: RowBatch, max_blocks: int) -> list[PaddedBatch]:
    """Pad chunks into groups of equal bucket, so that a short one does not pay for a long one."""
    if not batch.num_rows:
        return []
    chunks = np.array([bucket(int(n), MIN_CHUNK) for n in batch.query_lens], np.int32)
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    groups = []
    for chunk in np.unique(chunks):
        places = np.flatnonzero(chunks == chunk)
        together = PREFILL_ROWS if chunk * PREFILL_ROWS <= PREFILL_TOKENS else 1
        while len(places):
            rows = together if len(places) >= together else 1
            group, places = places[:rows], places[rows:]
            groups.append(
                _pad(
                    batch,
                    group,
                    starts=starts[group],
                    rows=rows,
                    chunk=int(chunk),
                    max_blocks=max_blocks,
                )
            )
    return groups


def _pad(
    batch: RowBatch,
    places: np.ndarray,
    *,
    starts: np.ndarray,
    rows: int,
    chunk: int,
    max_blocks: int,
) -> PaddedBatch:
    """Copy the rows at `places`, whose tokens begin at `starts`, into padded arrays."""
    count = len(places)
    query_lens = batch.query_lens[places]
    column = np.arange(chunk)
    inside = column < query_lens[:, None]
    tokens = np.zeros((rows, chunk), np.int32)
    tokens[:count][inside] = batch.tokens[(starts[:, None] + column)[inside]]
    tables = np.zeros((rows, table_bucket(batch.block_tables.shape[1], max_blocks)), np.int32)
    tables[:count, : batch.block_tables.shape[1]] = batch.block_tables[places]

    def padded(values: np.ndarray) -> np.ndarray:
        out = np.zeros(rows, values.dtype)
        out[:count] = values[places]
        return out

    sampling = batch.sampling
    return PaddedBatch(
        places=places,
        tokens=tokens,
        query_lens=padded(batch.query_lens),
        context_lens=padded(batch.context_lens),
        block_tables=tables,
        temperature=padded(sampling.temperature),
        top_p=padded(sampling.top_p),
        seed=padded(sampling.seed),
        output_index=padded(sampling.output_index),
    )
