"""The executor that computes real tokens: JAX, a paged pool, host memory for swaps."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from paxkv.cache.attend import PagedAttention
from paxkv.cache.groups import LayerGroup
from paxkv.cache.host import HostSpace
from paxkv.cache.layout import KVLayout
from paxkv.cache.mixed import Cache, block_part, init_cache, with_block_part
from paxkv.cache.scales import StaticScales
from paxkv.cache.store import (
    PIECES,
    copy_blocks,
    swap_in,
    swap_out,
    warm_up,
    warm_up_copies,
)
from paxkv.engine.batch import pad_decodes, pad_prefills
from paxkv.engine.forward import Forward, split_weights
from paxkv.engine.step import RowBatch, StepPlan, StepResult
from paxkv.models.source import LoadedModel

_NO_TOKENS = np.zeros(0, np.int32)


class DeviceExecutor:
    """Carries out plans on one device.

    The pool is donated to each compiled step and updated in place. Every shape is compiled once, on
    its first use, and the time that takes is reported apart from the step's own.

    Args:
        model: Its weights are placed on the device.
        layout: Of a block.
        groups: The model's layers; each group has blocks of its own.
        num_blocks: Size of the pool in device memory.
        host_blocks: Size of the swap space in host memory; 0 allocates none.
        max_blocks: Blocks of a request of the longest allowed length.
        num_rows: Rows of the scheduler's batch; only a layout with keys outside of blocks wants it.
        kv_scales: Static scales of a pool that carries none of its own; None for any other.
        implementation: Attention implementation by name; None picks by device.
        deterministic: See `PagedAttention`.
        device: Where to run; None is JAX's default device.

    Attributes:
        compiled: Each step that was compiled, by kind, shapes and whether it is greedy.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: KVLayout,
        groups: tuple[LayerGroup, ...],
        *,
        num_blocks: int,
        host_blocks: int = 0,
        max_blocks: int,
        num_rows: int = 0,
        kv_scales: StaticScales | None = None,
        implementation: str | None = None,
        deterministic: bool = False,
        device: Any = None,
    ):
        self._device = device or jax.devices()[0]
        weights, merge = split_weights(model.decoder)
        self._weights = jax.device_put(weights, self._device)
        self._max_blocks = max_blocks
        self._forward = Forward(
            merge,
            PagedAttention(
                groups=groups,
                block_size=layout.block_size,
                scale=model.config.attention_scale,
                soft_cap=model.config.attention_soft_cap,
                kv_scales=kv_scales,
                implementation=implementation,
                deterministic=deterministic,
            ),
            unroll=self._device.platform != "cpu",
        )
        with jax.default_device(self._device):
            self._pages = init_cache(num_blocks, layout, num_rows=num_rows, num_groups=len(groups))
        self._host = HostSpace(host_blocks, block_part(self._pages))
        if host_blocks:
            self._move_blocks(warm_up)
        self.compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._compile_s = self._host_s = 0.0  # of the step in progress
        self._num_compiles = 0
        self._copies_compiled = False

    @property
    def pages(self) -> Cache:
        """The pool; valid until the next `execute`, which donates it."""
        return self._pages

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan and wait for its tokens."""
        self._compile_s, self._num_compiles, self._host_s = 0.0, 0, 0.0
        start = time.perf_counter()
        swap_bytes = 0
        for move in plan.swap_outs:
            swap_bytes += swap_out(
                block_part(self._pages), move.block_ids, self._host, move.host_block_ids
            )
        for move in plan.swap_ins:
            self._move_blocks(swap_in, move.block_ids, self._host, move.host_block_ids)
            swap_bytes += len(move.block_ids) * self._host.bytes_per_block
        if plan.swap_ins:
            jax.block_until_ready(self._pages)  # or the copies would count as the step's own time
        swap_s = time.perf_counter() - start
        if plan.copies and not self._copies_compiled:
            self._compile_copies()
        for copy in plan.copies:
            self._move_blocks(copy_blocks, copy.src, copy.dst)
        pending = []
        for kind, rows in (("prefill", plan.prefills), ("decode", plan.decodes)):
            pending.append(self._dispatch(kind, rows) if rows.num_rows else _NO_TOKENS)
        prefill_tokens, decode_tokens = (np.asarray(tokens) for tokens in pending)
        return StepResult(
            prefill_tokens=prefill_tokens[: plan.prefills.num_rows],
            decode_tokens=decode_tokens[: plan.decodes.num_rows],
            duration_s=time.perf_counter() - start - self._compile_s,
            compile_s=self._compile_s,
            num_compiles=self._num_compiles,
            host_s=self._host_s,
            swap_bytes=swap_bytes,
            swap_s=swap_s if swap_bytes else 0.0,
        )

    def _move_blocks(self, move: Callable[..., Any], *arguments: Any) -> None:
        """Replace what the pool holds in blocks by what `move` makes of it."""
        part = move(block_part(self._pages), *arguments)
        self._pages = with_block_part(self._pages, part)

    def _compile_copies(self) -> None:
        """Compile the copies of forks when the first one comes: few runs have any."""
        jax.block_until_ready(self._pages)
        begin = time.perf_counter()
        self._move_blocks(warm_up_copies)
        jax.block_until_ready(self._pages)
        self._compile_s += time.perf_counter() - begin
        self._num_compiles += len(PIECES)
        self._copies_compiled = True

    def _dispatch(self, kind: str, rows: RowBatch) -> jax.Array:
        """Start one batch; returns its tokens `[padded row]`, perhaps not computed yet."""
        begin = time.perf_counter()
        pad, function = {
            "prefill": (pad_prefills, self._forward.prefill),
            "decode": (pad_decodes, self._forward.decode),
        }[kind]
        batch = pad(rows, self._max_blocks)
        arguments = [
            batch.tokens,
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            batch.rows,
        ]
        greedy = rows.sampling.all_greedy
        if not greedy:
            arguments += [batch.temperature, batch.top_p, batch.seed, batch.output_index]
        self._host_s += time.perf_counter() - begin
        key = (kind, batch.tokens.shape, batch.block_tables.shape, greedy)
        step = self.compiled.get(key)
        if step is None:
            step = self.compiled[key] = self._compile(function, arguments)
        self._pages, tokens = step(self._weights, self._pages, *arguments)
        return tokens

    def _compile(self, function: Callable[..., Any], arguments: list[Any]) -> jax.stages.Compiled:
        jax.block_until_ready(self._pages)  # or what was dispatched would run on compile time
        begin = time.perf_counter()
        with jax.default_device(self._device):
            lowered = jax.jit(function, donate_argnums=1).lower(
                self._weights, self._pages, *arguments
            )
            compiled = lowered.compile()
        self._compile_s += time.perf_counter() - begin
        self._num_compiles += 1
        return compiled
