"""A file of JSON lines that grows by whole lines only."""

import errno
import os
from pathlib import Path
from typing import Any

from paxkv.tracking.jsonable import dumps


class EventLog:
    """Appends one line an event, handed to the system at once, so that a kill loses none.

    A line that cannot be written (the disk is full) stays in memory and goes out with the next
    one; the file never holds a part of a line. Needs `close`.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        # Bytes known to be written, lines that are not: one tuple, replaced in one assignment,
        # so that an interrupt between two statements can neither lose nor repeat a line.
        self._state: tuple[int, bytes] = (0, b"")
        self.num_written = 0

    def append(self, value: Any) -> None:
        """Write a line; raises OSError where it must be kept for later."""
        size, pending = self._state
        self._state = (size, pending + dumps(value))
        self.flush()

    def flush(self) -> None:
        """Write the lines kept back; raises OSError where that fails again."""
        size, pending = self._state
        if not pending:
            return
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
        try:
            written = os.write(self._file, pending)
            if written < len(pending):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self._state = (size + written, b"")
        self.num_written += pending.count(b"\n")

    def close(self) -> None:
        """Write what is left, make it last and close; raises OSError where that fails."""
        try:
            self.flush()
            os.fsync(self._file)
        finally:
            os.close(self._file)
