"""How much of the KV cache is wasted, and how many requests run at once, by memory policy.

    python -m experiments.kv_waste.run
    python -m experiments.kv_waste.run --trace AzureLLMInferenceTrace_conv.csv --num-requests 19366

No model: lengths are those of the trace, time is linear in the tokens of a step. See README.md.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.shared.azure import EXCERPT, TraceRow, prompt, read_trace
from experiments.shared.executor import END_TOKEN, LinearTimeExecutor
from experiments.shared.serve import Served, serve
from experiments.shared.tables import markdown, percent
from paxkv.engine.state import SchedulerConfig
from paxkv.policies.admission import Expected, FirstChunk, FullPrompt, Guaranteed
from paxkv.policies.allocator import ContiguousMax, ContiguousOracle, ContiguousPow2, Paged
from paxkv.policies.schedule import Continuous, Static
from paxkv.workload.request import Request

OUTPUT_LIMIT = 1024
"""What requests ask for where their output is not known; the trace's longest is 1,000 tokens."""

NO_WATERMARK = FullPrompt(watermark=0.0)
"""For requests that never grow: a watermark would only keep blocks from them."""

COLUMNS = (
    "unwritten places of held blocks",
    "external fragmentation",
    "pool that holds tokens",
    "requests at once",
    "requests/s",
    "median TTFT, s",
    "preemptions a minute",
    "recompute tax",
)


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Attributes:
        name: The words that choose it on the command line of `paxkv.run`.
        changes: What it changes in `SchedulerConfig`.
        block_size: Tokens a block; the pool's tokens stay the same.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    block_size: int = 16


ALLOCATORS = (
    *(
        Case(f"allocator={name}", {"allocator": policy, "admission": NO_WATERMARK})
        for name, policy in (
            ("contiguous_max", ContiguousMax()),
            ("contiguous_pow2", ContiguousPow2()),
            ("contiguous_oracle", ContiguousOracle()),
        )
    ),
    Case("allocator=paged, block_size=8", {"allocator": Paged()}, 8),
    Case("allocator=paged, block_size=16", {"allocator": Paged()}, 16),
    Case("allocator=paged, block_size=32", {"allocator": Paged()}, 32),
    Case("allocator=paged, block_size=64", {"allocator": Paged()}, 64),
)
ARRIVING = tuple(case for case in ALLOCATORS if case.block_size == 16)
BATCHING = (
    Case("schedule=static", {"schedule": Static(), "admission": Guaranteed()}),
    Case("schedule=continuous", {"schedule": Continuous(), "admission": Guaranteed()}),
)
ADMISSIONS = (
    Case("admit=guaranteed", {"admission": Guaranteed()}),
    Case("admit=expected", {"admission": Expected()}),
    Case("admit=full_prompt", {"admission": FullPrompt()}),
    Case("admit=first_chunk", {"admission": FirstChunk()}),
)


def config_of(case: Case, options: argparse.Namespace) -> SchedulerConfig:
    """Return the engine of a case; all have a pool of equally many tokens."""
    values: dict[str, Any] = {
        "block_size": case.block_size,
        "num_blocks": options.pool_tokens // case.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": 2048,
        "max_model_len": options.max_model_len,
        "vocab_size": 10,
        "eos_token_ids": (END_TOKEN,),
        "prefix_caching": False,
    }
    return SchedulerConfig(**(values | case.changes))


def known_outputs(rows: Sequence[TraceRow], speed_up: float | None) -> list[Request]:
    """Return requests whose limit is their output; all at once where there is no `speed_up`."""
    return [
        Request(
            request_id=str(place),
            prompt_token_ids=prompt(row),
            max_tokens=row.output_tokens,
            arrival_s=row.arrival_s / speed_up if speed_up else 0.0,
            ignore_eos=True,
        )
        for place, row in enumerate(rows)
    ]


def unknown_outputs(rows: Sequence[TraceRow]) -> tuple[list[Request], LinearTimeExecutor]:
    """Return requests that all have one limit, and an executor that ends them as the trace does."""
    requests = [
        Request(
            request_id=str(place),
            prompt_token_ids=prompt(row),
            max_tokens=OUTPUT_LIMIT,
            seed=place,
        )
        for place, row in enumerate(rows)
    ]
    lengths = {place: row.output_tokens for place, row in enumerate(rows)}
    return requests, LinearTimeExecutor(output_lens=lengths)


def cells(name: str, served: Served, base: Served) -> list[str]:
    """Return a row of a table; factors are of the first row."""
    cache, preempt = served.full_cache or {}, served.summary["preempt"]
    running, of, rate = (
        served.mean_running(),
        base.mean_running(),
        served.summary["request_throughput"],
    )
    return [
        name,
        percent(cache.get("internal_fragmentation_mean")),
        percent(cache.get("external_fragmentation_mean")),
        percent(served.mean_written()),
        "–" if running is None or of is None else f"{running:.1f} ({running / of:.2f} ×)",
        f"{rate:.2f} ({rate / base.summary['request_throughput']:.2f} ×)",
        f"{served.summary['median_ttft_ms'] / 1e3:.1f}",
        f"{preempt['preemptions_per_min']:.1f}",
        percent(preempt["recompute_tax"]),
    ]


def measure(
    title: str, cases: Sequence[Case], run: Callable[[Case], Served], first: str
) -> dict[str, Served]:
    """Run and print one table; returns the runs by name."""
    found = {case.name: run(case) for case in cases}
    base = found[cases[0].name]
    rows = [cells(name, served, base) for name, served in found.items()]
    print(f"\n{title}\n\n{markdown((first, *COLUMNS), rows)}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="CSV; default: the excerpt")
    parser.add_argument("--num-requests", type=int, default=200, help="the first of the trace")
    parser.add_argument("--pool-tokens", type=int, default=40_960, help="a multiple of 64")
    parser.add_argument("--max-model-len", type=int, default=8192, help="longer ones are left out")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="rows: never the bottleneck")
    parser.add_argument("--speed-up", type=float, default=2.0, help="of the trace's arrivals")
    options = parser.parse_args(arguments)
    if options.pool_tokens % 64 or options.pool_tokens < options.max_model_len:
        parser.error(
            f"--pool-tokens={options.pool_tokens}: must be a multiple of 64 and hold a request of "
            f"--max-model-len={options.max_model_len}. Try --pool-tokens=40960."
        )
    rows = read_trace(options.trace)[: options.num_requests]
    rows = [row for row in rows if row.prompt_tokens + row.output_tokens <= options.max_model_len]
    print(
        f"{len(rows)} requests of {options.trace.name}, pool of {options.pool_tokens:,} tokens, "
        f"at most {options.max_model_len:,} a request"
    )

    def known(case: Case, speed_up: float | None) -> Served:
        return serve(config_of(case, options), known_outputs(rows, speed_up), LinearTimeExecutor())

    def unknown(case: Case) -> Served:
        return serve(config_of(case, options), *unknown_outputs(rows))

    at_once = "All requests wait from the start"
    measure(f"{at_once}.", ALLOCATORS, lambda case: known(case, None), "memory")
    measure(
        f"Requests arrive as in the trace, {options.speed_up:g} times as fast.",
        ARRIVING,
        lambda case: known(case, options.speed_up),
        "memory",
    )
    measure(f"{at_once}; paged.", BATCHING, lambda case: known(case, None), "batching")
    measure(
        f"{at_once}; paged; outputs end by themselves, limit {OUTPUT_LIMIT}.",
        ADMISSIONS,
        unknown,
        "admission",
    )


if __name__ == "__main__":
    main()
