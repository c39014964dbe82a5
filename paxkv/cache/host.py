"""Host memory for the blocks of swapped-out requests."""

from typing import Any, NamedTuple

import jax
import numpy as np

from paxkv.cache.layout import gib
from paxkv.errors import ConfigError, InvariantError


class LeafLayout(NamedTuple):
    """What one array of the pool holds for a block."""

    name: str
    shape: tuple[int, ...]
    dtype: str


type BlockLayout = tuple[LeafLayout, ...]


def block_layout(pages: Any) -> BlockLayout:
    """Return what a block consists of: name, shape and dtype of its slice of each array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(pages)
    return tuple(
        LeafLayout(jax.tree_util.keystr(path), tuple(leaf.shape[1:]), str(leaf.dtype))
        for path, leaf in leaves
    )


class HostSpace:
    """Room for `num_blocks` blocks, numbered from 0 whatever their numbers on the device.

    Holds the bytes and the layout they were written in; which of its blocks are free is known to
    whoever allocates them (a second `BlockPool`). Memory is taken when a block is first written.

    Args:
        num_blocks: May be 0.
        pages: The device pool whose blocks come here; only its layout is used.

    Raises:
        ConfigError: The host doesn't have the memory.
    """

    def __init__(self, num_blocks: int, pages: Any):
        if num_blocks < 0:
            raise ConfigError(f"preempt.host_blocks={num_blocks}: must be 0 or more.")
        self.num_blocks = num_blocks
        self.layout = block_layout(pages)
        self._structure = jax.tree.structure(pages)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(pages)]
        try:
            self._arrays = [
                np.zeros((num_blocks, *leaf.shape), dtype)
                for leaf, dtype in zip(self.layout, dtypes, strict=True)
            ]
        except MemoryError:
            per_block = sum(
                int(np.prod(leaf.shape)) * np.dtype(dtype).itemsize
                for leaf, dtype in zip(self.layout, dtypes, strict=True)
            )
            raise ConfigError(
                f"preempt.host_blocks={num_blocks}: {gib(num_blocks * per_block)} of host memory, "
                "more than there is. Lower preempt.host_blocks or use preempt=recompute."
            ) from None
        self._written = np.zeros(num_blocks, np.bool_)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block moves."""
        return sum(int(np.prod(a.shape[1:])) * a.dtype.itemsize for a in self._arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole space."""
        return sum(array.nbytes for array in self._arrays)

    def check_layout(self, pages: Any) -> None:
        """Refuse a device pool whose blocks are laid out otherwise than those here.

        Raises:
            InvariantError: With both layouts.
        """
        layout, structure = block_layout(pages), jax.tree.structure(pages)
        # The structure holds what the arrays can't tell, such as what their codes stand for.
        if (layout, structure) != (self.layout, self._structure):
            raise InvariantError(
                f"swap: the blocks in host memory are laid out as {self.layout} in "
                f"{self._structure}, those of the device pool as {layout} in {structure}; copying "
                "them would mix up their bytes"
            )

    def write(self, host_ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Copy blocks in, one slice of each array a block."""
        for array, new in zip(self._arrays, leaves, strict=True):
            array[host_ids] = new
        self._written[host_ids] = True

    def read(self, host_ids: np.ndarray) -> list[np.ndarray]:
        """Return copies of blocks."""
        return [array[host_ids] for array in self._arrays]

    def check_written(self, host_ids: np.ndarray) -> None:
        """Refuse blocks that were never written.

        Raises:
            InvariantError: With their ids.
        """
        if not self._written[host_ids].all():
            empty = host_ids[~self._written[host_ids]].tolist()
            raise InvariantError(f"swap: host blocks {empty} hold nothing yet")
