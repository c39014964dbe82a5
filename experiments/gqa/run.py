"""What grouped-query attention saves, and what averaging KV heads costs, on real weights.

    python -m experiments.gqa.run
    python -m experiments.gqa.run --model-path DIR

Perplexity and greedy tokens come from the model; requests at once from the engine with lengths of
the Azure trace and a linear cost of time. See README.md. Exits 1 where mha changes a token.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from experiments.shared.azure import TraceRow, prompt, read_trace
from experiments.shared.executor import LinearTimeExecutor
from experiments.shared.models import load
from experiments.shared.serve import serve
from experiments.shared.tables import markdown
from paxkv.cache.layout import KVLayout, blocks_in_budget
from paxkv.cache.quantize import KVFormat
from paxkv.engine.state import SchedulerConfig
from paxkv.models.config import ModelConfig
from paxkv.models.heads import Heads, Mha, Native, Pooled
from paxkv.policies.admission import Guaranteed
from paxkv.quality.cached import CachedModel
from paxkv.quality.text import docs_tokens
from paxkv.workload.arrivals import AllAtOnce
from paxkv.workload.docs_chat import DocsChat
from paxkv.workload.request import Request

BLOCK_SIZE = 16
HEADS: dict[str, Heads] = {"native": Native(), "mha": Mha(), "pooled": Pooled()}
COLUMNS = (
    "heads",
    "KV heads",
    "bytes a token, bf16",
    "tokens in the cache",
    "requests at once",
    "perplexity",
    "greedy tokens equal to native",
)


class Quality(NamedTuple):
    """What a model says.

    Attributes:
        outputs: Greedy tokens of each prompt.
    """

    config: ModelConfig
    perplexity: float
    outputs: tuple[tuple[int, ...], ...]


def measure(heads: Heads, options: argparse.Namespace) -> Quality:
    """Load the model with other heads; its perplexity and greedy tokens, cache in float32."""
    model = load(options.model_path, heads)
    cached = CachedModel(model, KVFormat())
    chat = DocsChat(
        num_requests=options.prompts, max_tokens=options.output_tokens, arrivals=AllAtOnce()
    )
    prompts = [r.prompt_token_ids for r in chat.requests(model.tokenizer, model.config, 0)]
    return Quality(
        config=model.config,
        perplexity=cached.perplexity(docs_tokens(model.tokenizer, options.text_tokens)).perplexity,
        outputs=tuple(tuple(cached.greedy(ids, options.output_tokens)) for ids in prompts),
    )


def layout_of(config: ModelConfig) -> KVLayout:
    """Return what a block of a bf16 cache holds, for a model without windows."""
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype="bfloat16",
    )


def requests_at_once(num_blocks: int, rows: Sequence[TraceRow], longest: int) -> float:
    """Return how many requests of the trace run at once while others wait; none is preempted."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=len(rows),
        max_num_batched_tokens=2048,
        max_model_len=longest,
        vocab_size=10,
        prefix_caching=False,
        admission=Guaranteed(),
    )
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt(row), max_tokens=row.output_tokens)
        for i, row in enumerate(rows)
    ]
    return serve(config, requests, LinearTimeExecutor()).mean_running() or float(len(rows))


def equal_tokens(ours: Quality, native: Quality) -> tuple[int, int]:
    """Return how many greedy tokens are equal, and of how many."""
    pairs = [
        a == b
        for x, y in zip(ours.outputs, native.outputs, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return sum(pairs), len(pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; exits 1 where mha changes the output or the ratio of bytes is not exact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--gib", type=float, default=1.0, help="memory of the cache")
    parser.add_argument("--prompts", type=int, default=3, help="chat prompts")
    parser.add_argument("--output-tokens", type=int, default=24, help="greedy tokens of each")
    parser.add_argument("--text-tokens", type=int, default=512, help="for the perplexity")
    parser.add_argument("--num-requests", type=int, default=150, help="of the trace")
    options = parser.parse_args(arguments)
    found = {name: measure(heads, options) for name, heads in HEADS.items()}
    native = found["native"]
    longest = native.config.max_model_len
    rows = [
        row
        for row in read_trace()[: options.num_requests]
        if row.prompt_tokens + row.output_tokens <= longest
    ]
    cells = []
    for name, quality in found.items():
        layout = layout_of(quality.config)
        num_blocks = blocks_in_budget(int(options.gib * 2**30), layout)
        equal, of = equal_tokens(quality, native)
        cells.append(
            [
                name,
                quality.config.num_kv_heads,
                f"{layout.bytes_per_token:,}",
                f"{num_blocks * BLOCK_SIZE:,}",
                f"{requests_at_once(num_blocks, rows, longest):.1f}",
                f"{quality.perplexity:,.3f}",
                f"{equal} of {of}",
            ]
        )
    print(f"{options.gib:g} GiB of cache, {len(rows)} requests\n\n{markdown(COLUMNS, cells)}")

    group = native.config.num_heads // native.config.num_kv_heads
    native_bytes, mha_bytes = (
        layout_of(found[name].config).bytes_per_token for name in ("native", "mha")
    )
    if found["mha"].outputs != native.outputs or mha_bytes != group * native_bytes:
        sys.exit("mha: its tokens must be those of native, its cache larger by the group exactly")
    print(f"\nmha: the same tokens, a cache {group} × as large")


if __name__ == "__main__":
    main()
