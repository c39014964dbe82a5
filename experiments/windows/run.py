"""What a window saves in blocks, and what it costs in quality: sliding, and with sinks.

    python -m experiments.windows.run
    python -m experiments.windows.run --skip-quality           # blocks only, no model
    python -m experiments.windows.run --model-path DIR --text-tokens 2000

Blocks come from the engine without a model, quality from a model. See README.md. Exits 1 where a
request held more blocks than `most_blocks_of` says.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.shared.azure import TraceRow, prompt, read_trace
from experiments.shared.executor import LinearTimeExecutor
from experiments.shared.models import load
from experiments.shared.serve import serve
from experiments.shared.tables import markdown
from paxkv.cache.groups import group_layers, most_blocks_of
from paxkv.engine import scheduler
from paxkv.engine.state import SchedulerConfig, init_state
from paxkv.models.perplexity import perplexity
from paxkv.models.source import LoadedModel
from paxkv.policies.window import Full, LayerView, Sinks, Sliding, WindowPolicy
from paxkv.quality.text import docs_tokens
from paxkv.workload.request import Request

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
POOL_BLOCKS = 320
NUM_LAYERS = 30
"""Of SmolLM2-135M; the engine's part only needs that all layers have one window."""

BLOCK_COLUMNS = ("window", "bound", "most in a step", "most after a step", "requests at once")
QUALITY_COLUMNS = ("window", "perplexity", "of the tokens past the window")


def policies(sizes: Sequence[int]) -> dict[str, WindowPolicy]:
    """Return window policies by the words that choose them."""
    named: dict[str, WindowPolicy] = {"window=full": Full()}
    for size in sizes:
        named[f"window=sliding window.size={size}"] = Sliding(size=size)
    for size in sizes:
        named[f"window=sinks window.size={size}"] = Sinks(size=size)
    return named


def spans_of(policy: WindowPolicy, num_layers: int) -> list:
    """Return what the layers of a model without windows of its own see."""
    return [
        policy.choose(LayerView(layer=layer, num_layers=num_layers, window=None))
        for layer in range(num_layers)
    ]


def config_of(policy: WindowPolicy, rows: int, longest: int) -> SchedulerConfig:
    """Return an engine with the window, and memory that is the same for every window."""
    return SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=POOL_BLOCKS,
        max_num_seqs=rows,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_model_len=longest,
        vocab_size=10,
        prefix_caching=False,
        groups=group_layers(spans_of(policy, NUM_LAYERS)),
    )


class Held(NamedTuple):
    """Blocks that one request held over its life.

    Attributes:
        bound: What admission and sizing reckon with.
        in_step: Most while a step computes: blocks for its tokens, before any is given back.
        after_step: Most when a step has given back what its window left behind.
    """

    bound: int
    in_step: int
    after_step: int


def blocks_held(policy: WindowPolicy, prompt_len: int, output_len: int) -> Held:
    """Serve one request alone and watch its blocks."""
    config = config_of(policy, rows=1, longest=prompt_len + output_len)
    state, executor = init_state(config), LinearTimeExecutor()
    request = Request(request_id="one", prompt_token_ids=(5,) * prompt_len, max_tokens=output_len)
    scheduler.submit(state, request, 0.0)
    row, in_step, after_step = np.array([0]), 0, 0
    while state.has_work:
        plan = scheduler.schedule(state, 0.0)
        in_step = max(in_step, int(state.rows.num_held(row)[0]))
        scheduler.commit(state, plan, executor.execute(plan), 0.0)
        after_step = max(after_step, int(state.rows.num_held(row)[0]))
    total = prompt_len + output_len - 1  # the last token is never written
    bound = most_blocks_of(config.groups, total, BLOCK_SIZE, CHUNK_TOKENS)
    return Held(bound, in_step, after_step)


def requests_at_once(policy: WindowPolicy, rows: Sequence[TraceRow]) -> float:
    """Return how many requests of the trace run at once while others wait."""
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    requests = [
        Request(request_id=str(i), prompt_token_ids=prompt(row), max_tokens=row.output_tokens)
        for i, row in enumerate(rows)
    ]
    served = serve(config_of(policy, len(rows), longest), requests, LinearTimeExecutor())
    return served.mean_running() or float(len(rows))


def quality(model: LoadedModel, policy: WindowPolicy, text: list[int]) -> np.ndarray:
    """Return the negative log-likelihood of tokens 2 to n, nats, f32 `[n - 1]`."""
    spans = spans_of(policy, model.config.num_layers)
    return perplexity(model, text, model.dtype, chunk=256, spans=spans).nll


def show_blocks(options: argparse.Namespace, named: dict[str, WindowPolicy]) -> list[str]:
    """Print blocks and concurrency; returns the windows that passed their bound."""
    trace, passed, table = read_trace()[: options.num_requests], [], []
    for name, policy in named.items():
        held = blocks_held(policy, options.prompt_len, options.output_len)
        if max(held.in_step, held.after_step) > held.bound:
            passed.append(name)
        table.append([name, *held, f"{requests_at_once(policy, trace):.1f}"])
    print(
        f"Blocks of one request of {options.prompt_len} + {options.output_len} tokens; requests at "
        f"once of {len(trace)} in {POOL_BLOCKS} blocks; chunks of {CHUNK_TOKENS} tokens\n"
    )
    print(markdown(BLOCK_COLUMNS, table), flush=True)
    return passed


def show_quality(options: argparse.Namespace, named: dict[str, WindowPolicy]) -> None:
    """Print the perplexity of a text under each window."""
    model = load(options.model_path)
    text = docs_tokens(model.tokenizer, options.text_tokens, start=0.5)
    past, table = max(options.sizes), []
    for name, policy in named.items():
        nll = quality(model, policy, text).astype(np.float64)
        shares = (np.exp(nll.mean()), np.exp(nll[past:].mean()))
        table.append([name, *(f"{value:,.2f}" for value in shares)])
    print(f"\n{len(text)} tokens of documentation; past the window: those after {past}\n")
    print(markdown(QUALITY_COLUMNS, table), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; exits 1 where a bound was passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256], help="tokens")
    parser.add_argument(
        "--prompt-len", type=int, default=3000, help="of the request that is watched"
    )
    parser.add_argument("--output-len", type=int, default=1000, help="of the same")
    parser.add_argument("--num-requests", type=int, default=150, help="of the trace")
    parser.add_argument("--skip-quality", action="store_true", help="blocks only, no model")
    parser.add_argument("--model-path", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("--text-tokens", type=int, default=1000, help="for the perplexity")
    options = parser.parse_args(arguments)
    named = policies(options.sizes)
    passed = show_blocks(options, named)
    if not options.skip_quality:
        show_quality(options, named)
    if passed:
        sys.exit(f"more blocks than most_blocks_of says: {', '.join(passed)}")


if __name__ == "__main__":
    main()
