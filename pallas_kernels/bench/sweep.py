"""The correctness sweep: every case on every implementation against the oracle."""

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import oracle
from pallas_kernels.bench.cases import LAYER, Case, Inputs, build_attention, build_write
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_decode, paged_prefill
from pallas_kernels.pages import KV_DTYPES, KVPages

OK, FAILED, UNSUPPORTED = "ok", "FAILED", "unsupported"
_PENDING = 24  # programs that are being compiled, and whose pools are held, at once
# Compile for meaning, not for speed: tuning matrix products, or optimising, takes longer than all
# the cases.
_QUICK_COMPILE = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {"xla_gpu_autotune_level": 0},
}


class Outcome(NamedTuple):
    """What became of a case on an implementation.

    Attributes:
        case: the case.
        implementation: its name.
        status: OK, FAILED or UNSUPPORTED.
        ratio: largest per-row error over its bound; None where nothing came out.
        reason: of a failure or refusal; empty when OK.
    """

    case: Case
    implementation: str
    status: str
    ratio: oracle.Ratio | None = None
    reason: str = ""

    @property
    def variant(self) -> tuple[str, str, str]:
        """Implementation, op and KV dtype: what one failure disqualifies."""
        return self.implementation, self.case.op, self.case.dtype


def run_sweep(cases: Sequence[Case], implementations: Sequence[str]) -> Iterator[Outcome]:
    """Run cases; outcomes come as they are known.

    Float32 products of the XLA forms run at the highest precision, not the device's default
    (TF32 on a GPU): the sweep is about meaning.
    """
    options = _QUICK_COMPILE.get(jax.devices()[0].platform)
    pending: deque[tuple[Case, str, Inputs, Future]] = deque()
    with compiler_threads() as threads:
        for case in cases:
            inputs = (build_write if case.op == "write" else build_attention)(case)
            for name in implementations:
                try:
                    lowered = _lower(case, name, inputs)
                except UnsupportedError as error:
                    yield Outcome(case, name, UNSUPPORTED, reason=first_line(error))
                except Exception as error:  # a variant that fails must not end the sweep
                    yield Outcome(case, name, FAILED, reason=first_line(error))
                else:
                    compiled = threads.submit(lowered.compile, compiler_options=options)
                    pending.append((case, name, inputs, compiled))
            while len(pending) > _PENDING:
                yield _run(*pending.popleft())
        while pending:
            yield _run(*pending.popleft())


def compiler_threads() -> ThreadPoolExecutor:
    """Threads that compile while the next program is lowered: only lowering is Python."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


def first_line(error: Exception) -> str:
    """An exception in one line of at most 160 characters."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:160] if text else type(error).__name__


def build_call(case: Case, implementation: str) -> Callable[..., Any]:
    """The op as a function of the pool, the layer and its other arguments by name."""
    if case.op == "write":
        return functools.partial(_write, implementation)
    options: dict[str, Any] = {
        "scale": case.dim**-0.5,
        "window": case.window,
        "num_sink_tokens": case.num_sink_tokens,
        "soft_cap": case.soft_cap,
        "implementation": implementation,
    }
    op = paged_prefill
    if case.op == "decode":
        op = paged_decode
        options["deterministic"] = case.deterministic

    def attend(pages: KVPages, layer: jax.Array, arguments: dict[str, jax.Array]) -> jax.Array:
        return op(pages=pages, layer=layer, **arguments, **options)

    return attend


def _write(
    implementation: str, pages: KVPages, layer: jax.Array, arguments: dict[str, jax.Array]
) -> KVPages:
    return write_kv(pages=pages, layer=layer, **arguments, implementation=implementation)


def _lower(case: Case, implementation: str, inputs: Inputs) -> Any:
    # Only the dots of the XLA forms look at the precision; a kernel's own must not be changed.
    exact = contextlib.nullcontext()
    if implementation in ("reference", "xla"):
        exact = jax.default_matmul_precision("highest")
    with exact:
        return jax.jit(build_call(case, implementation)).lower(
            inputs.pages, jnp.int32(LAYER), inputs.arguments
        )


def _run(case: Case, name: str, inputs: Inputs, compiled: Future) -> Outcome:
    try:
        run = compiled.result()
        out = jax.device_get(run(inputs.pages, jnp.int32(LAYER), inputs.arguments))
    except Exception as error:
        return Outcome(case, name, FAILED, reason=first_line(error))
    if case.op == "write":
        ratio, where = check_write(case, inputs, out)
    else:
        ratio, where = check_attention(case, inputs, out)
    if ratio.of_bound <= 1.0:
        return Outcome(case, name, OK, ratio)
    reason = f"error {ratio.error:.3g} is {ratio.of_bound:.3g} of its bound, {where}"
    return Outcome(case, name, FAILED, ratio, reason)


def check_attention(case: Case, inputs: Inputs, out: np.ndarray) -> tuple[oracle.Ratio, str]:
    """Compare an attention output with the oracle, row by row.

    Returns:
        The worst row's error and where it is.
    """
    q, lens = inputs.arguments["q"], inputs.arguments["context_lens"]
    prefill = case.op == "prefill"
    counts = inputs.arguments["query_lens"] if prefill else np.minimum(lens, 1)
    worst, where = oracle.Ratio(0.0, 0.0), ""
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        queries, got = (q[row], out[row]) if prefill else (q[row][None], out[row][None])
        want = np.zeros(queries.shape)
        if count:
            want[:count] = oracle.attend(
                queries[:count],
                inputs.keys[row],
                inputs.values[row],
                np.arange(length - count, length),
                scale=case.dim**-0.5,
                window=case.window,
                num_sink_tokens=case.num_sink_tokens,
                soft_cap=case.soft_cap,
            )
        bounds = np.zeros(len(want))  # padding is exactly zero
        bounds[:count] = oracle.attention_bound(case.q_dtype, inputs.values[row])
        ratio = oracle.compare(got, want, bounds)
        if ratio.of_bound > worst.of_bound:
            worst, where = ratio, f"row {row} of {length} tokens"
    return worst, where


def check_write(case: Case, inputs: Inputs, out: KVPages) -> tuple[oracle.Ratio, str]:
    """Compare a written pool: slots within a rounding of K and V, all else untouched."""
    slots = inputs.arguments["slot_mapping"]
    size = case.block_size
    shape = inputs.pages.k.shape
    written = (slots >= 0) & (slots < shape[0] * size)
    at = (slots[written] // size, LAYER, slice(None), slots[written] % size)
    untouched = np.ones((shape[0], shape[1], size), bool)
    untouched[slots[written] // size, LAYER, slots[written] % size] = False
    worst, where = oracle.Ratio(0.0, 0.0), ""

    def note(ratio: oracle.Ratio, what: str) -> None:
        nonlocal worst, where
        if ratio.of_bound > worst.of_bound:
            worst, where = ratio, what

    for name in ("k", "v"):
        x = inputs.arguments[name][written]
        bounds, scale = oracle.write_bounds(x, case.dtype)
        scales = None
        leaves = [name]
        if KV_DTYPES[case.dtype].quantised:
            leaves.append(f"{name}_scale")
            scales = np.asarray(getattr(out, f"{name}_scale"))[at]
            note(oracle.compare(scales, scale, 1e-6 * scale), f"{name}_scale")
        stored = np.asarray(getattr(out, name))[at]
        got = oracle.dequantise(stored, scales, case.dtype)
        note(oracle.compare(got, x.astype(np.float64), bounds), f"{name} of a written slot")
        for leaf in leaves:
            old, new = (np.asarray(getattr(p, leaf)) for p in (inputs.pages, out))
            same = np.moveaxis(old, 2, 3)[untouched] == np.moveaxis(new, 2, 3)[untouched]
            if not same.all():
                note(oracle.Ratio(np.inf, np.inf), f"{leaf} of slots that were not to be written")
    return worst, where
