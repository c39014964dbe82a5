"""An array value for the host: changing k elements costs O(k), and earlier values stay readable."""

import operator
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

    __slots__ = ("_buffer", "_edits", "_newer", "_undo")

    _buffer: np.ndarray | None  # set in the newest version of a buffer only
    _edits: int  # elements changed since the buffer was copied
    _newer: Any  # the version that took the buffer over; its HostArray
    _undo: tuple[Any, np.ndarray] | None  # where the newer version differs, and the values here

    def __init__(self, values: Any):
        self._buffer = np.array(values)
        self._edits = 0
        self._newer = None
        self._undo = None

    def set(self, where: np.ndarray | slice, values: Any) -> Self:
        """Return the array with `values` at `where`; this one keeps its values.

        Args:
            where: Indices in range (repeats must carry equal values) or a slice. Kept: the caller
                must not change the index array afterwards.
            values: What to write, broadcast as NumPy does.
        """
        buffer = self._values()
        overwritten = buffer[where]
        new = object.__new__(type(self))
        new._newer = new._undo = None
        edits = self._edits + overwritten.size
        if edits > buffer.size:
            buffer = buffer.copy()
            edits = 0
        else:
            # A slice reads as a view of what is about to change; an index array as a copy.
            self._undo = (
                where,
                overwritten.copy() if overwritten.base is not None else overwritten,
            )
            self._newer = new
            self._buffer = None
        buffer[where] = values
        new._buffer = buffer
        new._edits = edits
        return new

    def _values(self) -> np.ndarray:
        """Return this version's values: the live buffer, or a rebuilt copy that it then owns."""
        if self._buffer is None:
            undo = []
            version = self
            while version._buffer is None:
                undo.append(version._undo)
                version = version._newer
            buffer = version._buffer.copy()
            for where, values in reversed(undo):
                buffer[where] = values
            self._buffer, self._edits, self._newer, self._undo = buffer, 0, None, None
        return self._buffer

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._values().shape

    @property
    def dtype(self) -> np.dtype:
        """Element type of the value."""
        return self._values().dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._values().size

    def __len__(self) -> int:
        return len(self._values())

    def __getitem__(self, where: Any) -> Any:
        part = self._values()[where]
        return part.copy() if isinstance(part, np.ndarray) and part.base is not None else part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "HostArray: its buffer changes with later versions; copy=False cannot be met"
            )
        return self._values().astype(dtype or self.dtype, copy=True)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x._values() if isinstance(x, HostArray) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[np.ndarray]]:
        return type(self), (np.asarray(self),)

    def __index__(self) -> int:
        return operator.index(self._values())

    def __repr__(self) -> str:
        return f"HostArray({self._values()!r})"
