"""The running batch in arrays, one entry a row: what is read every step for every request."""

import numpy as np

from paxkv.cache.groups import LayerGroup


class Rows:
    """One entry a row, valid where a sequence sits in the row.

    In each group of layers a row has a table of block ids by their place in the sequence. It holds
    those from 0 to `num_blocks`, less the ones that its window has left behind: from the group's
    sink blocks to `live_from`.

    Args:
        num_rows: Rows of the batch.
        max_tokens: Most tokens of a sequence.
        max_blocks: Most places of a table.
        groups: Groups of layers.
        block_size: Tokens a block.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_tokens: int,
        max_blocks: int,
        groups: tuple[LayerGroup, ...],
        block_size: int,
    ):
        self.tokens = np.zeros((num_rows, max_tokens), np.int32)
        self.block_table = np.zeros((num_rows, len(groups), max_blocks), np.int32)
        self.num_blocks = np.zeros((num_rows, len(groups)), np.int32)
        self.live_from = np.zeros((num_rows, len(groups)), np.int32)
        self.sink_blocks = np.array([g.sink_blocks(block_size) for g in groups], np.int32)
        self.promised = np.zeros(num_rows, np.int32)  # most blocks it may hold, 0: no promise
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.context_len = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.prompt_len = np.zeros(num_rows, np.int32)
        self.max_total_tokens = np.zeros(num_rows, np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint32)
        self.ignore_eos = np.zeros(num_rows, bool)

    def blocks(self, row: int, end: int | None = None) -> np.ndarray:
        """Return the block ids that a row holds: group after group, in each by place.

        Args:
            row: Which.
            end: Only places below it; None for all.
        """
        parts = []
        for group, sinks in enumerate(self.sink_blocks.tolist()):
            last = int(self.num_blocks[row, group])
            last = last if end is None else min(last, end)
            table, live = self.block_table[row, group], int(self.live_from[row, group])
            parts += [table[: min(sinks, last)], table[max(live, sinks) : last]]
        return np.concatenate(parts)

    def num_dead(self, rows: np.ndarray) -> np.ndarray:
        """Return the blocks given back because windows left them, int32 [row]."""
        return np.maximum(self.live_from[rows] - self.sink_blocks, 0).sum(axis=1)

    def num_held(self, rows: np.ndarray) -> np.ndarray:
        """Return the blocks that rows hold, int32 [row]."""
        return self.num_blocks[rows].sum(axis=1) - self.num_dead(rows)

    def append_blocks(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Append newly allocated blocks to tables.

        Args:
            rows: int [n].
            counts: int [n, group], blocks for each table.
            block_ids: int [sum of counts]: those of the first row's first group first.
        """
        num_groups = counts.shape[1]
        flat = counts.ravel()
        place = np.arange(len(block_ids)) - np.repeat(np.cumsum(flat) - flat, flat)
        start = np.repeat(self.num_blocks[rows].ravel(), flat)
        group = np.repeat(np.tile(np.arange(num_groups), len(rows)), flat)
        row = np.repeat(rows, counts.sum(axis=1))
        self.block_table[row, group, start + place] = block_ids
        self.num_blocks[rows] += counts

    def clear_blocks(self, row: int) -> None:
        """Empty a row's tables."""
        self.num_blocks[row] = 0
        self.live_from[row] = 0
        self.promised[row] = 0
