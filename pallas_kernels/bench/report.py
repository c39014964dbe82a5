"""What the benchmark prints and writes."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from pallas_kernels.bench.sweep import FAILED, OK, UNSUPPORTED, Outcome
from pallas_kernels.bench.table import Record
from pallas_kernels.bench.verdicts import Verdict
from pallas_kernels.paged_attention.roofline import H200, estimate
from pallas_kernels.paged_attention.specs import SPECS

STEP_HEADER = (
    f"{'spec':28} {'dtype':14} {'implementation':14} {'median ms':>10} {'fastest':>8} "
    f"{'GB/s':>6} {'× ref.':>7} {'compile s':>9} {'difference':>10}"
)

_TABLE_COLUMNS = (
    f"{'spec':34} {'dtype':14} {'on':11} {'µs':>9} {'best':>9} {'MB':>7} {'TB/s':>6} "
    f"{'of copy':>7} {'TFLOP/s':>8} {'paper µs':>9} {'error':>6}"
)
_PAPER_COLUMNS = (
    f"{'spec':34} {'dtype':14} {'MB':>7} {'GFLOP':>7} {'CTAs':>5} {'SMEM KB/CTA':>12} "
    f"{'in flight KB/SM':>16} {'memory':>7} {'tensor':>7} {'SMEM':>6} {'total µs':>9}  bound by"
)


def step_line(record: dict[str, Any]) -> str:
    """A record of a step, under `STEP_HEADER`."""
    return (
        f"{record['spec']:28} {record['dtype']:14} {record['implementation']:14} "
        f"{record['step_s'] * 1e3:10.2f} {record['fastest_s'] * 1e3:8.2f} "
        f"{record['bytes_per_s'] / 1e9:6.2f} {record['speedup']:7.2f} {record['compile_s']:9.2f} "
        f"{record['max_abs_difference']:10.1e}"
    )


def outcome_line(outcome: Outcome) -> str:
    """A line for an outcome that is not OK; empty for one that is."""
    if outcome.status == OK:
        return ""
    case = outcome.case
    what = f"{outcome.implementation} {case.op} {case.dtype} {case.name!r}"
    return f"  {outcome.status}: {what}: {outcome.reason}"


def sweep_summary(outcomes: Sequence[Outcome]) -> str:
    """Counts and the worst case of every implementation and op."""
    head = f"{'implementation':14} {'op':8} {'ok':>4} {'failed':>7} {'unsupported':>12}"
    lines = [f"{head}  worst row, of its bound (1 = bound)"]
    kinds = dict.fromkeys((o.implementation, o.case.op) for o in outcomes)
    for name, op in kinds:
        mine = [o for o in outcomes if (o.implementation, o.case.op) == (name, op)]
        counts = [sum(o.status == status for o in mine) for status in (OK, FAILED, UNSUPPORTED)]
        line = f"{name:14} {op:8} {counts[0]:4} {counts[1]:7} {counts[2]:12}"
        measured = [o for o in mine if o.ratio is not None]
        if measured:
            worst = max(measured, key=lambda o: o.ratio.of_bound if o.ratio else 0.0)
            assert worst.ratio is not None
            line += (
                f"  {worst.ratio.of_bound:.2f}, error {worst.ratio.error:.1e}: {worst.case.dtype} "
                f"{worst.case.name!r}"
            )
        lines.append(line)
    return "\n".join(lines)


def table_header(copy_rate: float) -> str:
    """The method and the columns of the table."""
    return f"""
Copy on this device: {copy_rate / 1e12:.2f} TB/s, read and written bytes together.
Time of a call: a program makes many calls, each after the one before, over layers that have left
the L2 cache; its time over its calls, nothing subtracted; median and best of the programs. Work
plans are part of every call. MB: K and V of the live tokens, scales, q, output. Paper: what the
roofline implies for an H200. Error: largest against the oracle, as a share of its bound.
{_TABLE_COLUMNS}"""


def record_line(record: Record) -> str:
    """A record of the table, under `table_header`."""
    line = f"{record.spec:34} {record.dtype:14} {record.contender:11} "
    if record.status != OK:
        return line + f"{record.status}: {record.reason}"
    assert record.call_s and record.fastest_s and record.bytes_per_s and record.paper_s
    return line + (
        f"{record.call_s * 1e6:9.1f} {record.fastest_s * 1e6:9.1f} {record.bytes / 1e6:7.1f} "
        f"{record.bytes_per_s / 1e12:6.2f} {record.copy_share or 0:7.1%} "
        f"{record.flops / record.call_s / 1e12:8.1f} {record.paper_s * 1e6:9.1f} "
        + (f"{record.of_bound:6.2f}" if record.of_bound is not None else f"{'–':>6}")
    )


def verdict_lines(verdicts: Sequence[Verdict]) -> str:
    """One line a target."""
    words = {True: "met", False: "MISSED", None: "–"}
    lines = [f"{v.target:60} {v.measured:16} {words[v.met]}" for v in verdicts]
    return "\nTargets (for an H200)\n" + "\n".join(lines)


def paper_table(shapes: Sequence[tuple[str, str]]) -> str:
    """What each (spec, dtype) takes on paper."""
    lines = [
        f"On paper, {H200.name}: {H200.copy_bytes_per_s / 1e12} TB/s copied, "
        f"{H200.tensor_flops_per_s / 1e12:.0f} TFLOP/s, {H200.sms} SMs; an SM must have "
        f"{H200.needed_in_flight / 1e3:.0f} KB in flight. Nothing here was measured.",
        _PAPER_COLUMNS,
    ]
    for name, dtype in shapes:
        e = estimate(SPECS[name], dtype)
        lines.append(
            f"{name:34} {dtype:14} {e.bytes / 1e6:7.1f} {e.flops / 1e9:7.2f} {e.ctas:5} "
            f"{e.smem_bytes_per_cta / 1e3:12.0f} {e.in_flight_per_sm / 1e3:16.0f} "
            f"{e.memory_s * 1e6:7.1f} {e.tensor_s * 1e6:7.1f} {e.smem_s * 1e6:6.1f} "
            f"{e.seconds * 1e6:9.1f}  {e.bound_by}"
        )
    return "\n".join(lines)


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON has it."""
    ratio = outcome.ratio._asdict() if outcome.ratio else {}
    return {
        **dataclasses.asdict(outcome.case),
        "implementation": outcome.implementation,
        "status": outcome.status,
        "reason": outcome.reason,
        **ratio,
    }


def record_dict(record: Record) -> dict[str, Any]:
    """A record as JSON has it."""
    return dataclasses.asdict(record)


def write_json(path: pathlib.Path, document: dict[str, Any]) -> None:
    """Write a document; infinities and NaN, which JSON lacks, become strings."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [finite(value) for value in x]
        return str(x) if isinstance(x, float) and not math.isfinite(x) else x

    path.write_text(json.dumps(finite(document), indent=2, allow_nan=False) + "\n")
