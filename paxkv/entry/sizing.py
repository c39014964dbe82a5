"""How many blocks the pool gets: what was asked for, or what the device's memory holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.pages import MAX_SLOT_ROWS
from paxkv.cache.groups import LayerGroup, most_blocks_of
from paxkv.cache.layout import (
    KVLayout,
    blocks_in_budget,
    blocks_needed,
    gib,
    pool_bytes,
    storage_dtype,
)
from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig

CPU_BUDGET_BYTES = 1 << 30
"""A CPU's memory is shared with everything else: the pool takes no more of it unasked."""

_F32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The size of a pool and where it comes from, in words."""

    num_blocks: int
    reason: str


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the memory of a model's weights, before they are loaded."""
    c = config
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (2 * query + 2 * key + 3 * c.intermediate_size)
    layer += (query + 2 * key) * c.attention_bias
    layer_norms = c.hidden_size * (4 if c.post_norms else 2) + 2 * c.head_dim * c.qk_norm
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    norms = c.num_layers * layer_norms + c.hidden_size
    itemsize = storage_dtype(dtype).itemsize
    norm_bytes = _F32_BYTES if c.norm_offset else itemsize
    return (c.num_layers * layer + embeddings) * itemsize + norms * norm_bytes


def workspace_bytes(config: ModelConfig, *, num_tokens: int, num_rows: int) -> int:
    """Return a bound on a step's temporary memory: activations of tokens, logits of rows."""
    widest = 2 * config.intermediate_size + 4 * config.hidden_size
    return _F32_BYTES * (2 * num_tokens * widest + 3 * num_rows * config.vocab_size)


def attention_bytes(
    config: ModelConfig, layout: KVLayout, *, num_rows: int, max_model_len: int, deterministic: bool
) -> int:
    """Return the temporary memory of `kernel=mosaic` in a decode step."""
    from pallas_kernels.paged_attention.mosaic.decode import partial_bytes  # slow to import

    return partial_bytes(
        rows=num_rows,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        itemsize=storage_dtype(layout.kv_dtype).itemsize,
        max_tokens=blocks_needed(max_model_len, layout.block_size) * layout.block_size,
        deterministic=deterministic,
    )


def size_pool(
    layout: KVLayout,
    groups: Sequence[LayerGroup],
    *,
    chunk_tokens: int,
    num_blocks: int | None,
    memory_bytes: int | None,
    memory_utilization: float,
    device_bytes: int,
    on_cpu: bool,
    reserved_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
) -> PoolSize:
    """Return the size of the pool: as given, else what fits the budget given, else the device.

    Args:
        layout: Of a block.
        groups: The model's layers by what their tokens see.
        chunk_tokens: Most tokens computed in a step.
        num_blocks: The user's number of blocks; None to derive it.
        memory_bytes: The user's budget for the pool; None to derive it.
        memory_utilization: Share of a CPU's available memory to plan with. A GPU's was applied when
            JAX took its memory.
        device_bytes: Memory of the device.
        on_cpu: Whether that memory is shared with everything else on the machine.
        reserved_bytes: Weights and temporary memory of a step.
        max_num_seqs: Most running requests; more blocks than they can hold are of no use.
        max_model_len: Most tokens of a request.
    """
    if num_blocks is not None:
        return PoolSize(num_blocks=num_blocks, reason="cache.num_blocks")
    useful = max_num_seqs * most_blocks_of(groups, max_model_len, layout.block_size, chunk_tokens)
    if memory_bytes is not None:
        budget, reason = memory_bytes, "cache.memory_bytes"
    elif on_cpu:
        budget = max(0, int(memory_utilization * device_bytes) - reserved_bytes)
        reason = f"{memory_utilization:.0%} of the free {gib(device_bytes)}, less the weights"
        if budget > CPU_BUDGET_BYTES:
            budget, reason = CPU_BUDGET_BYTES, "the default on a CPU; cache.memory_bytes changes it"
    else:
        budget = max(0, device_bytes - reserved_bytes)
        reason = f"{gib(device_bytes)} of the device, less weights and workspace"
    fitting = blocks_in_budget(budget, layout)
    if useful < fitting:
        return PoolSize(
            num_blocks=useful, reason=f"all that {max_num_seqs} requests of full length can hold"
        )
    return PoolSize(num_blocks=fitting, reason=reason)


def check_host_memory(host_blocks: int, layout: KVLayout, free_bytes: int) -> None:
    """Refuse a swap space that the host has no memory for.

    Args:
        host_blocks: Blocks set aside for swapped requests.
        layout: Of a block.
        free_bytes: Memory of the host that nothing else of the run takes.

    Raises:
        ConfigError: With both sizes, and the most blocks that fit.
    """
    needed, free_bytes = pool_bytes(host_blocks, layout), max(free_bytes, 0)
    if needed > free_bytes:
        raise ConfigError(
            f"preempt.host_blocks={host_blocks}: swapped requests may take {gib(needed)} of host "
            f"memory, and {gib(free_bytes)} are free. Try "
            f"preempt.host_blocks={blocks_in_budget(free_bytes, layout)}, or preempt=recompute."
        )


def check_index_range(num_blocks: int, layout: KVLayout) -> None:
    """Refuse a pool whose places a 32-bit index cannot tell apart.

    Raises:
        ConfigError: With the largest number of blocks.
    """
    a_block = layout.num_layers * layout.num_kv_heads * layout.block_size
    if num_blocks * a_block >= MAX_SLOT_ROWS:
        most = (MAX_SLOT_ROWS - 1) // a_block
        raise ConfigError(
            f"cache.num_blocks={num_blocks}: blocks × layers × KV heads × block size must stay "
            f"below 2^31, so {most} blocks is the most. Try cache.num_blocks={most}."
        )
