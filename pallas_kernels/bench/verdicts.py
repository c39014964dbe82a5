"""The targets of the kernels on an H200, and whether a run meets them."""

from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.bench.contenders import JAX_CUDNN, JAX_TRITON, OURS
from pallas_kernels.bench.sweep import OK
from pallas_kernels.bench.table import Record

_LARGE = "llama8b-decode-64x4k"


class Verdict(NamedTuple):
    """A target, what was measured, and whether it is met; None where it could not be measured."""

    target: str
    measured: str
    met: bool | None


class _NotMeasuredError(Exception):
    """A record that a verdict needs has no time; the message says which and why."""


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Hold the records of a run against every target."""
    lines = {(r.spec, r.dtype, r.contender): r for r in records}

    def seconds(spec: str, dtype: str = "bfloat16", contender: str = OURS) -> float:
        record = lines.get((spec, dtype, contender))
        if record is None:
            raise _NotMeasuredError(f"{contender} on {spec} {dtype} is not in this run")
        if record.status != OK or record.call_s is None:
            raise _NotMeasuredError(
                f"{contender} on {spec} {dtype} {record.status}: {record.reason}"
            )
        return record.call_s

    def copy_share() -> float:
        seconds(_LARGE)
        return lines[_LARGE, "bfloat16", OURS].copy_share or 0.0

    def rate(spec: str) -> float:
        call_s = seconds(spec)
        return lines[spec, "bfloat16", OURS].bytes / call_s

    def faster(spec: str, dtype: str) -> float:
        return seconds(spec) / seconds(spec, dtype)

    def against(baseline: str) -> float:
        return seconds(_LARGE, contender=baseline) / seconds(_LARGE)

    # (target, measure, its form, least, most)
    inf = float("inf")
    targets = [
        (f"{_LARGE} bf16 ≤ 240 µs", lambda: seconds(_LARGE) * 1e6, "{:.1f} µs", 0, 240),
        (f"{_LARGE} bf16 ≥ 90 % of the copy rate", copy_share, "{:.1%}", 0.9, inf),
        *(
            (
                f"{_LARGE} {dtype} ≥ 1.6 × faster than our bf16",
                lambda dtype=dtype: faster(_LARGE, dtype),
                "{:.2f} ×",
                1.6,
                inf,
            )
            for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
        ),
        (
            "window of 1,024 at 32k ≤ 1.2 × a 1k context",
            lambda: seconds("llama8b-decode-16x32k-window1k") / seconds("llama8b-decode-16x1k"),
            "{:.2f} ×",
            0,
            1.2,
        ),
        (
            "one row of 32k ≤ 55 µs",
            lambda: seconds("llama8b-decode-1x32k") * 1e6,
            "{:.1f} µs",
            0,
            55,
        ),
        (
            "Zipf lengths ≥ 70 % of the uniform rate",
            lambda: rate("llama8b-decode-64xzipf4k") / rate(_LARGE),
            "{:.1%}",
            0.7,
            inf,
        ),
        ("≥ 2 × jax's Triton kernel", lambda: against(JAX_TRITON), "{:.2f} ×", 2.0, inf),
        ("≥ 1 × cuDNN", lambda: against(JAX_CUDNN), "{:.2f} ×", 1.0, inf),
    ]
    verdicts = []
    for target, measure, form, least, most in targets:
        try:
            value = measure()
        except _NotMeasuredError as error:
            verdicts.append(Verdict(target, f"not measured: {error}", None))
            continue
        verdicts.append(Verdict(target, form.format(value), least <= value <= most))
    return verdicts
