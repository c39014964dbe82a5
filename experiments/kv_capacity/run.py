"""How many tokens a GiB of KV cache holds, by format, for real models; and what windows save.

    python -m experiments.kv_capacity.run

Planned bytes are checked against an allocated pool of every format; exits 1 if any differs.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from experiments.shared.tables import markdown
from paxkv.cache.groups import FULL, LayerGroup, Span, capacity_tokens, group_layers, most_blocks_of
from paxkv.cache.layout import KVLayout, blocks_in_budget, pool_bytes
from paxkv.cache.mixed import init_cache
from paxkv.cache.quantize import KVFormat

BLOCK_SIZE = 16
CHUNK_TOKENS = 2048
TARGET = 1.9
LENGTHS = (1024, 8192, 32_768)

FORMATS = (
    KVFormat("bf16"),
    *(
        KVFormat(name, granularity=granularity)
        for name in ("fp8", "int8", "int4")
        for granularity in ("token_head", "head", "tensor")
    ),
)


class Shape(NamedTuple):
    """What the KV cache of a model depends on.

    Attributes:
        spans: What the tokens of each layer see.
    """

    name: str
    spans: tuple[Span, ...]
    num_kv_heads: int
    head_dim: int

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Its layers by what their tokens see."""
        return group_layers(self.spans)

    def layout(self, kv: KVFormat) -> KVLayout:
        """Return what a block holds."""
        return kv.layout(
            "bfloat16",
            self.groups,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=BLOCK_SIZE,
        )


GEMMA = Shape("Gemma-2-9B", (Span(4096), FULL) * 21, 8, 256)
SHAPES = (
    Shape("SmolLM2-135M", (FULL,) * 30, 3, 64),
    Shape("Llama-3.1-8B", (FULL,) * 32, 8, 128),
    GEMMA,
)


def label(kv: KVFormat) -> str:
    """Return the words that choose a format."""
    return f"{kv.name} kv.granularity={kv.granularity}" if kv.quantised else kv.name


def tokens_in(budget_bytes: int, shape: Shape, kv: KVFormat) -> int:
    """Return the tokens that fit, if no window lets any go."""
    layout = shape.layout(kv)
    return capacity_tokens(blocks_in_budget(budget_bytes, layout), shape.groups, layout)


def allocated_bytes(num_blocks: int, layout: KVLayout) -> int:
    """Allocate a pool and return the bytes of its arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(init_cache(num_blocks, layout)))


def capacity_row(kv: KVFormat, budget_bytes: int) -> list[str]:
    """Return a format's tokens for every shape, beside those of bf16."""
    cells = [label(kv)]
    for shape in SHAPES:
        tokens = tokens_in(budget_bytes, shape, kv)
        factor = tokens / tokens_in(budget_bytes, shape, KVFormat("bf16"))
        missed = kv.quantised and factor < TARGET
        cells.append(f"{tokens:,} ({factor:.2f} ×{', below 1.9' if missed else ''})")
    return cells


def window_row(length: int) -> list[str]:
    """Return the blocks of one Gemma request with and without its windows, bf16."""
    layout = GEMMA.layout(KVFormat("bf16"))
    block_mib = layout.bytes_per_block / 2**20
    plain = [LayerGroup(group.layers) for group in GEMMA.groups]
    without = most_blocks_of(plain, length, BLOCK_SIZE, CHUNK_TOKENS)
    windowed = most_blocks_of(GEMMA.groups, length, BLOCK_SIZE, CHUNK_TOKENS)
    return [
        f"{length:,}",
        f"{without:,} ({without * block_mib:,.0f} MiB)",
        f"{windowed:,} ({windowed * block_mib:,.0f} MiB)",
        f"{without / windowed:.2f} ×",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; exits 1 where planned and allocated bytes differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="memory of the cache")
    parser.add_argument("--check-blocks", type=int, default=3, help="blocks of the pools allocated")
    options = parser.parse_args(arguments)
    budget = int(options.gib * 2**30)
    print(f"Tokens in {options.gib:g} GiB, blocks of {BLOCK_SIZE}\n")
    columns = ("kv", *(shape.name for shape in SHAPES))
    print(markdown(columns, [capacity_row(kv, budget) for kv in FORMATS]))

    print(f"\nMost blocks of one {GEMMA.name} request, bf16, chunks of {CHUNK_TOKENS} tokens\n")
    columns = ("tokens", "windows ignored", "21 layers see 4,096 tokens", "saved")
    print(markdown(columns, [window_row(length) for length in LENGTHS]))

    pairs = [(shape, kv, shape.layout(kv)) for shape in SHAPES for kv in FORMATS]
    wrong = [
        f"{shape.name} {label(kv)}"
        for shape, kv, layout in pairs
        if allocated_bytes(options.check_blocks, layout) != pool_bytes(options.check_blocks, layout)
    ]
    equal = len(pairs) - len(wrong)
    print(f"\nplanned bytes = allocated bytes for {equal} of {len(pairs)} pools")
    if wrong:
        sys.exit(f"differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
