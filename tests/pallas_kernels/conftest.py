"""An independent float64 oracle for paged attention, and pools laid out by it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KV_DTYPES, KVPages

# Largest per-row error of an output of order 1 against the oracle on the stored (dequantised)
# values: what is left is the arithmetic, float32 throughout, and the cast of the output to q's
# dtype. Storage error has bounds of its own, in the tests of write_kv.
TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3}


def oracle_row(q, keys, values, *, positions, scale, window, sinks, soft_cap):
    """Attention of one row in float64, a query and a head at a time.

    q [query, head, dim] at `positions`; keys, values [token, kv_head, dim] from position 0.
    """
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    heads, kv_heads = q.shape[1], keys.shape[1]
    out = np.zeros(q.shape)
    for i, position in enumerate(positions):
        for h in range(heads):
            kv = h * kv_heads // heads
            logits, tokens = [], []
            for token in range(position + 1):
                if window is not None and position - token >= window and token >= sinks:
                    continue
                logit = scale * math.fsum(q[i, h] * keys[token, kv])
                if soft_cap is not None:
                    logit = soft_cap * math.tanh(logit / soft_cap)
                logits.append(logit)
                tokens.append(token)
            shifted = [math.exp(x - max(logits)) for x in logits]
            total = math.fsum(shifted)
            for weight, token in zip(shifted, tokens, strict=True):
                out[i, h] += weight / total * values[token, kv]
    return out


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool with the tokens of some rows written into it, and what was written."""

    pages: KVPages
    tables: jax.Array
    lens: jax.Array
    keys: list[np.ndarray]  # stored values of each row, float32 [token, kv_head, dim]
    values: list[np.ndarray]
    layer: int


def pack(codes, dtype):
    """Codes [..., dim] as a leaf holds them."""
    if dtype == "int4":
        codes = codes.astype(np.int16) % 16
        half = codes.shape[-1] // 2
        return (codes[..., :half] + 16 * codes[..., half:]).astype(np.uint8)
    return codes.view(np.uint8) if dtype.startswith("float8") else codes


def build_case(
    lens,
    *,
    kv_heads=2,
    dim=32,
    block_size=16,
    dtype="float32",
    seed=0,
    extra_width=1,
) -> Case:
    """Write rows of the given lengths into shuffled blocks of a pool that is NaN elsewhere."""
    rng = np.random.default_rng(seed)
    layers, layer = 3, 1
    need = [-(-n // block_size) for n in lens]
    width = max(1, max(need)) + extra_width
    num_blocks = sum(need) + 3
    ids = rng.permutation(num_blocks - 1) + 1  # block 0 stays unused and poisoned
    storage = KV_DTYPES[dtype]
    integer = dtype in ("int8", "int4")
    shape = (num_blocks, layers, kv_heads, block_size, dim)
    leaves = {}
    for name in ("k", "v"):  # NaN everywhere; through the scales where codes cannot hold one
        leaves[name] = np.full(shape, 1 if storage.quantised else np.nan, storage.dtype)
        if storage.quantised:
            leaves[f"{name}_scale"] = np.full(shape[:-1], np.nan, np.float32)
    tables = np.zeros((len(lens), width), np.int32)
    stored = {"k": [], "v": []}
    # Magnitudes far from 1, different for each head and for K and V.
    magnitudes = rng.uniform(0.3, 3.0, (2, kv_heads, 1))
    used = 0
    for row, n in enumerate(lens):
        tables[row, : need[row]] = ids[used : used + need[row]]
        used += need[row]
        token = np.arange(n)
        at = (tables[row, token // block_size], layer, slice(None), token % block_size)
        for name, magnitude in zip(("k", "v"), magnitudes, strict=True):
            x = (rng.standard_normal((n, kv_heads, dim)) * magnitude).astype(np.float32)
            scale = np.ones((n, kv_heads), np.float32)
            if storage.max_code is not None:
                scale = np.abs(x).max(axis=-1, initial=0) / np.float32(storage.max_code)
                x = x / scale[..., None]
                x = np.rint(x) if integer else x
                x = np.clip(x, -storage.max_code, storage.max_code)
                leaves[f"{name}_scale"][at] = scale
            leaves[name][at] = x.astype(storage.dtype)
            stored[name].append(leaves[name][at].astype(np.float32) * scale[..., None])
    return Case(
        pages=KVPages(
            **{
                name: jnp.asarray(pack(leaf, dtype) if name in "kv" else leaf)
                for name, leaf in leaves.items()
            },
            coded_as=dtype if storage.stored_as_bytes else None,
        ),
        tables=jnp.asarray(tables),
        lens=jnp.asarray(lens, jnp.int32),
        keys=stored["k"],
        values=stored["v"],
        layer=layer,
    )


def run_jit(op, *args, optimise=False, **options):
    """Run an op under jit with a traced layer, as a scan over layers does.

    Most tests are about meaning: compiling without LLVM's optimisations halves their time.
    """
    return _jitted(op, optimise, tuple(options.items()))(*args)


@functools.cache
def _jitted(op, optimise, options):
    def call(*args):
        return op(*args[:-1], layer=args[-1], **dict(options))

    compiler_options = None if optimise else {"xla_backend_optimization_level": 0}
    return jax.jit(call, compiler_options=compiler_options)


def row_errors(out, want):
    """Largest absolute error of each row; NaN counts as infinite."""
    error = np.abs(np.asarray(out, np.float64) - want).reshape(len(want), -1)
    return np.where(np.isnan(error), np.inf, error).max(axis=1)


@pytest.fixture
def gpu_interpreter(capsys):
    """Run Mosaic kernels in the GPU interpreter, on a CPU; fails if it finds a race."""
    from pallas_kernels import mosaic

    with mosaic.interpret():
        yield
        jax.effects_barrier()
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture(scope="session")
def attention():
    """The helpers above: test modules are imported by path and cannot import this file."""

    class Helpers:
        oracle_row = staticmethod(oracle_row)
        build_case = staticmethod(build_case)
        row_errors = staticmethod(row_errors)
        run_jit = staticmethod(run_jit)
        tolerance = TOLERANCE

    return Helpers
