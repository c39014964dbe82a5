"""Time whole steps of a model's attention, every layer writing and then attending.

A step is a scan over the layers, each writing the new tokens' K and V and then attending, with the
pool donated and carried. Works on any device; the first output of each implementation is compared
with that of the first one.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.workload import (
    Workload,
    build_workload,
    fill_bytes,
    memory_bytes,
    pool_bytes,
    token_bytes,
)
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_decode, paged_prefill
from pallas_kernels.paged_attention.specs import AttentionSpec
from pallas_kernels.pages import KVPages


def missing_memory(spec: AttentionSpec, dtype: str) -> int:
    """Bytes that a spec's step needs where the device has less, else 0."""
    needed = pool_bytes(spec, dtype, spec.layers) + fill_bytes(spec)
    return needed if needed > memory_bytes() else 0


def time_steps(
    spec: AttentionSpec, dtype: str, implementations: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Time one shape with each implementation.

    Args:
        spec: the shape, all its layers.
        dtype: storage dtype of the pool.
        implementations: names; the first is what the others are compared with.
        seconds: time for each measurement, though never fewer than three steps.

    Returns:
        A record each: median and fastest step, live bytes, difference from the first's output.
    """
    load = build_workload(spec, dtype, layers=spec.layers, q_dtype="float32")
    inputs = _step_inputs(load)
    pages = load.pages
    live_bytes = spec.layers * spec.live_tokens() * token_bytes(spec, dtype)
    records, expected = [], None
    for name in implementations:
        started = time.perf_counter()
        step = _build_step(spec, name).lower(pages, inputs).compile()
        compile_s = time.perf_counter() - started
        out, pages = jax.block_until_ready(step(pages, inputs))
        expected = out if expected is None else expected
        times: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < deadline:
            started = time.perf_counter()
            _, pages = jax.block_until_ready(step(pages, inputs))
            times.append(time.perf_counter() - started)
        median = statistics.median(times)
        records.append(
            {
                "spec": spec.name,
                "dtype": dtype,
                "implementation": name,
                "step_s": median,
                "fastest_s": min(times),
                "repeats": len(times),
                "compile_s": compile_s,
                "live_bytes": live_bytes,
                "bytes_per_s": live_bytes / median,
                "max_abs_difference": float(jnp.max(jnp.abs(out - expected))),
                "speedup": records[0]["step_s"] / median if records else 1.0,
            }
        )
    return records


def _step_inputs(load: Workload) -> dict[str, jax.Array]:
    """The workload's small arguments, and the new tokens' K, V and slots."""
    spec = load.spec
    chunk = spec.chunk or 1
    tables, lens, counts = (np.asarray(x) for x in (load.tables, load.lens, load.query_lens))
    token = np.arange(chunk)[None]
    position = (lens - counts)[:, None] + token
    column = np.minimum(position // spec.block_size, tables.shape[1] - 1)
    block = np.take_along_axis(tables, column, axis=1)
    slots = block * spec.block_size + position % spec.block_size
    slots = np.where(token < counts[:, None], slots, -1)
    shape = (2, spec.rows * chunk, spec.kv_heads, spec.dim)
    k, v = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    return {
        "q": load.q,
        "k": jnp.asarray(k),
        "v": jnp.asarray(v),
        "tables": load.tables,
        "lens": load.lens,
        "query_lens": load.query_lens,
        "slots": jnp.asarray(slots.reshape(-1), jnp.int32),
    }


def _build_step(spec: AttentionSpec, implementation: str) -> Any:
    """The jitted step: `(pages, inputs) -> (output, pages)`, pages donated."""
    options: dict[str, Any] = {
        "window": spec.window,
        "num_sink_tokens": spec.num_sink_tokens,
        "soft_cap": spec.soft_cap,
        "implementation": implementation,
    }

    def step(pages: KVPages, inputs: dict[str, jax.Array]) -> tuple[jax.Array, KVPages]:
        q, where = inputs["q"], (inputs["tables"], inputs["lens"])
        attend: Callable[..., jax.Array] = paged_decode
        if spec.chunk is not None:
            attend, where = paged_prefill, (*where, inputs["query_lens"])

        def one(
            carry: tuple[jax.Array, KVPages], layer: jax.Array
        ) -> tuple[tuple[jax.Array, KVPages], None]:
            x, pages = carry
            pages = write_kv(
                inputs["k"],
                inputs["v"],
                pages,
                inputs["slots"],
                layer=layer,
                implementation=implementation,
            )
            out = attend(x, pages, *where, layer=layer, **options)
            return (q + 0.5 * out, pages), None  # the next layer depends on this one

        layers = jnp.arange(spec.layers, dtype=jnp.int32)
        (out, pages), _ = jax.lax.scan(one, (q, pages), layers)
        return out, pages

    return jax.jit(step, donate_argnums=0)
