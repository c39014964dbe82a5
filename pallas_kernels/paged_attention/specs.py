"""Named shapes of real models: what the benchmark times and what a kernel is judged by."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention call over a batch.

    Attributes:
        name: what a table calls it.
        rows: rows of the batch.
        heads: query heads.
        kv_heads: KV heads.
        dim: head_dim.
        layers: layers of the model; a benchmark step runs all of them.
        tokens: context of a row; a pair is the clip range of a lognormal (median 80, sigma 1).
        zipf: rows share `rows * tokens` tokens so that the n-th longest has about 1 / n of the
            longest's, in shuffled order.
        chunk: query tokens of a row, part of its context; None is decode.
        block_size: tokens in a block.
        window: last tokens that are seen; None is all.
        num_sink_tokens: first tokens that stay visible whatever the window.
        soft_cap: soft cap of the scores; None is none.
        table_tokens: width of the block table, in tokens; None fits the longest row.
    """

    name: str
    rows: int
    heads: int
    kv_heads: int
    dim: int
    layers: int
    tokens: int | tuple[int, int]
    zipf: bool = False
    chunk: int | None = None
    block_size: int = 16
    window: int | None = None
    num_sink_tokens: int = 0
    soft_cap: float | None = None
    table_tokens: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def op(self) -> str:
        """The op that serves it: decode or prefill."""
        return "decode" if self.chunk is None else "prefill"

    def context_lens(self, seed: int = 0) -> np.ndarray:
        """Lengths of the rows, i32 `[row]`."""
        rng = np.random.default_rng(seed)
        if isinstance(self.tokens, int):
            if not self.zipf:
                return np.full(self.rows, self.tokens, np.int32)
            return rng.permutation(_zipf_lengths(self.rows, self.rows * self.tokens))
        low, high = self.tokens
        drawn = np.exp(rng.normal(np.log(80), 1.0, self.rows))
        return np.clip(drawn, low, high).astype(np.int32)

    def query_lens(self, seed: int = 0) -> np.ndarray:
        """Query tokens of the rows, i32 `[row]`."""
        return np.minimum(self.context_lens(seed), self.chunk or 1)

    def live_tokens(self, seed: int = 0) -> int:
        """Tokens whose K and V one layer must read, counted exactly."""
        lens = self.context_lens(seed).astype(np.int64)
        if self.window is not None:
            # The chunk's first query sees the furthest back.
            span = self.window + self.query_lens(seed) - 1
            lens = np.minimum(lens, span + self.num_sink_tokens)
        return int(lens.sum())


def _zipf_lengths(rows: int, total: int) -> np.ndarray:
    """Lengths in the proportions 1, 1/2, 1/3, …, i32 `[row]`, that sum to `total` exactly."""
    share = 1 / np.arange(1, rows + 1)
    lens = np.maximum(np.floor(share * total / share.sum()), 1).astype(np.int32)
    lens[0] += total - lens.sum()
    return lens


_SMOLLM2: dict[str, Any] = {"heads": 9, "kv_heads": 3, "dim": 64, "layers": 30}
_LLAMA_8B: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "layers": 32}
_LLAMA_8B_4_LAYERS: dict[str, Any] = {**_LLAMA_8B, "layers": 4}
_QWEN3_32B: dict[str, Any] = {"heads": 64, "kv_heads": 8, "dim": 128, "layers": 64}
_GEMMA2_9B: dict[str, Any] = {
    "heads": 16,
    "kv_heads": 8,
    "dim": 256,
    "layers": 42,
    "soft_cap": 50.0,
}
_GEMMA3_12B: dict[str, Any] = {"heads": 16, "kv_heads": 8, "dim": 256, "layers": 48}


def _by_name(*specs: AttentionSpec) -> dict[str, AttentionSpec]:
    return {spec.name: spec for spec in specs}


STEP_SPECS: dict[str, AttentionSpec] = _by_name(
    AttentionSpec(
        name="smollm2-decode-mixed", rows=24, tokens=(40, 544), table_tokens=576, **_SMOLLM2
    ),
    AttentionSpec(name="smollm2-decode-32x256", rows=32, tokens=256, **_SMOLLM2),
    AttentionSpec(name="smollm2-decode-1x2k", rows=1, tokens=2000, **_SMOLLM2),
    AttentionSpec(name="smollm2-decode-4x2k-window", rows=4, tokens=2000, window=256, **_SMOLLM2),
    AttentionSpec(name="smollm2-prefill-1x512", rows=1, tokens=512, chunk=512, **_SMOLLM2),
    AttentionSpec(
        name="smollm2-prefill-8x16",
        rows=8,
        tokens=(40, 544),
        chunk=16,
        table_tokens=2048,
        **_SMOLLM2,
    ),
    AttentionSpec(name="llama8b-decode-4x1k", rows=4, tokens=1000, **_LLAMA_8B_4_LAYERS),
)
"""Shapes a CPU can time, by name: whole steps, every layer of the model."""

GPU_SPECS: dict[str, AttentionSpec] = _by_name(
    AttentionSpec(name="llama8b-decode-64x4k", rows=64, tokens=4096, **_LLAMA_8B),
    AttentionSpec(name="llama8b-decode-1x32k", rows=1, tokens=32768, **_LLAMA_8B),
    AttentionSpec(name="llama8b-decode-16x1k", rows=16, tokens=1024, **_LLAMA_8B),
    AttentionSpec(
        name="llama8b-decode-16x32k-window1k", rows=16, tokens=32768, window=1024, **_LLAMA_8B
    ),
    AttentionSpec(name="llama8b-decode-64xzipf4k", rows=64, tokens=4096, zipf=True, **_LLAMA_8B),
    AttentionSpec(name="llama8b-prefill-4x512", rows=4, tokens=4096 + 512, chunk=512, **_LLAMA_8B),
    AttentionSpec(name="qwen3-32b-decode-32x4k", rows=32, tokens=4096, **_QWEN3_32B),
    AttentionSpec(name="gemma2-9b-decode-32x4k", rows=32, tokens=4096, **_GEMMA2_9B),
    AttentionSpec(name="smollm2-decode-256x1k", rows=256, tokens=1024, **_SMOLLM2),
    AttentionSpec(
        name="llama8b-prefill-1x2048", rows=1, tokens=4096 + 2048, chunk=2048, **_LLAMA_8B
    ),
    AttentionSpec(
        name="gemma3-12b-prefill-4x512-window1k",
        rows=4,
        tokens=4096 + 512,
        chunk=512,
        window=1024,
        **_GEMMA3_12B,
    ),
)
"""Shapes a GPU is judged by, by name: one layer's call. Ordered by what matters most."""

GPU_DTYPES: dict[str, tuple[str, ...]] = {
    "llama8b-decode-64x4k": ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"),
    "llama8b-prefill-4x512": ("bfloat16", "int8"),
    "qwen3-32b-decode-32x4k": ("bfloat16", "float8_e4m3fn"),
    "gemma2-9b-decode-32x4k": ("bfloat16", "int8"),
}
"""KV dtypes to time at each of `GPU_SPECS`; one that is not here is timed in bfloat16."""

SPECS: dict[str, AttentionSpec] = {**STEP_SPECS, **GPU_SPECS}
"""All shapes by name."""
