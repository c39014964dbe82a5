"""What a user sees: a header, progress, one result table; plain lines where it is no terminal."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from paxkv.metrics.records import Event, RequestRecord, StepRecord
from paxkv.tracking.base import RunInfo, Status
from paxkv.tracking.results import result_rows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_WIDTH = 100
_REFRESH_S = 0.1
_PLAIN_S = 5.0  # between two progress lines in a log file
_RATE_WINDOW_S = 2.0


class ConsoleTracker:
    """Shows a run.

    Rich tables and a progress bar on a terminal; lines of plain text elsewhere and under NO_COLOR.
    """

    required: ClassVar[bool] = False

    def __init__(self, file: TextIO | None = None):
        """Make a tracker that writes to `file`, by default to standard output."""
        self._file = file

    def start(self, info: RunInfo) -> None:
        """Show the header and start the progress display."""
        from rich.console import Console

        console = Console(file=self._file)
        self._console = Console(file=self._file, width=min(_WIDTH, console.width), highlight=False)
        self._rich = console.is_terminal and not os.environ.get("NO_COLOR")
        self._run_dir = info.run_dir
        self._total = info.num_requests
        self._finished = 0
        self._usage = 0.0
        self._window: list[tuple[float, int]] = []
        self._next_shown = time.monotonic() + (0.0 if self._rich else _PLAIN_S)
        self._progress = None
        if self._rich:
            self._console.print(_table(("", ""), list(info.header.items())))
            self._progress = _progress(self._console)
            self._task = self._progress.add_task("serving", total=self._total, state="")
            self._progress.start()  # the bar moves on a thread of rich's
        else:
            self._plain([f"{label}: {text}" for label, text in info.header.items()])

    def step(self, record: StepRecord) -> None:
        """Show where the run stands, some times a second."""
        end_s = record.start_s + record.duration_s
        self._window.append((end_s, record.decode_rows))
        now = time.monotonic()
        if now < self._next_shown:
            return
        self._window = [entry for entry in self._window if entry[0] >= end_s - _RATE_WINDOW_S]
        num_blocks = record.blocks_free + record.blocks_live + record.blocks_cached
        usage = record.blocks_live / num_blocks if num_blocks else 0.0
        span_s = end_s - self._window[0][0]
        # First tokens come out of prefills and are not counted: the rate is that of decoding.
        rate = sum(tokens for _, tokens in self._window[1:]) / span_s if span_s > 0 else 0.0
        state = (
            f"running {record.running}, waiting {record.waiting}, {rate:.0f} tok/s, "
            f"cache {usage:.0%}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=self._finished, state=state)
            self._next_shown = now + _REFRESH_S
        else:
            self._plain([f"{self._finished}/{self._total or '?'} requests, {state}"])
            self._next_shown = now + _PLAIN_S

    def request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._finished += record.finish_reason is not None

    def event(self, event: Event) -> None:
        """Leave the event to `events.jsonl`; the totals are in the result table."""

    def finish(
        self, status: Status, summary: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        """Show the results, and where the records are."""
        if self._progress is not None:
            self._progress.update(self._task, completed=self._finished, state="")
            self._progress.stop()
        rows = result_rows(summary) if summary is not None else []
        closing = [] if status == "completed" else [f"{status}{f': {error}' if error else ''}"]
        closing.append(f"records: {self._run_dir}")
        if self._rich:
            if rows:
                self._console.print(_table(("result", "value", "unit"), rows))
            self._plain(closing)
        else:
            self._plain([f"{label}: {value} {unit}".rstrip() for label, value, unit in rows])
            self._plain(closing)

    def _plain(self, lines: list[str]) -> None:
        """Print text as it is: no markup, no colour, no wrapping inside words or paths."""
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True, emoji=False)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a cell are no markup
    return table


def _progress(console: "Console") -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        refresh_per_second=5,
    )
