"""Time every implementation on named shapes: `python -m pallas_kernels.bench --help`.

A step is what a model does: a scan over its layers, each writing the new tokens' K and V and then
attending, with the pool donated and carried. Timings are of whole steps on the present device,
after a warm-up; the first output of each implementation is compared with the reference's.
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    KV_DTYPES,
    KVPages,
    available_implementations,
    init_pages,
    paged_decode,
    paged_prefill,
    write_kv,
)
from pallas_kernels.paged_attention.specs import SPECS, AttentionSpec


def build_inputs(spec: AttentionSpec, dtype: str, seed: int = 0) -> dict[str, Any]:
    """A pool full of random tokens, shuffled tables and one step's queries, K and V."""
    rng = np.random.default_rng(seed)
    lens = spec.context_lens(seed)
    need = -(-lens // spec.block_size)
    width = -(-max(spec.table_tokens or 0, int(lens.max())) // spec.block_size)
    ids, used = rng.permutation(int(need.sum())), 0
    tables = np.zeros((spec.rows, width), np.int32)
    for row, count in enumerate(need):
        tables[row, :count] = ids[used : used + count]
        used += count
    pages = init_pages(used, spec.layers, spec.kv_heads, spec.block_size, spec.dim, dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(pages: KVPages, key: jax.Array) -> KVPages:
        slots = jnp.arange(used * spec.block_size, dtype=jnp.int32)

        def one(pages: KVPages, layer: jax.Array) -> tuple[KVPages, None]:
            shape = (2, slots.size, spec.kv_heads, spec.dim)
            k, v = jax.random.normal(jax.random.fold_in(key, layer), shape)
            return write_kv(k, v, pages, slots, layer=layer), None

        return jax.lax.scan(one, pages, jnp.arange(spec.layers, dtype=jnp.int32))[0]

    chunk = spec.chunk or 1
    counts = np.minimum(lens, chunk)
    token = np.arange(chunk)[None]
    position = (lens - counts)[:, None] + token
    block = np.take_along_axis(tables, np.minimum(position // spec.block_size, width - 1), axis=1)
    slots = np.where(
        token < counts[:, None], block * spec.block_size + position % spec.block_size, -1
    )
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    kv_shape = (spec.rows * chunk, spec.kv_heads, spec.dim)
    return {
        "pages": fill(pages, jax.random.key(seed)),
        "q": jnp.asarray(draw((spec.rows, chunk, spec.heads, spec.dim))),
        "k": jnp.asarray(draw(kv_shape)),
        "v": jnp.asarray(draw(kv_shape)),
        "tables": jnp.asarray(tables),
        "lens": jnp.asarray(lens),
        "query_lens": jnp.asarray(counts),
        "slots": jnp.asarray(slots.reshape(-1), jnp.int32),
    }


def build_step(spec: AttentionSpec, implementation: str) -> Any:
    """The jitted step: `(pages, the other inputs) -> (output, pages)`, pages donated."""
    options: dict[str, Any] = {"window": spec.window, "implementation": implementation}

    def step(pages: KVPages, inputs: dict[str, jax.Array]) -> tuple[jax.Array, KVPages]:
        q, tables, lens = inputs["q"], inputs["tables"], inputs["lens"]

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
            if spec.chunk is None:
                out = paged_decode(x[:, 0], pages, tables, lens, layer=layer, **options)[:, None]
            else:
                out = paged_prefill(
                    x, pages, tables, lens, inputs["query_lens"], layer=layer, **options
                )
            return (q + 0.5 * out, pages), None  # the next layer depends on this one

        layers = jnp.arange(spec.layers, dtype=jnp.int32)
        (out, pages), _ = jax.lax.scan(one, (q, pages), layers)
        return out, pages

    return jax.jit(step, donate_argnums=0)


def time_spec(spec: AttentionSpec, dtype: str, seconds: float) -> list[dict[str, Any]]:
    """Time one shape with every implementation: one record each, the reference's first."""
    inputs = build_inputs(spec, dtype)
    pages = inputs.pop("pages")
    itemsize = KV_DTYPES[dtype].dtype.itemsize
    per_token = 2 * spec.kv_heads * (spec.dim * itemsize + 4 * KV_DTYPES[dtype].quantised)
    live_bytes = spec.layers * spec.live_tokens() * per_token
    records, expected = [], None
    for name in available_implementations():
        started = time.perf_counter()
        step = build_step(spec, name).lower(pages, inputs).compile()
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


def memory_bytes() -> int:
    """Memory of the present device, or of the host where JAX does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main(argv: list[str] | None = None) -> None:
    """Parse arguments, run, print a table."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("--spec", nargs="+", choices=SPECS, metavar="SPEC", help=", ".join(SPECS))
    parser.add_argument("--dtype", nargs="+", choices=KV_DTYPES, default=["float32"])
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--json", type=pathlib.Path, help="write the records here too")
    args = parser.parse_args(argv)

    device = jax.devices()[0]
    print(
        f"device {device.device_kind}, {os.cpu_count()} CPU cores, {platform.machine()}, ", end=""
    )
    print(f"jax {jax.__version__}")
    print(
        f"{'spec':28} {'dtype':14} {'implementation':14} {'median ms':>10} {'fastest':>8} "
        f"{'GB/s':>6} {'× ref.':>7} {'compile s':>9} {'difference':>10}"
    )
    records = []
    for name in args.spec or SPECS:
        spec = SPECS[name]
        if memory_bytes() < spec.min_memory_bytes:
            print(f"{name:28} left out: needs {spec.min_memory_bytes / 2**30:.0f} GiB")
            continue
        for dtype in args.dtype:
            for r in time_spec(spec, dtype, args.seconds):
                records.append(r)
                print(
                    f"{name:28} {dtype:14} {r['implementation']:14} {r['step_s'] * 1e3:10.2f} "
                    f"{r['fastest_s'] * 1e3:8.2f} {r['bytes_per_s'] / 1e9:6.2f} "
                    f"{r['speedup']:7.2f} {r['compile_s']:9.2f} {r['max_abs_difference']:10.1e}",
                    flush=True,
                )
    if args.json is not None:
        environment = {
            "device": device.device_kind,
            "cpu_cores": os.cpu_count(),
            "jax": jax.__version__,
        }
        args.json.write_text(json.dumps({**environment, "records": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
