"""The waiting requests: a sorted queue a tenant, so that no tenant's head blocks another's."""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from paxkv.engine.request import Sequence


class Waiting(NamedTuple):
    """A waiting sequence and its sort key, unique among all."""

    key: tuple[float, ...]
    sequence: Sequence


class WaitingQueues:
    """Waiting sequences by tenant, each queue sorted by key. Plain data: it pickles."""

    def __init__(self) -> None:
        self._queues: dict[str, list[Waiting]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, tenant after tenant."""
        for queue in self._queues.values():
            for entry in queue:
                yield entry.sequence

    def add(self, sequence: Sequence, key: tuple[float, ...]) -> None:
        """Put a sequence where its key belongs."""
        queue = self._queues.setdefault(sequence.request.tenant, [])
        bisect.insort(queue, Waiting(key, sequence), key=lambda entry: entry.key)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: It does not wait.
        """
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        queue.pop([entry.sequence for entry in queue].index(sequence))
        self._count -= 1
        if not queue:
            del self._queues[tenant]

    def heads(self) -> list[Waiting]:
        """Return the first of each queue."""
        return [queue[0] for queue in self._queues.values()]

    def has(self, tenant: str) -> bool:
        """Whether any request of a tenant waits."""
        return tenant in self._queues
