"""Named shapes of real models: what the benchmark times and what a kernel is judged by."""

import dataclasses

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
        chunk: query tokens of a row; None is decode.
        block_size: tokens in a block.
        window: last tokens that are seen; None is all.
        table_tokens: width of the block table, in tokens; None fits the longest row.
        min_memory_bytes: device memory below which the shape is left out.
    """

    name: str
    rows: int
    heads: int
    kv_heads: int
    dim: int
    layers: int
    tokens: int | tuple[int, int]
    chunk: int | None = None
    block_size: int = 16
    window: int | None = None
    table_tokens: int | None = None
    min_memory_bytes: int = 0

    def context_lens(self, seed: int = 0) -> np.ndarray:
        """Lengths of the rows, i32 `[row]`."""
        if isinstance(self.tokens, int):
            return np.full(self.rows, self.tokens, np.int32)
        rng = np.random.default_rng(seed)
        low, high = self.tokens
        drawn = np.exp(rng.normal(np.log(80), 1.0, self.rows))
        return np.clip(drawn, low, high).astype(np.int32)

    def live_tokens(self, seed: int = 0) -> int:
        """Tokens whose K and V one layer must read."""
        lens = self.context_lens(seed)
        return int((lens if self.window is None else np.minimum(lens, self.window)).sum())


_SMOLLM2 = {"heads": 9, "kv_heads": 3, "dim": 64, "layers": 30}
_LLAMA_8B = {"heads": 32, "kv_heads": 8, "dim": 128}

SPECS: dict[str, AttentionSpec] = {
    spec.name: spec
    for spec in (
        AttentionSpec(
            name="smollm2-decode-mixed", rows=24, tokens=(40, 544), table_tokens=576, **_SMOLLM2
        ),
        AttentionSpec(name="smollm2-decode-32x256", rows=32, tokens=256, **_SMOLLM2),
        AttentionSpec(name="smollm2-decode-1x2k", rows=1, tokens=2000, **_SMOLLM2),
        AttentionSpec(
            name="smollm2-decode-4x2k-window", rows=4, tokens=2000, window=256, **_SMOLLM2
        ),
        AttentionSpec(name="smollm2-prefill-1x512", rows=1, tokens=512, chunk=512, **_SMOLLM2),
        AttentionSpec(
            name="smollm2-prefill-8x16",
            rows=8,
            tokens=(40, 544),
            chunk=16,
            table_tokens=2048,
            **_SMOLLM2,
        ),
        AttentionSpec(name="llama8b-decode-4x1k", rows=4, tokens=1000, layers=4, **_LLAMA_8B),
        AttentionSpec(
            name="llama8b-decode-64x4k",
            rows=64,
            tokens=4096,
            layers=4,
            min_memory_bytes=32 * 2**30,
            **_LLAMA_8B,
        ),
    )
}
"""The shapes by name."""
