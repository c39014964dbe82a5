"""What is shown of a run before it starts."""

import json
import shlex
import sys
from pathlib import Path

from paxkv.cache.groups import capacity_tokens, most_blocks_of
from paxkv.cache.layout import gib, pool_bytes
from paxkv.config import RunConfig
from paxkv.entry.conf import conf_dir
from paxkv.entry.plan import RunPlan

REPRODUCE_FILE = "reproduce.sh"
POLICIES = (
    "allocator",
    "window",
    "heads",
    "admit",
    "schedule",
    "preempt",
    "victim",
    "evict",
    "tenants",
)
"""Groups whose options the header names."""
_SHARES = {
    "tensor": "tensor",
    "head": "head",
    "token_head": "token and head",
    "channel": "channel of a block's keys, a token and head of values",
}


def header(config: RunConfig, plan: RunPlan, choices: dict[str, str]) -> dict[str, str]:
    """Return label and text of each line of the header.

    Args:
        config: The configuration.
        plan: What was derived from it.
        choices: The option chosen in each group; empty where a run is replayed.
    """
    layout, scheduler = plan.layout, plan.scheduler
    host_blocks = scheduler.preemption.host_capacity(scheduler.num_blocks)
    lines = {
        "model": f"{_model_name(plan, choices)}, {gib(plan.weights_bytes)} of {plan.dtype} weights",
        "device": plan.machine.description,
        "kernel": f"{plan.kernel.name}: {plan.kernel.reason}"
        + (", deterministic" if config.kernel.deterministic else ""),
        "kv cache": (
            f"{_storage(plan)}, {len(plan.groups) * layout.bytes_per_token:,} bytes a token, "
            f"blocks of {layout.block_size} tokens ({layout.bytes_per_block:,} bytes)"
        ),
        "warning": plan.parts.kv.warning or "",
        "layers": _layers(plan),
        "pool": (
            f"{scheduler.num_blocks:,} blocks, {gib(pool_bytes(scheduler.num_blocks, layout))}: "
            f"{plan.blocks_reason}"
        ),
        "capacity": _capacity(plan),
        "batch": (
            f"at most {scheduler.max_num_seqs} requests and {scheduler.max_num_batched_tokens} "
            f"tokens a step, {config.engine.clock} clock"
        ),
        "policies": _policies(config, plan, choices),
        "workload": f"{choices.get('workload', 'replayed')}, seed {config.seed}",
    }
    if host_blocks:
        size = gib(pool_bytes(host_blocks, layout))
        lines["host memory"] = f"{host_blocks:,} blocks for swapped requests, {size}"
    return {label: text for label, text in lines.items() if text}


def _policies(config: RunConfig, plan: RunPlan, choices: dict[str, str]) -> str:
    """Return each policy by its option, or by its class where a replay does not know the option."""
    names = {g: choices.get(g, type(getattr(plan.parts, g)).__name__) for g in POLICIES}
    names["prefix"] = "on" if config.prefix.enabled else "off"
    return ", ".join(f"{group} {name}" for group, name in names.items())


def _storage(plan: RunPlan) -> str:
    """Return how K and V are stored."""
    kv, layout = plan.parts.kv, plan.layout
    text = layout.kv_dtype
    if kv.quantised:
        text += f" with a scale a {_SHARES[kv.granularity]}"
    if kv.skip_layers:
        text += f", {layout.plain_dtype} in layers {', '.join(map(str, kv.skip_layers))}"
    return text


def _layers(plan: RunPlan) -> str:
    """Return what the layers see, where a window bounds it."""
    if all(group.span.window is None for group in plan.groups):
        return ""
    parts = []
    for span in dict.fromkeys(group.span for group in plan.groups):
        groups = [group for group in plan.groups if group.span == span]
        count = sum(len(group.layers) for group in groups)
        seen = "all tokens" if span.window is None else f"the last {span.window:,} tokens"
        sinks = f" and the first {span.num_sink_tokens}" if span.num_sink_tokens else ""
        parts.append(f"{count} see {seen}{sinks}")
    return ", ".join(parts) + f"; {len(plan.groups)} block tables a request"


def _capacity(plan: RunPlan) -> str:
    scheduler, length = plan.scheduler, plan.scheduler.max_model_len
    blocks = most_blocks_of(plan.groups, length, scheduler.block_size, scheduler.live_chunk_tokens)
    requests = f"{scheduler.num_blocks / blocks:.1f} requests of {length:,} tokens"
    if any(group.span.window is not None for group in plan.groups):
        return f"{requests}, at most {blocks:,} blocks each"
    tokens = capacity_tokens(scheduler.num_blocks, plan.groups, plan.layout)
    return f"{tokens:,} tokens: {requests}"


def _model_name(plan: RunPlan, choices: dict[str, str]) -> str:
    path = getattr(plan.parts.model, "path", None)
    return Path(path).name if path else choices.get("model", type(plan.parts.model).__name__)


def write_reproduce(run_dir: Path) -> None:
    """Write the script that runs the same configuration again, into a folder of its own."""
    # What Hydra keeps of a run lacks its own settings: folders, log, callbacks.
    search = f"hydra.searchpath={json.dumps([f'file://{conf_dir()}'])}"
    line = [
        shlex.quote(sys.executable),
        "-m paxkv.run --config-path",
        shlex.quote(str(run_dir / ".hydra")),
        f"--config-name config {shlex.quote(search)} +hydra=default",
    ]
    (run_dir / REPRODUCE_FILE).write_text(
        "#!/bin/sh\n# Runs this run's configuration again; more overrides may follow.\n"
        f'cd {shlex.quote(str(Path.cwd()))} && exec {" ".join(line)} "$@"\n'
    )
