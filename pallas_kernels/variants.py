"""The kernel variants that are compiled ahead of time: dtypes, block sizes, head dims and flags."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.aot import Program
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_decode, paged_prefill
from pallas_kernels.pages import KVPages, init_pages

Op = Literal["decode", "prefill", "write", "step"]

_POOL_TOKENS = 262_144  # large enough that a copy of the pool stands out among temporaries
_LAYERS = 2
_ROWS = 8
_CONTEXT_TOKENS = 4096
_CHUNK = 256
_WRITTEN_TOKENS = 70  # two tiles of 64 rows of one head, the last one partial
_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "int8",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of one op with `implementation="mosaic"`.

    Attributes:
        op: which public op; `step` scans the layers, each writing one token a row and decoding.
        kv_dtype: storage dtype of the pool.
        q_dtype: dtype of the queries, or of the new keys and values.
        block_size: tokens in a block.
        head_dim: width of a head.
        heads: query heads; unused by `write`.
        kv_heads: KV heads.
        window: sliding window with 4 sink tokens; None is neither.
        soft_cap: cap of the scores, or None.
        deterministic: decode with a fixed split.
        fast: whether it belongs to the subset that every test run compiles.
    """

    op: Op
    kv_dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    block_size: int = 16
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    window: int | None = None
    soft_cap: float | None = None
    deterministic: bool = False
    fast: bool = False

    @property
    def name(self) -> str:
        """What tables, the command line and tests call it."""
        q_dtype = "" if self.q_dtype == "bfloat16" else f"-q_{_SHORT[self.q_dtype]}"
        heads = f"h{self.heads}x{self.kv_heads}" if self.op != "write" else f"h{self.kv_heads}"
        flags = {
            "window": self.window is not None,
            "cap": self.soft_cap is not None,
            "deterministic": self.deterministic,
        }
        return (
            f"{self.op}-{_SHORT[self.kv_dtype]}{q_dtype}-b{self.block_size}-d{self.head_dim}-{heads}"
            + "".join(f"-{flag}" for flag, on in flags.items() if on)
        )

    def build(self) -> Program:
        """The public op under a traced layer; the pool is its first argument, donated."""
        pages = jax.eval_shape(
            lambda: init_pages(
                _POOL_TOKENS // self.block_size,
                _LAYERS,
                self.kv_heads,
                self.block_size,
                self.head_dim,
                self.kv_dtype,
            )
        )
        layer, lengths = _ints(), _ints(_ROWS)
        if self.op == "write":
            new = self._floats(_WRITTEN_TOKENS, self.kv_heads, self.head_dim)
            return Program(_write, (pages, new, new, _ints(_WRITTEN_TOKENS), layer), (0,))
        options = self._options()
        tables = _ints(_ROWS, _CONTEXT_TOKENS // self.block_size)
        q = self._floats(_ROWS, self.heads, self.head_dim)
        if self.op == "step":
            fn = functools.partial(_step, options=options)
            return Program(fn, (pages, q, tables, lengths, lengths), (0,))
        if self.op == "decode":
            fn = functools.partial(_attend, op=paged_decode, options=options)
            return Program(fn, (pages, q, tables, (lengths,), layer), (0,))
        q = self._floats(_ROWS, _CHUNK, self.heads, self.head_dim)
        fn = functools.partial(_attend, op=paged_prefill, options=options)
        return Program(fn, (pages, q, tables, (lengths, lengths), layer), (0,))

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"soft_cap": self.soft_cap, "implementation": "mosaic"}
        if self.window is not None:
            options |= {"window": self.window, "num_sink_tokens": 4}
        if self.deterministic:
            options["deterministic"] = True
        return options

    def _floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.q_dtype))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _write(
    pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array, layer: jax.Array
) -> KVPages:
    return write_kv(k, v, pages, slots, layer=layer, implementation="mosaic")


def _attend(
    pages: KVPages,
    q: jax.Array,
    tables: jax.Array,
    lengths: tuple[jax.Array, ...],
    layer: jax.Array,
    *,
    op: Callable[..., jax.Array],
    options: dict[str, Any],
) -> tuple[jax.Array, KVPages]:
    return op(q, pages, tables, *lengths, layer=layer, **options), pages


def _step(
    pages: KVPages,
    q: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    slots: jax.Array,
    *,
    options: dict[str, Any],
) -> tuple[jax.Array, KVPages]:
    def one(
        carry: tuple[jax.Array, KVPages], layer: jax.Array
    ) -> tuple[tuple[jax.Array, KVPages], None]:
        x, pages = carry
        new = x[:, : pages.num_kv_heads]
        pages = write_kv(new, new, pages, slots, layer=layer, implementation="mosaic")
        return (paged_decode(x, pages, tables, lengths, layer=layer, **options), pages), None

    return jax.lax.scan(one, (q, pages), jnp.arange(pages.num_layers, dtype=jnp.int32))[0]


# Together they meet every dtype, block size, head dim and group once, and every flag.
_FAST = (
    Variant(op="step"),
    Variant(op="step", kv_dtype="int8", block_size=64),
    Variant(op="write", kv_dtype="float8_e4m3fn", head_dim=80, kv_heads=3),
    Variant(op="write", kv_dtype="float8_e5m2", head_dim=256, block_size=128),
    Variant(op="decode", kv_dtype="float16", q_dtype="float16", head_dim=64, heads=9, kv_heads=3),
    Variant(op="decode", kv_dtype="int8", block_size=64, window=1024, soft_cap=50.0),
    Variant(op="decode", kv_dtype="float8_e4m3fn", block_size=32, heads=64, deterministic=True),
    Variant(op="decode", kv_dtype="float8_e5m2", head_dim=256, block_size=128, heads=8),
    Variant(op="prefill"),
    Variant(op="prefill", kv_dtype="float16", q_dtype="float16", head_dim=80, heads=8),
    Variant(op="prefill", kv_dtype="int8", block_size=64, window=1024, soft_cap=50.0),
    Variant(
        op="prefill", kv_dtype="float8_e4m3fn", block_size=32, head_dim=96, heads=9, kv_heads=3
    ),
    Variant(
        op="prefill", kv_dtype="float8_e5m2", head_dim=256, block_size=128, heads=16, kv_heads=1
    ),
)


def _matrix() -> list[Variant]:
    """Dtype × block size at dim 128, dtype × dim at block 16, and each op's flags and heads."""
    variants = []
    for op in ("write", "decode", "prefill"):
        for kv_dtype in _SHORT:
            q_dtype = "float16" if kv_dtype == "float16" else "bfloat16"
            base = Variant(op=op, kv_dtype=kv_dtype, q_dtype=q_dtype)
            for block_size in (16, 32, 64, 128):
                variants.append(dataclasses.replace(base, block_size=block_size))
            for head_dim in (64, 80, 96, 256):
                variants.append(dataclasses.replace(base, head_dim=head_dim))
            if op == "write":
                variants.append(dataclasses.replace(base, kv_heads=3))
                variants.append(dataclasses.replace(base, kv_heads=1, head_dim=256))
                continue
            variants.append(dataclasses.replace(base, window=1024))
            variants.append(dataclasses.replace(base, window=1024, soft_cap=50.0))
            if op == "decode":
                variants.append(dataclasses.replace(base, deterministic=True))
            for group in (1, 3, 8, 16):
                variants.append(dataclasses.replace(base, heads=8 * group))
            # The narrowest fit of two CTAs of the decode kernel.
            variants.append(dataclasses.replace(base, heads=128, head_dim=96))
    return variants


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        *_matrix(),
        *(dataclasses.replace(variant, fast=True) for variant in _FAST),
    )
}
"""All variants by name; a fast one stands in for its twin in the matrix."""
