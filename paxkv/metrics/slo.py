"""Service level objectives: what a request must meet to count as goodput."""

import math
from dataclasses import dataclass, fields

from paxkv.errors import ConfigError
from paxkv.metrics.latency import e2el_s, is_completed, itl_s, tpot_s, ttft_s
from paxkv.metrics.records import RequestRecord


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Upper bounds in seconds; None leaves that latency free.

    Source: goodput as in DistServe (OSDI'24) and `vllm bench serve`; the bound on the largest
    inter-token gap is ours.

    Attributes:
        ttft_s: Bound on the time to the first token.
        tpot_s: Bound on the time per output token; a one-token output meets it.
        itl_s: Bound on the largest gap between two tokens.
        e2e_s: Bound on the end-to-end latency.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        problems = [
            f"slo.{bound.name}={value}: must be seconds above 0, or null for no bound. "
            f"Try slo.{bound.name}=null."
            for bound in fields(self)
            if (value := getattr(self, bound.name)) is not None
            and not (isinstance(value, int | float) and math.isfinite(value) and value > 0)
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def is_set(self) -> bool:
        """Whether there is any bound at all."""
        return any(getattr(self, bound.name) is not None for bound in fields(self))

    def meets(self, record: RequestRecord) -> bool:
        """Say whether a request completed within every bound; a missing stamp does not meet one."""
        if not is_completed(record):
            return False
        if self.ttft_s is not None and not _within(ttft_s(record), self.ttft_s):
            return False
        if self.e2e_s is not None and not _within(e2el_s(record), self.e2e_s):
            return False
        if record.output_tokens < 2:
            return True
        if self.tpot_s is not None and not _within(tpot_s(record), self.tpot_s):
            return False
        return self.itl_s is None or _within(max(itl_s(record), default=None), self.itl_s)


def _within(latency_s: float | None, bound_s: float) -> bool:
    return latency_s is not None and latency_s <= bound_s
