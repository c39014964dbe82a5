"""The benchmark of the kernels.

On a GPU: a correctness sweep against a float64 oracle, then a table of time, bytes and share of the
copy bandwidth for shapes of real models, against what JAX itself ships, then the targets; all in
under 4 minutes, with JSON beside it. The exit status is 1 if an implementation of ours was wrong or
failed to run; a baseline that does is named, and a missed target is not an error. On a machine
without a GPU: what it would run.
"""

import argparse
import importlib.util
import itertools
import os
import pathlib
import platform
from collections.abc import Iterable, Sequence

import jax

from pallas_kernels.bench import report
from pallas_kernels.bench.cases import sweep_cases
from pallas_kernels.bench.contenders import (
    JAX_CUDNN,
    JAX_TRITON,
    contender_names,
    default_contenders,
)
from pallas_kernels.bench.steps import missing_memory, time_steps
from pallas_kernels.bench.sweep import FAILED, Outcome, run_sweep
from pallas_kernels.bench.table import Clock, Record, Settings, time_shape
from pallas_kernels.bench.timing import copy_bandwidth
from pallas_kernels.bench.verdicts import judge
from pallas_kernels.bench.writes import time_writes
from pallas_kernels.dispatch import IMPLEMENTATIONS, available_implementations
from pallas_kernels.paged_attention.specs import GPU_DTYPES, GPU_SPECS, SPECS, STEP_SPECS
from pallas_kernels.pages import KV_DTYPES

_JSON = pathlib.Path("bench.json")
# Writes of a decode step and of a prefill chunk, timed after the shapes.
_WRITE_TOKENS, _WRITE_DTYPES, _WRITERS = (64, 2048), ("bfloat16", "int8"), ("mosaic", "xla")
_BASELINE_MODULES = {
    JAX_TRITON: "jax.experimental.pallas.ops.gpu.paged_attention",
    JAX_CUDNN: "jax._src.cudnn.fused_attention_stablehlo",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments, run, print; returns the exit status."""
    args = _parser().parse_args(argv)
    environment = describe_environment()
    if args.paper:
        print(report.paper_table(_shapes(args, GPU_SPECS)))
        return 0
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    if args.cpu:
        return _run_steps(args, environment)
    if not args.quick and jax.default_backend() != "gpu":
        print(_list_plan(args))
        return 0
    return _run(args, environment)


def describe_environment() -> dict[str, str | int]:
    """What the figures depend on, by name."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "cpu_cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "jax": jax.__version__,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="the sweep only, on any device")
    mode.add_argument(
        "--cpu",
        action="store_true",
        help="time whole steps (all layers, write and attend) on any device, a CPU too",
    )
    mode.add_argument(
        "--paper", action="store_true", help="print what the shapes take on paper, on an H200"
    )
    parser.add_argument(
        "--spec",
        nargs="+",
        choices=SPECS,
        metavar="SPEC",
        help=f"shapes; with --cpu by default {', '.join(STEP_SPECS)}; else {', '.join(GPU_SPECS)}",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=KV_DTYPES,
        metavar="DTYPE",
        help=f"KV dtypes ({', '.join(KV_DTYPES)}); by default those of each shape, float32 "
        "with --cpu",
    )
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=contender_names(),
        metavar="NAME",
        help=f"what to run ({', '.join(contender_names())}); by default all, "
        "reference and xla at bfloat16 only",
    )
    parser.add_argument(
        "--seconds", type=float, help="for each measurement; by default 0.25, 2 with --cpu"
    )
    parser.add_argument(
        "--budget", type=float, default=220, help="seconds after which no shape is begun (220)"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help=f"write the records here; by default {_JSON} in the working folder, none with --cpu",
    )
    return parser


def _shapes(args: argparse.Namespace, default: Iterable[str]) -> list[tuple[str, str]]:
    """The (spec, dtype) pairs asked for."""
    return [
        (name, dtype)
        for name in args.spec or default
        for dtype in args.dtype or GPU_DTYPES.get(name, ("bfloat16",))
    ]


def _list_plan(args: argparse.Namespace) -> str:
    ours = args.implementation or IMPLEMENTATIONS
    lines = [
        "",
        f"No GPU: JAX runs on {jax.default_backend()} here, so nothing is timed. On a GPU this "
        "command would run",
        f"  a correctness sweep: {len(sweep_cases())} cases each on "
        f"{', '.join(name for name in ours if name not in _BASELINE_MODULES)}",
        "  a table of time, bytes and share of the copy bandwidth of",
    ]
    for name in args.spec or GPU_SPECS:
        dtypes = [dtype for spec, dtype in _shapes(args, GPU_SPECS) if spec == name]
        lines.append(f"    {name:36} {', '.join(dtypes)}")
    lines.append("  each on")
    for name in args.implementation or contender_names():
        when = "" if args.implementation or name in default_contenders("int8") else ", in bfloat16"
        lines.append(f"    {name:12} {_where(name)}{when}")
    if args.spec is None:
        dtypes = " and ".join(args.dtype or _WRITE_DTYPES)
        lines.append(f"  writes of {' and '.join(map(str, _WRITE_TOKENS))} tokens in {dtypes}")
    lines += [
        "  the targets, met or missed",
        "Here: --cpu times whole steps, --quick runs the sweep, --paper prints the roofline.",
    ]
    return "\n".join(lines)


def _where(name: str) -> str:
    if name not in _BASELINE_MODULES:
        return "pallas_kernels"
    module = _BASELINE_MODULES[name]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return module if found else f"absent: this jax has no {module}"


def _run_steps(args: argparse.Namespace, environment: dict[str, str | int]) -> int:
    runnable = available_implementations()
    names = args.implementation or runnable
    for name in set(names) - set(runnable):
        print(f"{name}: cannot run steps on this device; {', '.join(runnable)} can.")
        return 2
    records = []
    print(report.STEP_HEADER)
    for spec_name in args.spec or STEP_SPECS:
        spec = SPECS[spec_name]
        for dtype in args.dtype or ["float32"]:
            if missing := missing_memory(spec, dtype):
                print(f"{spec.name:28} {dtype:14} left out: needs {missing / 2**30:.0f} GiB")
                continue
            for record in time_steps(
                spec, dtype, names, 2.0 if args.seconds is None else args.seconds
            ):
                records.append(record)
                print(report.step_line(record), flush=True)
    if args.json is not None:
        report.write_json(args.json, {**environment, "records": records})
    return 0


def _run(args: argparse.Namespace, environment: dict[str, str | int]) -> int:
    clock = Clock(args.budget)
    path = args.json or _JSON
    outcomes = _sweep(args)
    document = {**environment, "sweep": [report.outcome_dict(outcome) for outcome in outcomes]}
    wrong = any(outcome.status == FAILED for outcome in outcomes)
    if not args.quick:
        failed = {outcome.variant for outcome in outcomes if outcome.status == FAILED}
        records, copy_rate = _table(args, clock, failed)
        verdicts = judge(records)
        print(report.verdict_lines(verdicts))
        wrong |= any(r.status == FAILED and r.contender not in _BASELINE_MODULES for r in records)
        document |= {
            "copy_bytes_per_s": copy_rate,
            "records": [report.record_dict(record) for record in records],
            "verdicts": [verdict._asdict() for verdict in verdicts],
        }
    report.write_json(path, document)
    print(f"\nrecords in {path}" + ("; something was wrong: exit status 1" if wrong else ""))
    return int(wrong)


def _sweep(args: argparse.Namespace) -> list[Outcome]:
    names = [n for n in available_implementations() if n in (args.implementation or (n,))]
    dtypes = args.dtype or KV_DTYPES
    cases = [case for case in sweep_cases() if case.dtype in dtypes]
    print(f"\nCorrectness: {len(cases)} cases against a float64 oracle on {', '.join(names)}")
    outcomes = []
    for outcome in run_sweep(cases, names):
        outcomes.append(outcome)
        if line := report.outcome_line(outcome):
            print(line, flush=True)
    print(report.sweep_summary(outcomes))
    return outcomes


def _table(
    args: argparse.Namespace, clock: Clock, failed: set[tuple[str, str, str]]
) -> tuple[list[Record], float]:
    copy_rate = copy_bandwidth()
    settings = Settings(
        copy_rate=copy_rate,
        failed=failed,
        **({} if args.seconds is None else {"seconds": args.seconds}),
    )
    print(report.table_header(copy_rate))
    records = []
    for name, dtype in _shapes(args, GPU_SPECS):
        contenders = args.implementation or default_contenders(dtype)
        for record in time_shape(SPECS[name], dtype, contenders, settings, clock):
            records.append(record)
            print(report.record_line(record), flush=True)
    if args.spec is None:
        writers = [n for n in _WRITERS if n in (args.implementation or (n,))]
        for num_tokens, dtype in itertools.product(_WRITE_TOKENS, args.dtype or _WRITE_DTYPES):
            for record in time_writes(num_tokens, dtype, writers, settings, clock):
                records.append(record)
                print(report.record_line(record), flush=True)
    return records, copy_rate
