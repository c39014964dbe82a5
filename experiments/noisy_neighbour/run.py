"""What a burst of long requests does to a chat that shares the cache, and what prevents it.

    python -m experiments.noisy_neighbour.run

The engine without a model, time linear in the tokens of a step, 10 seeds. See README.md. Exits 1
where a reservation does not keep the bound that is stated there.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.shared.executor import LinearTimeExecutor
from experiments.shared.serve import Served, serve
from experiments.shared.tables import markdown
from paxkv.engine.state import SchedulerConfig
from paxkv.metrics.records import RequestRecord
from paxkv.metrics.summary import summarize
from paxkv.models.tokenizer import ByteTokenizer
from paxkv.policies.schedule import Continuous
from paxkv.policies.tenancy import TenantsFile
from paxkv.policies.victim import Priority
from paxkv.workload.arrivals import AllAtOnce, Poisson
from paxkv.workload.lengths import LogNormal, Uniform
from paxkv.workload.mix import Mix
from paxkv.workload.random_tokens import RandomTokens
from paxkv.workload.request import Request

HERE = Path(__file__).parent
RESERVATION, SMALL, LIMIT = (HERE / f"{name}.yaml" for name in ("tenants", "small", "limit"))
BATCH_PROMPT, BATCH_OUTPUT = Uniform(600, 1400), Uniform(100, 300)
BUDGET = 512
CLOCK = LinearTimeExecutor()
COLUMNS = (
    "",
    "chat TTFT p50 / p99, ms",
    "chat end to end p50 / p99, ms",
    "chat preempted",
    "batch output tokens/s",
    "batch preempted",
)


@dataclass(frozen=True, eq=False)
class Case:
    """One line of the table.

    Attributes:
        name: The words that choose it on the command line of `paxkv.run`.
        tenants: File of the terms; None for none.
        changes: What it changes in `SchedulerConfig` besides.
        with_batch: Whether the neighbour is there.
        bounded: Whether it must keep the bound.
    """

    name: str
    tenants: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    with_batch: bool = True
    bounded: bool = False


ALONE = Case("chat alone", with_batch=False)
CASES = (
    ALONE,
    Case("tenants=none"),
    Case("batch limit 60 %", LIMIT),
    Case("chat reservation 40 %", RESERVATION, bounded=True),
    Case("chat reservation 10 %", SMALL),
    Case(
        "the same, schedule.policy=priority victim=priority",
        SMALL,
        {"schedule": Continuous(policy="priority"), "victim": Priority()},
    ),
    Case("the same, schedule.policy=vtc", SMALL, {"schedule": Continuous(policy="vtc")}),
)


class Outcome(NamedTuple):
    """What a case did with one seed.

    Attributes:
        chat_p99_ttft_s: 99th percentile of the chat's times to first token.
        batch_tokens_per_s: Output tokens of the batch until its last one; None without it.
    """

    served: Served
    chat: tuple[RequestRecord, ...]
    chat_p99_ttft_s: float
    batch_tokens_per_s: float | None


def make_requests(options: argparse.Namespace, config: SchedulerConfig, seed: int) -> list[Request]:
    """Return the requests of both tenants; those of the chat are the same without the batch."""
    chat = RandomTokens(
        num_requests=options.chat,
        prompt_len=LogNormal(100.0, 0.6, 16, 400),
        output_len=LogNormal(60.0, 0.5, 8, 200),
        arrivals=Poisson(4.0),
    )
    batch = RandomTokens(
        num_requests=options.batch,
        prompt_len=BATCH_PROMPT,
        output_len=BATCH_OUTPUT,
        arrivals=AllAtOnce(),
    )
    mix = Mix(parts={"chat": chat, "batch": batch})
    return mix.requests(ByteTokenizer(), config, seed)


def config_of(case: Case, num_blocks: int) -> SchedulerConfig:
    """Return the engine of a case."""
    values: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": num_blocks,
        "max_num_seqs": 32,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 2048,
        "vocab_size": 1000,
    }
    if case.tenants is not None:
        values["tenants"] = TenantsFile(path=str(case.tenants)).resolve(num_blocks)
    return SchedulerConfig(**(values | case.changes))


def run(case: Case, options: argparse.Namespace, seed: int) -> Outcome:
    """Serve one seed."""
    config = config_of(case, options.num_blocks)
    requests = make_requests(options, config, seed)
    if not case.with_batch:
        requests = [request for request in requests if request.tenant == "chat"]
    served = serve(config, requests, CLOCK)
    chat = tuple(record for record in served.requests if record.tenant == "chat")
    batch = [record for record in served.requests if record.tenant == "batch"]
    ends = [record.finish_s for record in batch if record.finish_s is not None]
    return Outcome(
        served=served,
        chat=chat,
        chat_p99_ttft_s=latencies(chat)["p99_ttft_ms"] / 1e3,
        batch_tokens_per_s=sum(r.output_tokens for r in batch) / max(ends) if ends else None,
    )


def latencies(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the latencies of records, in ms, as a run's summary defines them."""
    return summarize(records, (), (), 0.0, block_size=16)


def full_step_s(rows: int) -> float:
    """Return the time of the longest step: the whole token budget, and every row generating."""
    return CLOCK.step_s + CLOCK.prefill_token_s * BUDGET + CLOCK.decode_row_s * rows


def allowed_delay_s() -> float:
    """Return by how much a neighbour may move a first token of a tenant with a reservation.

    Memory does not delay it, but steps are shared: it waits for the step under way, for the rest of
    one context of the neighbour, which is computed in chunks of the whole budget, and for the steps
    in which it starts and ends its own prompt.
    """
    longest_context = BATCH_PROMPT.high + BATCH_OUTPUT.high  # what a preempted one computes again
    steps = 1 + math.ceil(longest_context / BUDGET) + 2
    return steps * full_step_s(rows=32)


def row(case: Case, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the line of a case; latencies are of the chat requests of all seeds together."""
    found = latencies([record for outcome in outcomes for record in outcome.chat])
    rates = [o.batch_tokens_per_s for o in outcomes if o.batch_tokens_per_s is not None]
    preempted = {
        tenant: sum(
            record.num_preemptions
            for outcome in outcomes
            for record in outcome.served.requests
            if record.tenant == tenant
        )
        for tenant in ("chat", "batch")
    }
    return [
        case.name,
        f"{found['median_ttft_ms']:,.0f} / {found['p99_ttft_ms']:,.0f}",
        f"{found['median_e2el_ms']:,.0f} / {found['p99_e2el_ms']:,.0f}",
        str(preempted["chat"]),
        f"{sum(rates) / len(rates):.0f}" if rates else "–",
        str(preempted["batch"]) if case.with_batch else "–",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the bound; exits 1 where a reservation does not keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 0")
    parser.add_argument("--chat", type=int, default=30, help="requests, 4 a second")
    parser.add_argument("--batch", type=int, default=16, help="requests, all at the start")
    parser.add_argument("--num-blocks", type=int, default=480, help="of 16 tokens, in the pool")
    options = parser.parse_args(arguments)
    found = {case: [run(case, options, seed) for seed in range(options.seeds)] for case in CASES}
    print(f"{options.seeds} seeds, {options.num_blocks} blocks of 16 tokens\n")
    print(markdown(COLUMNS, [row(case, outcomes) for case, outcomes in found.items()]))

    allowed_s, broken = allowed_delay_s(), []
    print(f"\nbound: p99 TTFT of chat at most {1e3 * allowed_s:.0f} ms above alone, each seed")
    for case, outcomes in found.items():
        delays = [
            ours.chat_p99_ttft_s - alone.chat_p99_ttft_s
            for ours, alone in zip(outcomes, found[ALONE], strict=True)
        ]
        kept = sum(delay <= allowed_s for delay in delays)
        print(
            f"{case.name}: {1e3 * min(delays):,.0f} to {1e3 * max(delays):,.0f} ms above, "
            f"kept by {kept} of {options.seeds} seeds"
        )
        if case.bounded and kept < options.seeds:
            broken.append(case.name)
    if broken:
        sys.exit(f"bound broken: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
