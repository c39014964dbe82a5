"""The files of a run, written by us whatever else tracks it.

    status.json        running | completed | interrupted | failed, times, process id; the first
                       file there and the last one rewritten
    env.json           what the run ran on, its configuration and choices
    events.jsonl       one event a line, written as it happens
    steps.parquet      one row a step       } rewritten whole every few seconds
    requests.parquet   one row a request    }
    summary.json       every summary number, at the end

Each file is replaced in one step, so that all of them can be read after a kill.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from paxkv.errors import ConfigError, PaxkvError
from paxkv.metrics.records import Event, RequestRecord, StepRecord
from paxkv.tracking.atomic import create_atomic, write_atomic
from paxkv.tracking.base import RunInfo, Status
from paxkv.tracking.eventlog import EventLog
from paxkv.tracking.jsonable import dumps
from paxkv.tracking.tables import RecordTable

STATUS_FILE = "status.json"
_COST_FACTOR = 20  # the tables are written for at most 1/20 of the time

_log = logging.getLogger(__name__)


def refuse_used_folder(run_dir: Path) -> None:
    """Raise ConfigError if a folder holds a run; call it before anything is written there."""
    if (run_dir / STATUS_FILE).exists():
        raise _used(run_dir)


class FilesTracker:
    """Writes the files of a run.

    Where the disk is full in the middle of a run, the run goes on: records stay in memory, one
    warning is logged, and writing is tried again; `finish` raises if it still fails.
    """

    required: ClassVar[bool] = True

    def __init__(self, flush_s: float = 2.0):
        """Make a tracker; `flush_s` is the least time between two rewrites of the tables."""
        self._flush_s = flush_s

    def start(self, info: RunInfo) -> None:
        """Claim the folder and write the first files.

        Raises:
            ConfigError: The folder holds a run, or cannot be made; nothing is changed.
            PaxkvError: The folder cannot be written to.
        """
        self._dir = info.run_dir
        self._status: dict[str, Any] = {
            "status": "running",
            "started_at": _now(),
            "finished_at": None,
            "pid": os.getpid(),
            "error": "",
        }
        refuse_used_folder(self._dir)
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            create_atomic(self._dir / STATUS_FILE, dumps(self._status, indent=2))
        except FileExistsError as error:
            if self._dir.is_dir():
                raise _used(self._dir) from error
            raise _unwritable(self._dir, error) from error
        except OSError as error:
            raise _unwritable(self._dir, error) from error
        self._requests = RecordTable(RequestRecord)
        self._steps = RecordTable(StepRecord)
        self._warned = False
        self._next_flush = time.monotonic() + self._flush_s
        environment = {
            "name": info.name,
            "choices": info.choices,
            "config": info.config,
            **info.env,
        }
        try:
            write_atomic(self._dir / "env.json", dumps(environment, indent=2))
            self._write_tables()
            self._events = EventLog(self._dir / "events.jsonl")
        except OSError as error:
            (self._dir / STATUS_FILE).unlink(missing_ok=True)  # no run here: give the folder back
            raise _unwritable(self._dir, error) from error

    def step(self, record: StepRecord) -> None:
        """Keep a step; it is in the file a few seconds later."""
        self._steps.append(record)
        self._flush_when_due()

    def request(self, record: RequestRecord) -> None:
        """Keep a request; it is in the file a few seconds later."""
        self._requests.append(record)
        self._flush_when_due()

    def event(self, event: Event) -> None:
        """Write an event."""
        try:
            self._events.append(event)
        except OSError as error:
            self._warn(error)

    def finish(
        self, status: Status, summary: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        """Write everything, the status last.

        Raises:
            PaxkvError: Something could not be written; says what was.
        """
        parts: dict[str, Callable[[], None]] = {
            f"events.jsonl ({self._events.num_written} events)": self._events.close,
            f"steps.parquet ({len(self._steps)} steps)": self._write_steps,
            f"requests.parquet ({len(self._requests)} requests)": self._write_requests,
        }
        if summary is not None:
            parts["summary.json"] = lambda: write_atomic(
                self._dir / "summary.json", dumps(summary, indent=2)
            )
        saved, lost, cause = [], [], None
        for name, write in parts.items():
            try:
                write()
                saved.append(name)
            except OSError as caught:
                lost.append(name)
                cause = cause or caught
        message = error
        if cause is not None:
            message = (
                f"{self._dir}: {cause.strerror or cause}. Saved: {', '.join(saved) or 'nothing'}. "
                f"Not saved, or only as far as earlier in the run: {', '.join(lost)}. Free some "
                "space and run again, or choose another folder with hydra.run.dir=DIR."
            )
            status = "failed"
        self._status |= {"status": status, "finished_at": _now(), "error": message}
        try:
            write_atomic(self._dir / STATUS_FILE, dumps(self._status, indent=2))
        except OSError as caught:
            raise PaxkvError(message) if cause else _unwritable(self._dir, caught) from caught
        if cause is not None:
            raise PaxkvError(message) from cause

    def _flush_when_due(self) -> None:
        if time.monotonic() < self._next_flush:
            return
        start = time.monotonic()
        try:
            self._write_tables()
            self._events.flush()
        except OSError as error:
            self._warn(error)
        end = time.monotonic()
        self._next_flush = end + max(self._flush_s, _COST_FACTOR * (end - start))

    def _write_tables(self) -> None:
        self._write_steps()
        self._write_requests()

    def _write_steps(self) -> None:
        write_atomic(self._dir / "steps.parquet", self._steps.to_parquet())

    def _write_requests(self) -> None:
        write_atomic(self._dir / "requests.parquet", self._requests.to_parquet())

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _log.warning(
                "%s: %s. The run goes on; its records stay in memory and are written again later.",
                self._dir,
                error.strerror or error,
            )
        self._warned = True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _used(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"hydra.run.dir={run_dir}: the folder already holds a run ({STATUS_FILE} is there), and "
        "records are never overwritten. Try hydra.run.dir=DIR with another folder."
    )


def _unwritable(run_dir: Path, error: OSError) -> PaxkvError:
    return PaxkvError(
        f"hydra.run.dir={run_dir}: cannot write there: {error.strerror or error}. "
        "Try hydra.run.dir=DIR with a folder that has room and that you may write to."
    )
