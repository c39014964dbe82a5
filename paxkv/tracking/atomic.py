"""Files that are either whole or not there."""

import os
from pathlib import Path
from threading import get_ident


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file by `data` in one step; a reader sees the old content or the new.

    Raises:
        OSError: The data could not be written; the old file is as it was, no other file is left.
    """
    temporary = _write_temporary(path, data)
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def create_atomic(path: Path, data: bytes) -> None:
    """Create a file with `data` in one step; of several processes that try, one succeeds.

    Raises:
        FileExistsError: The file is there already; it is untouched.
        OSError: The data could not be written; no file is left.
    """
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: as exclusive, though not in one step
        with open(path, "xb") as file:
            file.write(data)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut, where the system can open folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot sync a folder; the file itself is synced
    finally:
        os.close(descriptor)
