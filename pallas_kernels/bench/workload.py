"""A spec made real: a pool full of random tokens, shuffled tables, queries."""

import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import oracle
from pallas_kernels.bench.cases import shuffled_tables
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention.specs import AttentionSpec
from pallas_kernels.pages import KV_DTYPES, KVPages, init_pages


class Workload(NamedTuple):
    """The arguments of a spec's attention call.

    Attributes:
        spec: the shape.
        dtype: of the pool.
        pages: the pool, of as many layers as asked for.
        q: `[row, head, dim]`, or `[row, chunk, head, dim]` for a prefill.
        tables: int32 `[row, max_blocks]`.
        lens: int32 `[row]`, context lengths.
        query_lens: int32 `[row]`.
    """

    spec: AttentionSpec
    dtype: str
    pages: KVPages
    q: jax.Array
    tables: jax.Array
    lens: jax.Array
    query_lens: jax.Array


def token_bytes(spec: AttentionSpec, dtype: str) -> int:
    """Bytes of one token's K, V and scales in one layer."""
    return spec.kv_heads * KV_DTYPES[dtype].token_bytes(spec.dim)


def pool_bytes(spec: AttentionSpec, dtype: str, layers: int) -> int:
    """Bytes of the pool of a workload."""
    tokens = -(-spec.context_lens() // spec.block_size) * spec.block_size
    return int(tokens.sum(dtype=np.int64)) * layers * token_bytes(spec, dtype)


def fill_bytes(spec: AttentionSpec) -> int:
    """Bytes that filling a pool takes beside it: a layer's tokens in float32, a few times over."""
    return 3 * pool_bytes(spec, "float32", 1)


def memory_bytes() -> int:
    """Memory of the present device, or of the host where JAX does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def build_workload(
    spec: AttentionSpec, dtype: str, *, layers: int, q_dtype: str, seed: int = 0
) -> Workload:
    """Allocate and fill a pool on the device, and draw the queries."""
    rng = np.random.default_rng(seed)
    lens = spec.context_lens(seed)
    width = -(-(spec.table_tokens or 0) // spec.block_size)
    tables, num_blocks = shuffled_tables(lens, spec.block_size, rng, width=width)
    shape = (spec.rows, *(() if spec.chunk is None else (spec.chunk,)), spec.heads, spec.dim)
    pages = init_pages(num_blocks, layers, spec.kv_heads, spec.block_size, spec.dim, dtype)
    return Workload(
        spec=spec,
        dtype=dtype,
        # The default generator takes seconds to compile, and longer to run over a large pool.
        pages=_fill(pages, jax.random.key(seed, impl="unsafe_rbg")),
        q=jnp.asarray(rng.standard_normal(shape, dtype=np.float32), q_dtype),
        tables=jnp.asarray(tables),
        lens=jnp.asarray(lens),
        query_lens=jnp.asarray(spec.query_lens(seed)),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _fill(pages: KVPages, key: jax.Array) -> KVPages:
    slots = jnp.arange(pages.num_blocks * pages.block_size, dtype=jnp.int32)
    shape = (2, slots.size, pages.num_kv_heads, pages.head_dim)

    def one(pages: KVPages, layer: jax.Array) -> tuple[KVPages, None]:
        k, v = jax.random.normal(jax.random.fold_in(key, layer), shape)
        return write_kv(k, v, pages, slots, layer=layer, implementation="xla"), None

    return jax.lax.scan(one, pages, jnp.arange(pages.num_layers, dtype=jnp.int32))[0]


class Checker:
    """Compares outputs of a workload with the oracle, at a few rows and queries of a layer."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._expected: dict[int, list[tuple[int, np.ndarray, np.ndarray, float]]] = {}

    def check(self, out: jax.Array, layer: int) -> oracle.Ratio:
        """The worst error over its bound of an output computed with a layer's pages."""
        if layer not in self._expected:
            self._expected[layer] = [self._expect(row, layer) for row in self._rows()]
        if self._workload.spec.chunk is None:
            out = out[:, None]
        worst = oracle.Ratio(0.0, 0.0)
        for row, queries, want, bound in self._expected[layer]:
            got = np.asarray(out[row, jnp.asarray(queries)])
            worst = max(worst, oracle.compare(got, want, np.full(len(want), bound)))
        return worst

    def _rows(self) -> list[int]:
        lens = np.asarray(self._workload.lens)
        return sorted({0, int(lens.argmin()), int(lens.argmax())})

    def _expect(self, row: int, layer: int) -> tuple[int, np.ndarray, np.ndarray, float]:
        load, spec = self._workload, self._workload.spec
        length, count = int(load.lens[row]), int(load.query_lens[row])
        blocks = load.tables[row, : -(-length // spec.block_size)]

        def read(name: str) -> np.ndarray:
            stored = np.asarray(getattr(load.pages, name)[blocks, layer])
            scale = getattr(load.pages, f"{name}_scale")
            scale = None if scale is None else np.asarray(scale[blocks, layer])
            values = oracle.dequantise(stored, scale, load.dtype)  # [block, kv_head, offset, dim]
            return values.swapaxes(1, 2).reshape(-1, spec.kv_heads, spec.dim)[:length]

        queries = np.unique([0, count // 3, count - 1])
        q = load.q[row] if spec.chunk is not None else load.q[row][None]
        keys, values = read("k"), read("v")
        want = oracle.attend(
            np.asarray(q[jnp.asarray(queries)]),
            keys,
            values,
            length - count + queries,
            scale=spec.dim**-0.5,
            window=spec.window,
            num_sink_tokens=spec.num_sink_tokens,
            soft_cap=spec.soft_cap,
        )
        return row, queries, want, oracle.attention_bound(load.q.dtype.name, values)
