"""The result table: what of a summary is shown, in which words and units."""

from collections.abc import Mapping
from typing import Any

_LATENCIES = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("gap between tokens", "itl"),
    ("end to end", "e2el"),
)


def result_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of label, value and unit for a summary of `paxkv.metrics.summarize`."""
    requests, cache, preempt = summary["requests"], summary["cache"], summary["preempt"]
    steps = summary["steps"]
    rows = [
        (
            "requests completed",
            f"{summary['completed']} (stop {requests['stop']}, length {requests['length']})",
            f"of {requests['submitted']}",
        )
    ]
    left = [
        f"{requests[reason]} {reason}"
        for reason in ("rejected", "failed", "unfinished")
        if requests[reason]
    ]
    if left:
        rows.append(("not completed", ", ".join(left), "requests"))
    rows += [
        ("duration", _number(summary["duration"]), "s"),
        ("prompt / output", _pair(summary, "total_input_tokens", "total_output_tokens"), "tokens"),
        ("output throughput", _number(summary["output_throughput"]), "tokens/s"),
        ("request throughput", _number(summary["request_throughput"]), "requests/s"),
    ]
    if summary["request_goodput"] is not None:
        rows.append(("goodput", _number(summary["request_goodput"]), "requests/s"))
    for label, name in _LATENCIES:
        values = [_number(summary[f"{stat}_{name}_ms"]) for stat in ("mean", "median", "p99")]
        rows.append((f"{label}, mean / median / p99", " / ".join(values), "ms"))
    if requests["one_token_outputs"]:
        count = requests["one_token_outputs"]
        rows.append(("of one token, so without gaps", f"{count}", "requests"))
    if any(summary["negative"].values()):
        count = sum(summary["negative"].values())
        rows.append(("left out, the clock went back", f"{count}", "values"))
    rows += [
        (
            "cache usage, mean / peak",
            f"{_percent(cache['usage_mean'])} / {_percent(cache['usage_peak'])}",
            "% of blocks",
        ),
        (
            "fragmentation, internal / external",
            f"{_percent(cache['internal_fragmentation_mean'])} / "
            f"{_percent(cache['external_fragmentation_mean'])}",
            "% of held / of free",
        ),
        (
            "prefix cache hits",
            f"{cache['prefix_hit_tokens']} ({_percent(cache['prefix_hit_rate'])} %)",
            "prompt tokens",
        ),
        (
            "preemptions",
            f"{preempt['num_preemptions']} in {preempt['requests_preempted']}",
            "requests",
        ),
    ]
    rows += [
        (
            f"tenant {name}, p99: first token / end to end",
            f"{_number(tenant['p99_ttft_ms'])} / {_number(tenant['p99_e2el_ms'])}",
            "ms",
        )
        for name, tenant in summary["tenants"].items()
    ]
    rows += [
        (
            f"tenant {name}, blocks: mean / peak",
            f"{_number(tenant['blocks_mean'])} / {tenant['blocks_peak']}",
            "blocks",
        )
        for name, tenant in summary["tenants"].items()
        if tenant["blocks_peak"] is not None
    ]
    if preempt["num_preemptions"]:
        rows += [
            (
                "recomputed",
                f"{preempt['recomputed_tokens']} ({_percent(preempt['recompute_tax'])} %)",
                "tokens",
            ),
            ("swapped out / in", _pair(preempt, "swap_out_blocks", "swap_in_blocks"), "blocks"),
        ]
    rows.append(("host time of a step, median", _number(_ms(steps["host_median_s"])), "ms"))
    if steps["num_compiles"]:
        compiled = f"{steps['num_compiles']} in {_number(steps['compile_s'])}"
        rows.append(("shapes compiled while serving", compiled, "s"))
    return rows


def _number(value: float | None) -> str:
    """Show three significant digits and whole thousands; a dash for what is not known."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _pair(group: Mapping[str, Any], first: str, second: str) -> str:
    return f"{group[first]:,} / {group[second]:,}"
