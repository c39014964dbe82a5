"""An array value for the host: changing k elements costs O(k), and earlier values stay readable."""

from typing import Any, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class HostArray(NDArrayOperatorsMixin):
    """An immutable array value whose newest version owns the one buffer.

    `set` writes into the shared buffer and leaves the older version a note of what it overwrote,
    so that reading the older version rebuilds it (a copy, O(size + changes since)). A block pool
    changes some twenty of 100,000 counts a step: copying them all would cost more than the whole
    step may.

    Equal to a plain array in indexing and arithmetic; both give new ndarrays. Pickles as its
    values. Holding an old version costs memory for at most `size` changes, since a version that
    many changes after the last full copy starts a buffer of its own. Not for use from two threads.

    Source: Baker, "Shallow Binding Makes Functional Arrays Fast" (1991); here an old version that
    is read takes a copy instead of moving the buffer back to itself.
    """

    __slots__ = ("_buffer", "_edits", "_undo")

    _buffer: Any  # the ndarray, in the newest version of it only; else None
    _edits: int  # elements changed since the buffer was copied
    _undo: Any  # else: (newer version, where it differs, values here)

    def __init__(self, values: Any):
        self._buffer = np.array(values)
        self._edits = 0
        self._undo = None

    def set(
        self, where: np.ndarray | slice, values: Any, before: np.ndarray | int | None = None
    ) -> Self:
        """Return the array with `values` at `where`; this one keeps its values.

        Args:
            where: Indices in range (intp is fastest; repeats must carry equal values), or a slice
                with both ends and no step. Kept: the caller must not change the index array.
            values: What to write, broadcast as NumPy does.
            before: The values at `where` now, if the caller has them at hand. Kept too.
        """
        buffer = self.peek()
        new = object.__new__(type(self))
        size = where.stop - where.start if isinstance(where, slice) else where.size
        edits = self._edits + size
        if edits > buffer.size:
            new._buffer, new._edits, new._undo = buffer.copy(), 0, None
            new._buffer[where] = values
            return new
        if before is None:
            before = self[where]
        buffer[where] = values
        new._buffer, new._edits, new._undo = buffer, edits, None
        self._buffer, self._undo = None, (new, where, before)
        return new

    def peek(self) -> np.ndarray:
        """Return the values without a copy: only to be read, and only until the next `set`."""
        if self._buffer is None:
            undo = []
            version = self
            while version._buffer is None:
                version, where, values = version._undo
                undo.append((where, values))
            buffer = version._buffer.copy()
            for where, values in reversed(undo):
                buffer[where] = values
            self._buffer, self._edits, self._undo = buffer, 0, None
        return self._buffer

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.peek().shape

    @property
    def dtype(self) -> np.dtype:
        """Element type of the value."""
        return self.peek().dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.peek().size

    def __len__(self) -> int:
        return len(self.peek())

    def __getitem__(self, where: Any) -> Any:
        part = self.peek()[where]
        if isinstance(where, np.ndarray) or not isinstance(part, np.ndarray):
            return part
        return part.copy()  # else a view of a buffer that later versions change

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "HostArray: its buffer changes with later versions; copy=False cannot be met"
            )
        return self.peek().astype(dtype or self.dtype, copy=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x.peek() if isinstance(x, HostArray) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[np.ndarray]]:
        return type(self), (np.asarray(self),)

    def __repr__(self) -> str:
        return f"HostArray({self.peek()!r})"
