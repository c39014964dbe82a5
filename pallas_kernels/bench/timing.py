"""Device time of one attention call, and the bandwidth it is compared with.

A program makes many calls one after the other and the clock runs over the whole program, so that
its one dispatch is spread thin; nothing is subtracted. An optimisation barrier ties each call's
queries, tables and lengths to the output of the call before: calls stay in order, and what a call
derives from the lengths (a work plan) is computed anew each time, which a model's scan over layers
may do once. Calls take the pool's layers in turn, and there are enough of them that no page is
still in the L2 cache when it is read again.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

COLD_BYTES = 256 * 2**20
"""Read between two uses of a page; a few times the L2 cache (H200: 50 MiB)."""

_PROGRAM_SECONDS = 8e-3  # of calls in a program: its dispatch, about 0.1 ms, is about 1 %
_MAX_CALLS = 512
_MIN_RUNS, _MAX_RUNS = 5, 25

Arguments = dict[str, jax.Array]  # q, block_tables, context_lens and, for a prefill, query_lens


class Timing(NamedTuple):
    """Seconds of one call: the median and the fastest program, over how many of them."""

    median_s: float
    fastest_s: float
    runs: int


def cold_layers(call_bytes: int) -> int:
    """Layers a pool needs so that every call finds its pages outside the L2 cache.

    At most 64: a call of a few megabytes is bound by its launches, not by its bytes.
    """
    return min(64, 1 + -(-COLD_BYTES // call_bytes))


def num_calls(expected_s: float, layers: int, limit: int | None) -> int:
    """Calls of a program: a few milliseconds, whole turns of the layers, at most `limit`."""
    turns = max(1, min(_MAX_CALLS, round(_PROGRAM_SECONDS / expected_s)) // layers)
    return min(limit or _MAX_CALLS, turns * layers)


def build_program(
    call: Callable[[Any, Arguments, Any], jax.Array],
    *,
    layers: int,
    calls: int,
    static_layer: bool = False,
) -> Callable[[Any, Arguments], jax.Array]:
    """A function that makes `calls` calls and returns the last one's output.

    Args:
        call: `(operands, arguments, layer) -> output`, of q's shape and dtype.
        layers: the layer of call i is `i % layers`.
        calls: how many; whole turns of the layers where `static_layer`.
        static_layer: `layer` must be a Python int: a turn of the layers is unrolled.
    """

    def chained(arguments: Arguments, out: jax.Array) -> Arguments:
        return jax.lax.optimization_barrier((arguments, out))[0]

    def program(operands: Any, arguments: Arguments) -> jax.Array:
        def one(i: jax.Array, out: jax.Array) -> jax.Array:
            return call(operands, chained(arguments, out), jax.lax.rem(i, jnp.int32(layers)))

        def turn(_: jax.Array, out: jax.Array) -> jax.Array:
            for layer in range(layers):
                out = call(operands, chained(arguments, out), layer)
            return out

        start = jnp.zeros_like(arguments["q"])
        if static_layer:
            return jax.lax.fori_loop(0, calls // layers, turn, start)
        return jax.lax.fori_loop(0, calls, one, start)

    return program


def measure(run: Callable[[], Any], calls: int, seconds: float) -> Timing:
    """Time a compiled program that has run before.

    Args:
        run: dispatches it.
        calls: calls it makes.
        seconds: time to spend, though never on fewer than 3 runs.
    """
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _MAX_RUNS:
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
        spent = time.perf_counter() - began
        if len(times) >= 3 and spent > seconds * (1 if len(times) >= _MIN_RUNS else 4):
            break
    return Timing(statistics.median(times) / calls, min(times) / calls, len(times))


def copy_bandwidth(num_bytes: int = 2**30, repeats: int = 20) -> float:
    """Bytes per second of a copy on the device, read and written bytes together.

    Args:
        num_bytes: size of the array.
        repeats: copies in flight together; the best of five such rounds counts.
    """
    source = jnp.zeros(num_bytes // 4, jnp.int32)
    copy = jax.jit(lambda x: x + 1)  # a plain copy might be aliased away
    jax.block_until_ready(copy(source))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repeats):
            out = copy(source)  # the one before is freed when this one is queued
        jax.block_until_ready(out)
        best = min(best, time.perf_counter() - started)
    return 2 * num_bytes * repeats / best
