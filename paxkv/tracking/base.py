"""What a tracker is, and how several of them work side by side."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from paxkv.metrics.records import Event, RequestRecord, StepRecord

Status = Literal["running", "completed", "interrupted", "failed"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known of a run before it starts.

    Attributes:
        run_dir: The folder of the run; its records go there.
        name: Short name: what differs from the defaults.
        config: The configuration, resolved to plain values.
        env: What the run runs on; see `paxkv.tracking.environment`.
        header: What to show at the start: label to text, in order.
        choices: The option chosen in each configuration group.
        num_requests: How many requests will come; None if that is not known.
    """

    run_dir: Path
    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)
    header: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    num_requests: int | None = None


class Tracker(Protocol):
    """Takes the records of one run: `start` first, `finish` last, in between any order.

    Attributes:
        required: Whether the run must stop when this tracker fails. Other trackers are dropped,
            with one warning, and the run goes on.
    """

    required: ClassVar[bool]

    def start(self, info: RunInfo) -> None:
        """Open the run; raises ConfigError where it cannot be recorded as asked."""
        ...

    def step(self, record: StepRecord) -> None:
        """Take one engine step."""
        ...

    def request(self, record: RequestRecord) -> None:
        """Take one request, when it has ended or, in an interrupted run, at the end."""
        ...

    def event(self, event: Event) -> None:
        """Take one event."""
        ...

    def finish(
        self, status: Status, summary: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        """Close the run; `summary` is what `summarize` returned, `error` why the run failed."""
        ...


class Trackers:
    """Hands everything to several trackers, so that one that fails takes nothing from the others.

    Required trackers come first: a folder that is refused is refused before anything else starts.
    """

    required: ClassVar[bool] = True

    def __init__(self, trackers: Sequence[Tracker]):
        self._trackers = sorted(trackers, key=lambda tracker: not tracker.required)
        self._active: list[Tracker] = []  # those that started and have not failed

    def start(self, info: RunInfo) -> None:
        """Start every tracker; raises what a required one raises."""
        for tracker in self._trackers:
            try:
                tracker.start(info)
            except Exception as caught:
                if tracker.required:
                    raise
                _warn_dropped(tracker, caught)
            else:
                self._active.append(tracker)

    def step(self, record: StepRecord) -> None:
        """Hand on a step."""
        self._each(lambda tracker: tracker.step(record))

    def request(self, record: RequestRecord) -> None:
        """Hand on a request."""
        self._each(lambda tracker: tracker.request(record))

    def event(self, event: Event) -> None:
        """Hand on an event."""
        self._each(lambda tracker: tracker.event(event))

    def finish(
        self, status: Status, summary: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        """Finish every tracker that started, then raise what a required one raised."""
        failure: Exception | None = None
        for tracker in self._active:
            try:
                tracker.finish(status, summary, error)
            except Exception as caught:
                if tracker.required:
                    failure = failure or caught
                    status, error = "failed", error or str(caught)
                else:
                    _warn_dropped(tracker, caught)
        if failure is not None:
            raise failure

    def _each(self, call: Callable[[Tracker], None]) -> None:
        dropped = []
        for tracker in self._active:
            try:
                call(tracker)
            except Exception as caught:
                if tracker.required:
                    raise
                _warn_dropped(tracker, caught)
                dropped.append(tracker)
        if dropped:
            self._active = [tracker for tracker in self._active if tracker not in dropped]


def _warn_dropped(tracker: Tracker, caught: Exception) -> None:
    _log.warning(
        "%s failed and is switched off for this run; the other records go on. %s: %s",
        type(tracker).__name__,
        type(caught).__name__,
        caught,
    )
