"""Several workloads at once, each a tenant's: who shares the pool with whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paxkv.errors import ConfigError
from paxkv.workload.base import ModelLimits, TextTokenizer, Workload, num_requests
from paxkv.workload.request import Request


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The requests of several workloads, each under the name of a tenant.

    Each workload draws from a stream of its own, so that a change to one, or its absence, leaves
    the requests of the others as they are.

    Attributes:
        parts: The workload of each tenant, by its name.
        priorities: The priority of each tenant's requests, lower is more urgent; each request keeps
            its own where a tenant is not named.
    """

    parts: Mapping[str, Workload]
    priorities: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if not self.parts:
            problems.append(
                "workload.parts={}: a mix needs a workload for at least one tenant. "
                "Try workload=random."
            )
        for name, priority in self.priorities.items():
            if not isinstance(priority, int) or isinstance(priority, bool):
                problems.append(
                    f"workload.priorities.{name}={priority}: must be a whole number, lower is more "
                    f"urgent. Try +workload.priorities.{name}=0."
                )
            if name not in self.parts:
                problems.append(
                    f"workload.priorities.{name}: no tenant of workload.parts has that name. "
                    f"They are {', '.join(self.parts)}."
                )
        for name, part in self.parts.items():
            if not hasattr(part, "requests"):
                problems.append(
                    f"workload.parts.{name}={part!r}: not a workload. Give it the lines of one of "
                    "conf/workload, _target_ included."
                )
        if problems:
            raise ConfigError(problems)

    @property
    def num_requests(self) -> int | None:
        """How many requests there will be, every sample counted; None where a part cannot say."""
        counts = [num_requests(part) for part in self.parts.values()]
        return None if None in counts else sum(count for count in counts if count is not None)

    def requests(self, tokenizer: TextTokenizer, model: ModelLimits, seed: int) -> list[Request]:
        """Return the requests of all parts; their ids start with the tenant's name."""
        return [
            replace(
                request,
                request_id=f"{name}:{request.request_id}",
                fork_of=None if request.fork_of is None else f"{name}:{request.fork_of}",
                tenant=name,
                priority=self.priorities.get(name, request.priority),
            )
            for name, part in self.parts.items()
            for request in part.requests(tokenizer, model, _seed_of(name, seed))
        ]


def _seed_of(name: str, seed: int) -> int:
    """Return a tenant's own seed: a function of the run's seed and of its name."""
    value = seed
    for byte in name.encode():
        value = (value * 0x01000193 ^ byte) % (1 << 32)
    return value
