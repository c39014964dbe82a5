"""The one place where records become summary numbers."""

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import Any

from paxkv.metrics.latency import e2el_s, is_completed, itl_s, tpot_s, ttft_s
from paxkv.metrics.records import Event, RequestRecord, StepRecord
from paxkv.metrics.slo import Slo
from paxkv.metrics.stats import describe, ratio, weighted_mean


def summarize(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    events: Sequence[Event],
    duration_s: float,
    slo: Slo | None = None,
    *,
    block_size: int,
) -> dict[str, Any]:
    """Compute every number of `summary.json`.

    The top level has the keys of `vllm bench serve`, where tokens and latencies are those of
    completed requests; ours lie in groups below it. Latencies are in ms as there, all other times
    in seconds, shares from 0 to 1. What cannot be computed is None; no value is NaN or infinite.

    Args:
        requests: One record a request, unfinished ones too.
        steps: One record a step.
        events: What happened to requests and to the cache.
        duration_s: From the start of serving to the last record.
        slo: Bounds for goodput; without any, goodput is None.
        block_size: Tokens a block holds.
    """
    completed = [r for r in requests if is_completed(r)]
    failed = sum(r.finish_reason in ("rejected", "failed") for r in requests)
    input_tokens = sum(r.prompt_tokens for r in completed)
    output_tokens = sum(r.output_tokens for r in completed)
    bounds = slo if slo is not None and slo.is_set else None
    good = sum(bounds.meets(r) for r in completed) if bounds else 0
    latencies, missing, negative = _latencies(completed)
    return {
        "duration": duration_s,
        "completed": len(completed),
        "failed": failed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": ratio(len(completed), duration_s),
        "request_goodput": ratio(good, duration_s) if bounds else None,
        "output_throughput": ratio(output_tokens, duration_s),
        "total_token_throughput": ratio(input_tokens + output_tokens, duration_s),
        **latencies,
        "slo_attainment": ratio(good, len(completed) + failed) if bounds else None,
        "requests": _requests(requests),
        "missing": missing,
        "negative": negative,
        "cache": _cache(requests, steps, events, block_size),
        "preempt": _preempt(requests, steps, events, duration_s),
        "tenants": _tenants(requests, steps),
        "steps": _steps(steps),
    }


def _latencies(
    completed: Sequence[RequestRecord],
) -> tuple[dict[str, float | None], dict[str, int], dict[str, int]]:
    """Return statistics in ms, counts of requests without a value, counts of negative values."""
    values: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    missing = dict.fromkeys(values, 0)
    negative = dict.fromkeys(values, 0)
    for record in completed:
        found = {
            "ttft": [ttft_s(record)],
            "tpot": [tpot_s(record)],
            "itl": list(itl_s(record)),
            "e2el": [e2el_s(record)],
        }
        for name, candidates in found.items():
            present = [value for value in candidates if value is not None and isfinite(value)]
            missing[name] += not present
            kept = [value for value in present if value >= 0]
            negative[name] += len(present) - len(kept)
            values[name] += kept
    latencies = {
        f"{stat}_{name}_ms": None if value is None else 1e3 * value
        for name, seconds in values.items()
        for stat, value in describe(seconds)._asdict().items()
    }
    return latencies, missing, negative


def _requests(requests: Sequence[RequestRecord]) -> dict[str, int]:
    reasons = Counter(r.finish_reason or "unfinished" for r in requests)
    return {
        "submitted": len(requests),
        **{
            reason: reasons[reason]
            for reason in ("stop", "length", "rejected", "failed", "unfinished")
        },
        "one_token_outputs": sum(is_completed(r) and r.output_tokens == 1 for r in requests),
        "unfinished_output_tokens": sum(r.output_tokens for r in requests if not is_completed(r)),
    }


def _cache(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    events: Sequence[Event],
    block_size: int,
) -> dict[str, float | int | None]:
    pools = [(s, s.blocks_free + s.blocks_live + s.blocks_cached) for s in steps]
    usages = [s.blocks_live / pool if pool else 0.0 for s, pool in pools]
    held = [s for s in steps if s.blocks_live > 0]
    occupancy = weighted_mean(
        [s.tokens_held / (s.blocks_live * block_size) for s in held], [s.duration_s for s in held]
    )
    free = [s for s in steps if s.blocks_free > 0]
    external = weighted_mean(
        [1.0 - s.largest_free_run_blocks / s.blocks_free for s in free],
        [s.duration_s for s in free],
    )
    durations = [s.duration_s for s in steps]
    admitted = [r for r in requests if r.first_scheduled_s is not None]
    hit_tokens = sum(r.cached_prompt_tokens for r in admitted)
    return {
        "num_blocks": max((pool for _, pool in pools), default=None),
        "block_size": block_size,
        "blocks_free_mean": weighted_mean([s.blocks_free for s in steps], durations),
        "blocks_live_mean": weighted_mean([s.blocks_live for s in steps], durations),
        "blocks_cached_mean": weighted_mean([s.blocks_cached for s in steps], durations),
        "usage_mean": weighted_mean(usages, durations),
        "usage_peak": max((s.blocks_peak / pool for s, pool in pools if pool), default=None),
        "occupancy_mean": occupancy,
        "internal_fragmentation_mean": None if occupancy is None else 1.0 - occupancy,
        "external_fragmentation_mean": external,
        "prefix_hit_tokens": hit_tokens,
        "forked_tokens": sum(r.forked_prompt_tokens for r in admitted),
        "prefix_hit_rate": ratio(hit_tokens, sum(r.prompt_tokens for r in admitted)),
        "evicted_blocks": sum(_blocks(e) for e in events if e.kind == "evict"),
    }


def _blocks(event: Event) -> int:
    """Return how many blocks an event is about: what its data says, else one."""
    blocks = event.data.get("blocks", 1)
    return blocks if isinstance(blocks, int) else 1


def _preempt(
    requests: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    events: Sequence[Event],
    duration_s: float,
) -> dict[str, float | int | None]:
    computed = sum(s.prefill_tokens + s.decode_rows for s in steps)
    recomputed = sum(s.recomputed_tokens for s in steps)
    count = sum(s.preemptions for s in steps)
    return {
        "num_preemptions": count,
        "preemptions_per_min": ratio(60.0 * count, duration_s),
        "requests_preempted": sum(r.num_preemptions > 0 for r in requests),
        "max_per_request": max((r.num_preemptions for r in requests), default=0),
        "num_swaps": sum(e.kind == "swap_out" for e in events),
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "recompute_tax": ratio(recomputed, computed),
        "swap_out_blocks": sum(s.swap_out_blocks for s in steps),
        "swap_in_blocks": sum(s.swap_in_blocks for s in steps),
        "swap_bytes": sum(s.swap_bytes for s in steps),
    }


def _tenants(
    requests: Sequence[RequestRecord], steps: Sequence[StepRecord]
) -> dict[str, dict[str, float | int | None]]:
    """Return what each tenant got; empty where there is only one and nothing is accounted."""
    names = sorted({r.tenant for r in requests} | {name for s in steps for name in s.tenant_blocks})
    accounted = any(s.tenant_blocks for s in steps)
    if len(names) < 2 and not accounted:
        return {}
    durations = [s.duration_s for s in steps]
    found = {}
    for name in names:
        own = [r for r in requests if r.tenant == name]
        completed = [r for r in own if is_completed(r)]
        latencies, _, _ = _latencies(completed)
        blocks = [s.tenant_blocks.get(name, 0) for s in steps] if accounted else []
        found[name] = {
            "requests": len(own),
            "completed": len(completed),
            "output_tokens": sum(r.output_tokens for r in completed),
            "preemptions": sum(r.num_preemptions for r in own),
            "blocks_mean": weighted_mean(blocks, durations) if accounted else None,
            "blocks_peak": max(blocks, default=None),
            **{
                f"{stat}_{latency}_ms": latencies[f"{stat}_{latency}_ms"]
                for latency in ("ttft", "tpot", "e2el")
                for stat in ("median", "p99")
            },
        }
    return found


def _steps(steps: Sequence[StepRecord]) -> dict[str, float | int | None]:
    host = describe([s.host_s for s in steps])
    durations = describe([s.duration_s for s in steps])
    rows = [s.decode_rows for s in steps if s.decode_rows > 0]
    return {
        "num_steps": len(steps),
        "duration_median_s": durations.median,
        "duration_p99_s": durations.p99,
        "host_median_s": host.median,
        "host_p99_s": host.p99,
        "decode_rows_mean": describe(rows).mean,
        "running_peak": max((s.running for s in steps), default=0),
        "num_compiles": sum(s.num_compiles for s in steps),
        "compile_s": sum(s.compile_s for s in steps),
    }
