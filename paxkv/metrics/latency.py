"""Latencies of one request, from its record; see the package docstring for the definitions."""

from collections.abc import Iterator
from itertools import pairwise

from paxkv.metrics.records import RequestRecord


def is_completed(record: RequestRecord) -> bool:
    """Say whether the request got its whole answer."""
    return record.finish_reason in ("stop", "length")


def ttft_s(record: RequestRecord) -> float | None:
    """Return arrival to first token, or None without a first token."""
    return None if record.first_token_s is None else record.first_token_s - record.arrival_s


def e2el_s(record: RequestRecord) -> float | None:
    """Return arrival to last token, or None while unfinished."""
    return None if record.finish_s is None else record.finish_s - record.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """Return the time per output token after the first, or None for fewer than two tokens."""
    if record.first_token_s is None or record.finish_s is None or record.output_tokens < 2:
        return None
    return (record.finish_s - record.first_token_s) / (record.output_tokens - 1)


def itl_s(record: RequestRecord) -> Iterator[float]:
    """Yield the gaps between neighbouring output tokens, negative ones (a clock set back) too."""
    return (later - earlier for earlier, later in pairwise(record.token_times_s))
