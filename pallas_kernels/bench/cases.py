"""The cases of the correctness sweep, and their inputs: pools laid out in NumPy."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import oracle
from pallas_kernels.pages import KV_DTYPES, KVPages

LAYERS, LAYER = 2, 1  # pools have two layers, so that a wrong layer shows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call whose result is compared with the oracle.

    Attributes:
        name: what is special about it.
        op: decode, prefill or write.
        dtype: of the pool.
        q_dtype: of q, or of K and V for a write.
        heads: query heads; kv_heads, dim, block_size: of the pool.
        lens: context lengths.
        chunk: query tokens of a prefill row, at most; rows have fewer where their context is short.
        window: last tokens that are seen; None is all. num_sink_tokens, soft_cap: as in the ops.
        deterministic: of a decode.
    """

    name: str
    op: str
    dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    block_size: int = 16
    lens: tuple[int, ...] = (0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 300)
    chunk: int = 0
    window: int | None = None
    num_sink_tokens: int = 0
    soft_cap: float | None = None
    deterministic: bool = False

    @property
    def query_lens(self) -> np.ndarray:
        """Query tokens of each row, i32 `[row]`; ragged where there is room for it."""
        lens = np.asarray(self.lens, np.int32)
        return np.minimum(lens, self.chunk - np.arange(len(lens), dtype=np.int32) % 3)


class Inputs(NamedTuple):
    """A pool with a case's rows in it, the arguments of the op, and the values stored."""

    pages: KVPages
    arguments: dict[str, np.ndarray]
    keys: list[np.ndarray]  # float64 [token, kv_head, dim] of each row
    values: list[np.ndarray]


def shuffled_tables(
    lens: np.ndarray, block_size: int, rng: np.random.Generator, *, width: int = 0, free: int = 0
) -> tuple[np.ndarray, int]:
    """Give every row its blocks in random order.

    Args:
        lens: `[row]`, tokens.
        block_size: tokens of a block.
        rng: the order.
        width: least width of the tables, in blocks.
        free: further blocks, which no row owns.

    Returns:
        i32 tables `[row, block]`, 0 past a row's last block, and the number of blocks.
    """
    need = -(-lens // block_size)
    num_blocks = int(need.sum()) + free
    ids, used = rng.permutation(num_blocks), 0
    tables = np.zeros((len(lens), max(width, int(need.max(initial=0)), 1)), np.int32)
    for row, count in enumerate(need):
        tables[row, :count] = ids[used : used + count]
        used += count
    return tables, num_blocks


def build_attention(case: Case, seed: int = 0) -> Inputs:
    """Lay a case out; whatever no row owns is NaN, in the codes or in the scales."""
    rng = np.random.default_rng(seed)
    lens = np.asarray(case.lens, np.int32)
    tables, num_blocks = shuffled_tables(lens, case.block_size, rng, free=2)
    tables = np.pad(tables, ((0, 0), (0, 1)), constant_values=-1)  # padding may be anything
    storage = KV_DTYPES[case.dtype]
    shape = (num_blocks, LAYERS, case.kv_heads, case.block_size, case.dim)
    leaves: dict[str, np.ndarray] = {}
    rows: dict[str, list[np.ndarray]] = {"k": [], "v": []}
    for name in ("k", "v"):
        integer = case.dtype in ("int8", "int4")
        codes = np.full(shape, 99 if integer else np.nan, storage.dtype)
        scales = np.full(shape[:-1], np.nan, np.float32) if storage.quantised else None
        # Magnitudes far from 1, another for each head and for K and V.
        magnitude = rng.uniform(0.25, 2.5, (case.kv_heads, 1))
        for row, length in enumerate(lens):
            token = np.arange(length)
            at = (tables[row, token // case.block_size], LAYER, slice(None))
            at = (*at, token % case.block_size)
            x = rng.standard_normal((length, case.kv_heads, case.dim)) * magnitude
            if scales is not None:
                _, scale = oracle.write_bounds(x, case.dtype)
                scales[at] = scale
                x = x / scale[..., None]
                x = np.rint(x) if integer else x
            codes[at] = x.astype(storage.dtype)
            stored = oracle.to_leaf(codes[at], case.dtype)
            rows[name].append(
                oracle.dequantise(stored, None if scales is None else scales[at], case.dtype)
            )
        leaves[name] = oracle.to_leaf(codes, case.dtype)
        if scales is not None:
            leaves[f"{name}_scale"] = scales
    shape = (len(lens), case.heads, case.dim)
    arguments = {"block_tables": tables, "context_lens": lens}
    if case.op == "prefill":
        shape = (len(lens), case.chunk, *shape[1:])
        arguments["query_lens"] = case.query_lens
    q = rng.standard_normal(shape).astype(oracle.storage_dtype(case.q_dtype))
    pages = KVPages(
        **{name: jnp.asarray(leaf) for name, leaf in leaves.items()},
        coded_as=case.dtype if storage.stored_as_bytes else None,
    )
    return Inputs(pages, {"q": q, **arguments}, rows["k"], rows["v"])


def build_write(case: Case, seed: int = 0) -> Inputs:
    """A pool of small numbers, new K and V, and slots of which some must be skipped."""
    rng = np.random.default_rng(seed)
    storage = KV_DTYPES[case.dtype]
    num_tokens, num_blocks = case.lens[0], -(-case.lens[0] // case.block_size) + 2
    shape = (num_blocks, LAYERS, case.kv_heads, case.block_size, case.dim)
    leaves: dict[str, np.ndarray] = {}
    arguments: dict[str, np.ndarray] = {}
    for name in ("k", "v"):
        old = rng.integers(-3, 4, shape).astype(storage.dtype)
        leaves[name] = oracle.to_leaf(old, case.dtype)
        if storage.quantised:
            leaves[f"{name}_scale"] = rng.uniform(0.5, 2, shape[:-1]).astype(np.float32)
        x = rng.standard_normal((num_tokens, case.kv_heads, case.dim))
        x *= np.exp2(rng.integers(-6, 7, (num_tokens, case.kv_heads, 1)))
        x[0] = 0.0  # its scale is 1, its codes 0
        arguments[name] = x.astype(oracle.storage_dtype(case.q_dtype))
    slots = rng.permutation(num_blocks * case.block_size)[:num_tokens].astype(np.int32)
    slots[1::7] = -1
    slots[2::11] = num_blocks * case.block_size + 5
    pages = KVPages(
        **{name: jnp.asarray(leaf) for name, leaf in leaves.items()},
        coded_as=case.dtype if storage.stored_as_bytes else None,
    )
    return Inputs(pages, {**arguments, "slot_mapping": slots}, [], [])


def sweep_cases() -> list[Case]:
    """Every dtype at the plain shape; every flag, geometry and length at some dtype."""
    cases: list[Case] = []
    masks: dict[str, Any] = {"window": 70, "num_sink_tokens": 5}
    bases: dict[str, dict[str, Any]] = {"decode": {}, "prefill": {"chunk": 70}}
    for op, base in bases.items():
        for dtype in KV_DTYPES:
            q_dtype = dtype if dtype in ("float16", "float32") else "bfloat16"
            cases.append(Case(name="plain", op=op, dtype=dtype, q_dtype=q_dtype, **base))
        variants: dict[str, dict[str, Any]] = {
            "window+sinks": masks,
            "window 1": {"window": 1},
            "cap": {"soft_cap": 8.0},
            "all flags": {"dtype": "int8", "soft_cap": 8.0, **masks},
            "fp8 flags": {"dtype": "float8_e4m3fn", "soft_cap": 8.0, **masks},
            "f16 queries": {"dtype": "int8", "q_dtype": "float16"},
            "D 64, group 3": {"dim": 64, "heads": 9, "kv_heads": 3, "dtype": "int8"},
            "D 80, group 1": {"dim": 80, "heads": 2, "block_size": 32},
            "D 96, group 16": {"dim": 96, "heads": 16, "kv_heads": 1, "block_size": 64},
            "D 256, group 2": {"dim": 256, "heads": 4, "dtype": "float8_e5m2"},
            "D 256, bf16": {"dim": 256, "heads": 4},
            "block 128": {"block_size": 128, "heads": 16, "dtype": "float8_e4m3fn"},
        }
        for name, changes in variants.items():
            cases.append(Case(name=name, op=op, **{**base, **changes}))
    ragged: dict[str, Any] = {"lens": (5000, 1, 0, 900)}
    cases.append(Case(name="ragged 5k", op="decode", **ragged))
    cases.append(Case(name="deterministic", op="decode", deterministic=True, **ragged))
    cases.append(
        Case(name="chunk in 2k", op="prefill", chunk=200, lens=(2000, 130, 0, 200), heads=4)
    )
    for dtype in KV_DTYPES:
        cases.append(Case(name="plain", op="write", dtype=dtype, lens=(70,)))
    writes: dict[str, dict[str, Any]] = {
        "D 64, 3 heads": {"dim": 64, "kv_heads": 3, "dtype": "int8"},
        "D 80, f32 input": {"dim": 80, "q_dtype": "float32", "dtype": "float8_e4m3fn"},
        "one token": {"lens": (1,), "block_size": 64},
        "1 head": {"kv_heads": 1},
    }
    for name, changes in writes.items():
        cases.append(Case(name=name, op="write", **{"lens": (70,), **changes}))
    return cases
