"""How much of a step is the host's: scheduling, batch building and committing 256 decoding rows.

    python experiments/host_speed/scheduler.py [--rows 256] [--steps 400]

Prints the median and 99th percentile in µs of each part; the executor returns fixed tokens at once,
so nothing else is in the figures.
"""

import argparse
import time

import numpy as np

from paxkv.engine import scheduler
from paxkv.engine.batch import pad_decodes, pad_prefills
from paxkv.engine.state import SchedulerConfig, init_state
from paxkv.engine.step import StepPlan, StepResult
from paxkv.workload.request import Request


def build_batches(plan: StepPlan, max_blocks: int) -> None:
    """Do what the device executor does on the host."""
    if plan.prefills.num_rows:
        pad_prefills(plan.prefills, max_blocks)
    if plan.decodes.num_rows:
        pad_decodes(plan.decodes, max_blocks)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=400, help="measured steps")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the pool")
    options = parser.parse_args()

    config = SchedulerConfig(
        block_size=16,
        num_blocks=options.blocks,
        max_num_seqs=options.rows,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        vocab_size=50_000,
        eos_token_ids=(2,),
    )
    state = init_state(config)
    rng = np.random.default_rng(0)
    for place in range(options.rows):
        prompt = tuple(rng.integers(3, 50_000, int(rng.integers(16, 700))).tolist())
        request = Request(request_id=str(place), prompt_token_ids=prompt, max_tokens=1300)
        scheduler.submit(state, request, 0.0)
    max_blocks = config.max_blocks
    times: dict[str, list[float]] = {"schedule": [], "build batch": [], "commit": [], "all": []}
    while len(times["all"]) < options.steps:
        begin = time.perf_counter()
        plan = scheduler.schedule(state, 0.0)
        scheduled = time.perf_counter()
        build_batches(plan, max_blocks)
        built = time.perf_counter()
        result = StepResult(
            prefill_tokens=rng.integers(3, 50_000, plan.prefills.num_rows, np.int32),
            decode_tokens=rng.integers(3, 50_000, plan.decodes.num_rows, np.int32),
            duration_s=0.0,
        )
        executed = time.perf_counter()
        scheduler.commit(state, plan, result, 0.0)
        end = time.perf_counter()
        if plan.decodes.num_rows == options.rows:
            parts = (scheduled - begin, built - scheduled, end - executed)
            for name, value in zip(times, (*parts, sum(parts)), strict=True):
                times[name].append(value * 1e6)
    print(f"{options.rows} decoding rows, {options.blocks} blocks, {options.steps} steps")
    for name, values in times.items():
        median, tail = np.median(values), np.percentile(values, 99)
        print(f"{name:12} median {median:7.0f} µs   p99 {tail:7.0f} µs")


if __name__ == "__main__":
    main()
