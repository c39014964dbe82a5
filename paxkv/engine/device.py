"""The executor that computes real tokens: JAX, a paged pool, host memory for swaps."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import KVPages, init_pages, paged_decode, paged_prefill, write_kv
from paxkv.cache.host import HostSpace
from paxkv.cache.layout import KVLayout
from paxkv.cache.store import swap_in, swap_out, warm_up
from paxkv.engine import sampler
from paxkv.engine.batch import PaddedBatch, group_prefills, pad_decodes
from paxkv.engine.step import StepPlan, StepResult
from paxkv.models.decoder import stack_layers
from paxkv.models.source import LoadedModel


class DeviceExecutor:
    """Carries out plans on one device.

    The pool is donated to each compiled step and updated in place. Every shape is compiled once, on
    its first use, and the time that takes is reported apart from the step's own.

    Args:
        model: Its weights are placed on the device.
        layout: Of a block.
        num_blocks: Size of the pool in device memory.
        host_blocks: Size of the swap space in host memory; 0 allocates none.
        max_blocks: Blocks of a request of the longest allowed length.
        implementation: Attention implementation by name; None picks by device.
        device: Where to run; None is JAX's default device.

    Attributes:
        compiled: Each step that was compiled, by kind, shapes and whether it is greedy.
    """

    def __init__(
        self,
        model: LoadedModel,
        layout: KVLayout,
        *,
        num_blocks: int,
        host_blocks: int = 0,
        max_blocks: int,
        implementation: str | None = None,
        device: Any = None,
    ):
        self._device = device or jax.devices()[0]
        on_gpu = self._device.platform == "gpu"
        decoder = stack_layers(model.decoder) if on_gpu else model.decoder
        graph, state = nnx.split(decoder)
        # A flat list: flattening the nested state costs more than the scheduler may, every step.
        leaves, tree = jax.tree.flatten(state)
        self._weights = jax.device_put(leaves, self._device)
        self._block_size = layout.block_size
        self._max_blocks = max_blocks
        self._implementation = implementation
        self._merge = lambda weights: nnx.merge(graph, jax.tree.unflatten(tree, weights))
        with jax.default_device(self._device):
            self._pages = init_pages(
                num_blocks,
                layout.num_layers,
                layout.num_kv_heads,
                layout.block_size,
                layout.head_dim,
                layout.kv_dtype,
            )
        self._host = HostSpace(host_blocks, self._pages)
        if host_blocks:
            self._pages = warm_up(self._pages)
        self.compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}
        self._compile_s = 0.0
        self._num_compiles = 0

    @property
    def pages(self) -> KVPages:
        """The pool; valid until the next `execute`, which donates it."""
        return self._pages

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan and wait for its tokens."""
        self._compile_s, self._num_compiles = 0.0, 0
        start = time.perf_counter()
        swap_bytes = 0
        for move in plan.swap_outs:
            swap_bytes += swap_out(self._pages, move.block_ids, self._host, move.host_block_ids)
        for move in plan.swap_ins:
            self._pages = swap_in(self._pages, move.block_ids, self._host, move.host_block_ids)
            swap_bytes += len(move.block_ids) * self._host.bytes_per_block
        host = -time.perf_counter()
        batches = group_prefills(plan.prefills, self._max_blocks)
        if plan.decodes.num_rows:
            decodes = pad_decodes(plan.decodes, self._max_blocks)
        host += time.perf_counter()

        greedy = plan.prefills.sampling.all_greedy
        prefilled = [(batch, self._run("prefill", batch, greedy)) for batch in batches]
        decode_tokens = np.zeros(0, np.int32)
        if plan.decodes.num_rows:
            pending = self._run("decode", decodes, plan.decodes.sampling.all_greedy)
            decode_tokens = np.asarray(pending)[: plan.decodes.num_rows]
        prefill_tokens = np.zeros(plan.prefills.num_rows, np.int32)
        for batch, pending in prefilled:
            prefill_tokens[batch.places] = np.asarray(pending)[: len(batch.places)]
        return StepResult(
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            duration_s=time.perf_counter() - start - self._compile_s,
            compile_s=self._compile_s,
            num_compiles=self._num_compiles,
            host_s=host,
            swap_bytes=swap_bytes,
        )

    def _run(self, kind: str, batch: PaddedBatch, greedy: bool) -> jax.Array:
        """Dispatch one batch; returns its tokens, perhaps not computed yet."""
        arguments = (
            batch.tokens,
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            *(() if greedy else (batch.temperature, batch.top_p, batch.seed, batch.output_index)),
        )
        key = (kind, batch.tokens.shape, batch.block_tables.shape, greedy)
        step = self.compiled.get(key)
        if step is None:
            jax.block_until_ready(self._pages)  # or earlier steps would run on compile time
            begin = time.perf_counter()
            function = {"prefill": self._prefill, "decode": self._decode}[kind]
            jitted = jax.jit(function, donate_argnums=1)
            with jax.default_device(self._device):
                step = jitted.lower(self._weights, self._pages, *arguments).compile()
            self.compiled[key] = step
            self._compile_s += time.perf_counter() - begin
            self._num_compiles += 1
        self._pages, tokens = step(self._weights, self._pages, *arguments)
        return tokens

    def _decode(
        self,
        weights: list[jax.Array],
        pages: KVPages,
        tokens: jax.Array,
        query_lens: jax.Array,
        context_lens: jax.Array,
        block_tables: jax.Array,
        *sampling: jax.Array,
    ) -> tuple[KVPages, jax.Array]:
        """One token a row: write its K and V, attend, draw the next token."""
        del query_lens  # 1, or 0 for padding, which context_lens says as well
        decoder = self._merge(weights)
        positions = context_lens - 1
        slots = self._slots(block_tables, positions[:, None], context_lens[:, None] > 0)[:, 0]

        def attend(q, k, v, pages, layer):
            pages = write_kv(k, v, pages, slots, layer=layer, implementation=self._implementation)
            attended = paged_decode(
                q,
                pages,
                block_tables,
                context_lens,
                layer=layer,
                implementation=self._implementation,
            )
            return attended, pages

        hidden, pages = decoder.hidden(tokens[:, 0], jnp.maximum(positions, 0), pages, attend)
        return pages, self._draw(decoder.logits(hidden), sampling)

    def _prefill(
        self,
        weights: list[jax.Array],
        pages: KVPages,
        tokens: jax.Array,
        query_lens: jax.Array,
        context_lens: jax.Array,
        block_tables: jax.Array,
        *sampling: jax.Array,
    ) -> tuple[KVPages, jax.Array]:
        """A chunk a row: write its K and V, attend causally, draw the token after its last one."""
        decoder = self._merge(weights)
        rows, chunk = tokens.shape
        column = jnp.arange(chunk, dtype=jnp.int32)
        positions = (context_lens - query_lens)[:, None] + column
        slots = self._slots(block_tables, positions, column < query_lens[:, None]).reshape(-1)

        def attend(q, k, v, pages, layer):
            pages = write_kv(k, v, pages, slots, layer=layer, implementation=self._implementation)
            attended = paged_prefill(
                q.reshape(rows, chunk, *q.shape[1:]),
                pages,
                block_tables,
                context_lens,
                query_lens,
                layer=layer,
                implementation=self._implementation,
            )
            return attended.reshape(q.shape), pages

        hidden, pages = decoder.hidden(tokens.reshape(-1), positions.reshape(-1), pages, attend)
        last = hidden.reshape(rows, chunk, -1)[jnp.arange(rows), jnp.maximum(query_lens - 1, 0)]
        return pages, self._draw(decoder.logits(last), sampling)

    def _slots(self, block_tables: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
        """Return where each token's K and V go, `[row, token]`; -1 where there is no token."""
        place = jnp.clip(positions // self._block_size, 0, block_tables.shape[1] - 1)
        blocks = jnp.take_along_axis(block_tables, place, axis=1)
        return jnp.where(valid, blocks * self._block_size + positions % self._block_size, -1)

    def _draw(self, logits: jax.Array, sampling: tuple[jax.Array, ...]) -> jax.Array:
        return sampler.sample(logits, *sampling) if sampling else sampler.greedy(logits)
