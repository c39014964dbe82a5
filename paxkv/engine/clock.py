"""The time of a run, in seconds since its start: read from the wall, or advanced by the engine."""

import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, and how it passes."""

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        ...

    def spend(self, duration_s: float, compile_s: float) -> None:
        """Account for a step: `duration_s` of work, and `compile_s` of compilation beside it."""
        ...

    def wait_until(self, time_s: float) -> None:
        """Let time pass until `time_s`; returns at once if that lies in the past."""
        ...


class WallClock:
    """Real time, standing still while new shapes compile.

    Compilation happens once a shape and not in steady state, so it is left out of latencies and
    reported apart.
    """

    def __init__(self):
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Return the real seconds since the start, less those spent compiling."""
        return time.perf_counter() - self._origin

    def spend(self, duration_s: float, compile_s: float) -> None:
        """Take compilation out; the work itself has already passed."""
        del duration_s
        self._origin += compile_s

    def wait_until(self, time_s: float) -> None:
        """Sleep."""
        delay = time_s - self.now()
        if delay > 0:
            time.sleep(delay)


class VirtualClock:
    """Time that passes only by steps and by waiting, so that an idle second costs nothing.

    Scheduling on the host takes no virtual time.
    """

    def __init__(self, start_s: float = 0.0):
        self._now = start_s

    def now(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def spend(self, duration_s: float, compile_s: float) -> None:
        """Advance by the work."""
        del compile_s
        self._now += duration_s

    def wait_until(self, time_s: float) -> None:
        """Jump."""
        self._now = max(self._now, time_s)
