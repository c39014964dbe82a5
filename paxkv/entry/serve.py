"""One run, from its configuration to its last record."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from paxkv.blocks.invariants import check_pool
from paxkv.cache.groups import capacity_tokens
from paxkv.cache.layout import gib, pool_bytes
from paxkv.config import RunConfig, typed
from paxkv.engine.clock import VirtualClock, WallClock
from paxkv.engine.engine import Engine
from paxkv.engine.state import SchedulerState, init_state
from paxkv.entry.header import header, write_reproduce
from paxkv.entry.machine import open_machine
from paxkv.entry.plan import RunPlan, plan_run
from paxkv.errors import PaxkvError
from paxkv.metrics.summary import summarize
from paxkv.quality.calibrate import static_scales
from paxkv.tracking import RunInfo, Status, Tracker, Trackers
from paxkv.tracking.console import ConsoleTracker
from paxkv.tracking.environment import environment
from paxkv.tracking.files import FilesTracker
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.base import num_requests
from paxkv.workload.request import Request


def serve(config: DictConfig) -> float | None:
    """Run a composed configuration: check, load, serve, record.

    Returns:
        Output tokens a second; None if no request completed.

    Raises:
        ConfigError: The configuration cannot work. Before weights load, and with all problems.
        PaxkvError: The run failed; its records are complete up to there and say so.
    """
    settings = typed(config)
    machine = open_machine(settings.device.platform, settings.cache.memory_utilization)
    plan = plan_run(settings, machine)
    collector = MemoryTracker()
    trackers = Trackers([collector, *_trackers(plan)])
    info = _run_info(config, settings, plan)
    trackers.start(info)
    write_reproduce(info.run_dir)
    status: Status = "failed"
    error, engine = "", None
    try:
        engine, requests = _load(settings, plan, trackers)
        engine.run(requests)
        status = "completed"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as caught:
        failure = PaxkvError(_out_of_memory(plan)) if _is_out_of_memory(caught) else caught
        error = str(failure) if isinstance(failure, PaxkvError) else repr(failure)
        if failure is caught:
            raise
        raise failure from caught
    finally:
        summary = summarize(
            collector.requests,
            collector.steps,
            collector.events,
            engine.clock.now() if engine is not None else 0.0,
            plan.parts.slo,
            block_size=plan.layout.block_size,
        )
        trackers.finish(status, summary, error)
        del engine
        gc.collect()  # a sweep's next job needs the device memory of this one
    return summary["output_throughput"]


def _load(
    settings: RunConfig, plan: RunPlan, trackers: Trackers
) -> tuple[Engine, Sequence[Request]]:
    """Load the model and make its requests; the clock of the engine starts on return."""
    model = plan.parts.model.load(plan.dtype, heads=plan.parts.heads)
    limits = replace(model.config, max_model_len=plan.scheduler.max_model_len)
    requests = plan.parts.workload.requests(model.tokenizer, limits, settings.seed)
    num_blocks = plan.scheduler.num_blocks
    executor = plan.parts.executor(
        model,
        plan.layout,
        plan.groups,
        num_blocks=num_blocks,
        host_blocks=plan.scheduler.preemption.host_capacity(num_blocks),
        max_blocks=plan.scheduler.max_blocks,
        num_rows=plan.scheduler.max_num_seqs,
        kv_scales=static_scales(model, plan.parts.kv),
        implementation=plan.kernel.name,
        deterministic=settings.kernel.deterministic,
        device=plan.machine.device,
    )
    engine = Engine(
        state=init_state(plan.scheduler),
        executor=executor,
        clock=VirtualClock() if settings.engine.clock == "virtual" else WallClock(),
        observer=trackers,
        detokenise=model.tokenizer.decode,
        after_step=_check_state if settings.engine.check_invariants else None,
    )
    return engine, requests


def _trackers(plan: RunPlan) -> list[Tracker]:
    """Return the trackers of a run: console and files always, and what `track` names."""
    chosen = plan.parts.track
    files = [] if isinstance(chosen, FilesTracker) else [FilesTracker()]
    return [*files, chosen, ConsoleTracker()]


def _run_info(config: DictConfig, settings: RunConfig, plan: RunPlan) -> RunInfo:
    hydra = HydraConfig.get()
    choices = {
        group: option
        for group, option in hydra.runtime.choices.items()
        if option is not None and not group.startswith("hydra") and group != "local"
    }
    run_dir = Path(hydra.runtime.output_dir)
    return RunInfo(
        run_dir=run_dir,
        name=",".join(hydra.overrides.task) or "default",
        config=cast(
            Mapping[str, Any],
            OmegaConf.to_container(config, resolve=True, throw_on_missing=True),
        ),
        env=environment(device=plan.machine.description, kernel=plan.kernel._asdict()),
        header=header(settings, plan, choices),
        choices=choices,
        num_requests=num_requests(plan.parts.workload),
    )


def _check_state(state: SchedulerState) -> None:
    """Raise InvariantError unless pool, tables, index and eviction order agree."""
    tables = [state.rows.blocks(sequence.row) for sequence in state.running]
    check_pool(state.pool, tables, state.index, state.evictable)
    swapped = [
        sequence.host_block_ids for sequence in state.waiting if sequence.host_block_ids is not None
    ]
    check_pool(state.host_pool, [*swapped, *state.host_release])


def _is_out_of_memory(error: Exception) -> bool:
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or isinstance(error, MemoryError)


def _out_of_memory(plan: RunPlan) -> str:
    blocks, layout = plan.scheduler.num_blocks, plan.layout
    return (
        f"out of memory on {plan.machine.description}: weights take {gib(plan.weights_bytes)}, "
        f"the pool of {blocks} blocks {gib(pool_bytes(blocks, layout))} "
        f"({capacity_tokens(blocks, plan.groups, layout):,} tokens). Try "
        f"cache.num_blocks={blocks // 2}, a lower engine.max_num_batched_tokens or "
        "engine.max_num_seqs, or kv=fp8."
    )
