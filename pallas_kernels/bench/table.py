"""The table of a GPU run: every shape and dtype on every contender."""

import dataclasses
import functools
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from pallas_kernels.bench.contenders import (
    Contender,
    UnavailableError,
    arguments_of,
    make_contender,
)
from pallas_kernels.bench.sweep import FAILED, OK, UNSUPPORTED, compiler_threads, first_line
from pallas_kernels.bench.timing import Timing, build_program, cold_layers, measure, num_calls
from pallas_kernels.bench.workload import (
    Checker,
    Workload,
    build_workload,
    fill_bytes,
    memory_bytes,
    pool_bytes,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.paged_attention.roofline import Estimate, estimate
from pallas_kernels.paged_attention.specs import AttentionSpec

LEFT_OUT = "left out"
_TIME_OF_A_SHAPE = 12.0  # seconds: with less left of the budget, none is begun


class Clock:
    """What is left of a time budget, in seconds."""

    def __init__(self, budget_s: float) -> None:
        self._deadline = time.monotonic() + budget_s

    def left(self) -> float:
        """Seconds until the budget is spent."""
        return self._deadline - time.monotonic()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One line of the table.

    Attributes:
        spec: name of the shape; op, dtype: its op and KV dtype.
        contender: who was timed.
        status: OK, UNSUPPORTED, FAILED or LEFT_OUT; only OK has a time.
        reason: of any other status.
        call_s: seconds of a call, median over programs; fastest_s: of the fastest program.
        runs, calls, layers: programs timed, calls in each, layers they take in turn.
        bytes: what the call must move: K and V of the live tokens, scales, q, output.
        flops: what the attention needs.
        bytes_per_s, copy_share: the rate that is, and its share of this run's copy rate.
        paper_s: what the roofline implies for an H200.
        error, of_bound: largest error against the oracle at some rows, and its share of the bound.
    """

    spec: str
    op: str
    dtype: str
    contender: str
    status: str
    reason: str = ""
    call_s: float | None = None
    fastest_s: float | None = None
    runs: int = 0
    calls: int = 0
    layers: int = 0
    bytes: int = 0
    flops: int = 0
    bytes_per_s: float | None = None
    copy_share: float | None = None
    paper_s: float | None = None
    error: float | None = None
    of_bound: float | None = None

    def timed(self, timing: Timing, copy_rate: float) -> "Record":
        """The same line with its time, and the rate that is beside this run's copy rate."""
        rate = self.bytes / timing.median_s
        return dataclasses.replace(
            self,
            status=OK,
            call_s=timing.median_s,
            fastest_s=timing.fastest_s,
            runs=timing.runs,
            bytes_per_s=rate,
            copy_share=rate / copy_rate,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a table is made with.

    Attributes:
        copy_rate: bytes per second of this run's copy.
        seconds: time to spend on a measurement.
        failed: (implementation, op, dtype) that failed the sweep: never timed.
        layers: layers of every pool; None takes what keeps the L2 cache cold.
    """

    copy_rate: float
    seconds: float = 0.25
    failed: Collection[tuple[str, str, str]] = ()
    layers: int | None = None


def time_shape(
    spec: AttentionSpec, dtype: str, names: Sequence[str], settings: Settings, clock: Clock
) -> Iterator[Record]:
    """Time a shape and dtype on some contenders; one record each, in their order."""
    paper = estimate(spec, dtype)
    layers = settings.layers or cold_layers(paper.bytes)
    blank = Record(
        spec=spec.name,
        op=spec.op,
        dtype=dtype,
        contender="",
        status=LEFT_OUT,
        layers=layers,
        bytes=paper.bytes,
        flops=paper.flops,
        paper_s=paper.seconds,
    )
    # The pool in up to three layouts, and what filling it takes.
    needed = 3 * pool_bytes(spec, dtype, layers) + fill_bytes(spec)
    why_not = ""
    if clock.left() < _TIME_OF_A_SHAPE:
        why_not = "the time budget is spent"
    elif needed > memory_bytes():
        why_not = f"needs {needed / 2**30:.0f} GiB"
    if why_not:
        for name in names:
            yield dataclasses.replace(blank, contender=name, reason=why_not)
        return

    q_dtype = dtype if dtype in ("float16", "float32") else "bfloat16"
    load = build_workload(spec, dtype, layers=layers, q_dtype=q_dtype)
    checker = Checker(load)
    refused: dict[str, Record] = {}
    jobs: dict[str, tuple[Contender, int, Future]] = {}
    with compiler_threads() as threads:
        for name in names:
            line = dataclasses.replace(blank, contender=name)
            if (name, spec.op, dtype) in settings.failed:
                reason = f"{spec.op} of {dtype} failed the correctness sweep"
                refused[name] = dataclasses.replace(line, status=FAILED, reason=reason)
                continue
            try:
                contender, calls, lowered = _prepare(name, load, paper)
            except (UnavailableError, UnsupportedError) as error:
                reason = str(error).splitlines()[0]
                refused[name] = dataclasses.replace(line, status=UNSUPPORTED, reason=reason)
            except Exception as error:  # one that fails must not end the run
                refused[name] = dataclasses.replace(line, status=FAILED, reason=first_line(error))
            else:
                jobs[name] = contender, calls, threads.submit(lowered.compile)
    # All is compiled: tuning must not run beside what is timed.
    for name in names:
        if name in refused:
            yield refused[name]
            continue
        contender, calls, compiled = jobs[name]
        line = dataclasses.replace(blank, contender=name, calls=calls)
        yield _time(line, load, contender, compiled, checker, settings)


def _prepare(name: str, load: Workload, paper: Estimate) -> tuple[Contender, int, Any]:
    contender = make_contender(name, load)
    layers = load.pages.num_layers
    calls = num_calls(paper.seconds, layers, contender.max_calls)
    program = build_program(
        contender.call, layers=layers, calls=calls, static_layer=contender.static_layer
    )
    return contender, calls, jax.jit(program).lower(contender.operands, arguments_of(load))


def _time(
    line: Record,
    load: Workload,
    contender: Contender,
    compiled: Future,
    checker: Checker,
    settings: Settings,
) -> Record:
    try:
        run = functools.partial(compiled.result(), contender.operands, arguments_of(load))
        out = jax.block_until_ready(run())
        ratio = checker.check(out, (line.calls - 1) % line.layers)
        if not ratio.of_bound <= 1.0:
            reason = f"wrong: error {ratio.error:.3g} is {ratio.of_bound:.3g} of its bound"
            return dataclasses.replace(
                line, status=FAILED, reason=reason, error=ratio.error, of_bound=ratio.of_bound
            )
        timing = measure(run, line.calls, settings.seconds)
    except Exception as error:
        return dataclasses.replace(line, status=FAILED, reason=first_line(error))
    line = line.timed(timing, settings.copy_rate)
    return dataclasses.replace(line, error=ratio.error, of_bound=ratio.of_bound)
