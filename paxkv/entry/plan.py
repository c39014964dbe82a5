"""Checks a whole configuration before weights load, and works out the sizes of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels import (
    IMPLEMENTATIONS,
    AttentionSizes,
    Choice,
    choose_implementation,
    device_kind,
)
from pallas_kernels.limits import why_not_mosaic_for, why_not_mosaic_on
from paxkv.cache.groups import (
    LayerGroup,
    Span,
    check_capacity,
    group_layers,
    live_chunk_tokens,
    longest_that_fits,
)
from paxkv.cache.layout import KVLayout, pool_bytes
from paxkv.config import Parts, RunConfig, collecting, make_parts
from paxkv.engine.state import SchedulerConfig
from paxkv.entry.combinations import why_not_together
from paxkv.entry.machine import Machine
from paxkv.entry.sizing import (
    attention_bytes,
    check_host_memory,
    check_index_range,
    size_pool,
    weights_bytes,
    workspace_bytes,
)
from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig
from paxkv.models.weights import COMPUTE_DTYPES
from paxkv.policies.tenancy import NO_TENANTS
from paxkv.policies.window import LayerView

DEFAULT_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 256
CLOCKS = ("wall", "virtual")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A configuration that can work, with everything derived from it.

    Attributes:
        model_config: Of the model, whose weights are not loaded yet, with its KV heads changed.
        dtype: Of weights and activations.
        groups: The model's layers by what their tokens see.
        blocks_reason: Why the pool has this many blocks.
        weights_bytes: Memory that the weights will take.
    """

    parts: Parts
    machine: Machine
    model_config: ModelConfig
    dtype: str
    kernel: Choice
    layout: KVLayout
    groups: tuple[LayerGroup, ...]
    scheduler: SchedulerConfig
    blocks_reason: str
    weights_bytes: int


def plan_run(config: RunConfig, machine: Machine) -> RunPlan:
    """Check a configuration and size the run.

    Raises:
        ConfigError: Everything that is wrong, each problem with its key and what to change.
    """
    problems = _section_problems(config)
    parts, model = None, None
    groups: tuple[LayerGroup, ...] = ()
    problems += _kernel_problems(config.kernel, machine)
    with collecting(problems):
        parts = make_parts(config)
    if parts is not None:
        problems += _file_problems(parts)
        with collecting(problems):
            model = parts.heads.config(parts.model.describe_config())
    if parts is not None and model is not None:
        problems += _length_problems(config.engine.max_model_len, model)
        with collecting(problems):
            groups = _groups(parts, model)
            problems += why_not_together(parts, groups, prefix_caching=config.prefix.enabled)
    if problems or parts is None or model is None:
        raise ConfigError(problems)
    return _size(config, machine, parts, model, groups)


def _size(
    config: RunConfig,
    machine: Machine,
    parts: Parts,
    model: ModelConfig,
    groups: tuple[LayerGroup, ...],
) -> RunPlan:
    engine, cache = config.engine, config.cache
    dtype = _dtype(engine.dtype, machine)
    layout = parts.kv.layout(
        dtype,
        groups,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=DEFAULT_BLOCK_SIZE if cache.block_size == "auto" else cache.block_size,
    )
    max_model_len = model.max_model_len
    if isinstance(engine.max_model_len, int):
        max_model_len = engine.max_model_len
    kernel = _kernel(config.kernel.implementation, machine, layout, model, dtype)
    weights = weights_bytes(model, dtype)
    workspace = workspace_bytes(
        model, num_tokens=engine.max_num_batched_tokens, num_rows=engine.max_num_seqs
    ) + layout.open_bytes(num_rows=engine.max_num_seqs, num_groups=len(groups))
    chunk_tokens = live_chunk_tokens(
        engine.max_num_batched_tokens,
        layout.block_size,
        open_block_in_row=layout.open_dtype is not None,
    )
    if kernel.name == "mosaic":
        workspace += attention_bytes(
            model,
            layout,
            num_rows=engine.max_num_seqs,
            max_model_len=max_model_len,
            deterministic=config.kernel.deterministic,
        )
    size = size_pool(
        layout,
        groups,
        chunk_tokens=chunk_tokens,
        num_blocks=cache.num_blocks,
        memory_bytes=cache.memory_bytes,
        memory_utilization=cache.memory_utilization,
        device_bytes=machine.memory_bytes,
        on_cpu=machine.platform == "cpu",
        reserved_bytes=weights + workspace,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
    )
    if engine.max_model_len == "auto":
        fits = longest_that_fits(
            size.num_blocks, groups, layout.block_size, chunk_tokens, at_most=max_model_len
        )
        max_model_len = max(1, fits)
    problems: list[str] = []
    with collecting(problems):
        check_capacity(
            size.num_blocks,
            groups,
            layout,
            chunk_tokens=chunk_tokens,
            max_model_len=max_model_len,
        )
    tenants = NO_TENANTS
    with collecting(problems):
        tenants = parts.tenants.resolve(size.num_blocks)
    with collecting(problems):
        check_index_range(size.num_blocks, layout)
    host_blocks = parts.preempt.host_capacity(size.num_blocks)
    taken = pool_bytes(size.num_blocks, layout) + weights if machine.platform == "cpu" else 0
    with collecting(problems):
        check_host_memory(host_blocks, layout, machine.host_memory_bytes - taken)
    if problems:
        raise ConfigError(problems)
    scheduler = SchedulerConfig(
        block_size=layout.block_size,
        num_blocks=size.num_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        groups=groups,
        bytes_per_block=layout.bytes_per_block,
        prefix_caching=config.prefix.enabled,
        open_block_in_row=layout.open_dtype is not None,
        max_preemptions=engine.max_preemptions,
        allocator=parts.allocator,
        admission=parts.admit,
        schedule=parts.schedule,
        preemption=parts.preempt,
        victim=parts.victim,
        eviction=parts.evict,
        tenants=tenants,
    )
    return RunPlan(
        parts=parts,
        machine=machine,
        model_config=model,
        dtype=dtype,
        kernel=kernel,
        layout=layout,
        groups=groups,
        scheduler=scheduler,
        blocks_reason=size.reason,
        weights_bytes=weights,
    )


def _section_problems(config: RunConfig) -> list[str]:
    """Return what is wrong with single values of the typed sections."""
    engine, cache = config.engine, config.cache
    problems = []

    def require(ok: bool, key: str, value: Any, rule: str, example: object) -> None:
        if not ok:
            problems.append(f"{key}={value}: must be {rule}. Try {key}={example}.")

    for key, value, example in (
        ("engine.max_num_seqs", engine.max_num_seqs, 64),
        ("engine.max_num_batched_tokens", engine.max_num_batched_tokens, 512),
        ("engine.max_preemptions", engine.max_preemptions, 8),
        ("cache.num_blocks", cache.num_blocks, "null"),
        ("cache.memory_bytes", cache.memory_bytes, "null"),
    ):
        require(value is None or value >= 1, key, value, "1 or more", example)
    length = engine.max_model_len
    require(
        length in (None, "auto") or (_is_int(length) and length >= 1),
        "engine.max_model_len",
        length,
        "a number of tokens, 1 or more, or null (the model's), or auto (what the pool holds)",
        "null",
    )
    block = cache.block_size
    require(
        block == "auto"
        or (_is_int(block) and 1 <= block <= MAX_BLOCK_SIZE and block & (block - 1) == 0),
        "cache.block_size",
        block,
        f"a power of two from 1 to {MAX_BLOCK_SIZE}, or auto",
        DEFAULT_BLOCK_SIZE,
    )
    share = cache.memory_utilization
    require(0 < share <= 1, "cache.memory_utilization", share, "above 0 and at most 1", 0.9)
    names = ("auto", *COMPUTE_DTYPES)
    require(engine.dtype in names, "engine.dtype", engine.dtype, f"one of {_or(names)}", "auto")
    require(engine.clock in CLOCKS, "engine.clock", engine.clock, _or(CLOCKS), "wall")
    require(0 <= config.seed < 2**32, "seed", config.seed, "0 or more, below 2^32", 0)
    require(
        isinstance(config.prefix.enabled, bool),
        "prefix.enabled",
        config.prefix.enabled,
        "true or false",
        "true",
    )
    return problems


def _length_problems(length: Any, model: ModelConfig) -> list[str]:
    if _is_int(length) and length > model.max_model_len:
        return [
            f"engine.max_model_len={length}: the model was made for at most {model.max_model_len} "
            "tokens. Try engine.max_model_len=null."
        ]
    return []


def _file_problems(parts: Parts) -> list[str]:
    """Return what is wrong with the files that parts read: found before weights load."""
    problems = parts.tenants.problems()
    path = getattr(parts.workload, "path", None)
    if path is not None and not Path(path).is_file():
        problems.append(
            f"workload.path={path}: there is no such file. Try workload.path=FILE.jsonl."
        )
    return problems


def _groups(parts: Parts, model: ModelConfig) -> tuple[LayerGroup, ...]:
    """Return the groups of layers that the model has under the window policy."""
    spans = [
        parts.window.choose(LayerView(layer=layer, num_layers=model.num_layers, window=window))
        for layer, window in enumerate(model.windows)
    ]
    wrong = [span for span in spans if not isinstance(span, Span)]
    if wrong:
        raise ConfigError(
            f"window: {type(parts.window).__name__} answered {wrong[0]!r}; a window policy answers "
            "with a Span for each layer."
        )
    return group_layers(spans)


def _kernel_problems(kernel: Any, machine: Machine) -> list[str]:
    """Return what is wrong with the kernel group, whatever the model."""
    name, problems = kernel.implementation, []
    if name is not None and name not in IMPLEMENTATIONS:
        problems.append(
            f"kernel.implementation={name}: there is {_or(IMPLEMENTATIONS)}. Try kernel=auto."
        )
    if name == "mosaic":
        reason = why_not_mosaic_on(device_kind(machine.device))
        if reason is not None:
            problems.append(f"kernel=mosaic: {reason}. Try kernel=auto.")
    if not isinstance(kernel.deterministic, bool):
        problems.append(
            f"kernel.deterministic={kernel.deterministic}: must be true or false. "
            "Try kernel.deterministic=false."
        )
    return problems


def _kernel(
    name: str | None, machine: Machine, layout: KVLayout, model: ModelConfig, dtype: str
) -> Choice:
    """Choose the attention implementation of a run, or check the one asked for."""
    # Skipped layers have a pool of their own: what one of the two cannot, the run cannot.
    pools = [(layout.kv_dtype, layout.quantised and not layout.scaled)]
    pools += [(layout.plain_dtype, False)] if layout.plain_dtype is not None else []
    sizes = [
        AttentionSizes(
            kv_dtype=kv_dtype,
            q_dtype=dtype,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            group=model.num_heads // model.num_kv_heads,
            kv_heads=model.num_kv_heads,
            static_scales=static_scales,
            channel_keys=layout.open_dtype is not None,
        )
        for kv_dtype, static_scales in pools
    ]
    if name is None:
        choices = [choose_implementation(device_kind(machine.device), pool) for pool in sizes]
        return next((choice for choice in choices if choice.name != "mosaic"), choices[0])
    reasons = [why_not_mosaic_for(pool) for pool in sizes] if name == "mosaic" else []
    for reason in reasons:
        if reason is not None:
            raise ConfigError(f"kernel=mosaic: {reason}. Try kernel=auto, or kernel=xla.")
    return Choice(name, "as asked")


def _dtype(name: str, machine: Machine) -> str:
    if name != "auto":
        return name
    return "float32" if machine.platform == "cpu" else "bfloat16"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
