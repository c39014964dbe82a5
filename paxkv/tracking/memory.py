"""A tracker that keeps every record, for whoever needs them all at the end: the summary does."""

from collections.abc import Mapping
from typing import Any, ClassVar

from paxkv.metrics.records import Event, RequestRecord, StepRecord
from paxkv.tracking.base import RunInfo, Status


class MemoryTracker:
    """Keeps the records of a run in lists, in the order in which they came."""

    required: ClassVar[bool] = True

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self.events: list[Event] = []

    def start(self, info: RunInfo) -> None:
        """Take note of nothing."""

    def step(self, record: StepRecord) -> None:
        """Keep a step."""
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        """Keep a request."""
        self.requests.append(record)

    def event(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)

    def finish(
        self, status: Status, summary: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        """Keep everything: the summary is made before this."""
