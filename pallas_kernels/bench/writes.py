"""Device time of `write_kv`: a layer's new tokens into a large pool, in place."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.sweep import FAILED, UNSUPPORTED, first_line
from pallas_kernels.bench.table import LEFT_OUT, Clock, Record, Settings
from pallas_kernels.bench.timing import measure
from pallas_kernels.bench.workload import token_bytes
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention.roofline import H200
from pallas_kernels.paged_attention.specs import GPU_SPECS
from pallas_kernels.pages import KVPages, init_pages

_SHAPE = GPU_SPECS["llama8b-decode-64x4k"]  # only its heads and blocks
_LAYERS = 8
_CALLS = 200
_SECONDS_NEEDED = 6.0


def time_writes(
    num_tokens: int, dtype: str, names: Sequence[str], settings: Settings, clock: Clock
) -> Iterator[Record]:
    """Time the writing of some tokens of a Llama-3.1-8B layer; one record each.

    A program makes many calls, each on the pool that the one before returned, the layers in turn.
    K and V stay in the L2 cache, as they do in a model, which has just computed them. Bytes are
    those of K and V in bfloat16, read, and of codes and scales, written.

    Args:
        num_tokens: new tokens of a call, at random slots.
        dtype: storage dtype of the pool.
        names: implementations.
        settings: as for the table.
        clock: the time budget.
    """
    moved = num_tokens * (token_bytes(_SHAPE, dtype) + token_bytes(_SHAPE, "bfloat16"))
    blank = Record(
        spec=f"llama8b-write-{num_tokens}",
        op="write",
        dtype=dtype,
        contender="",
        status=LEFT_OUT,
        calls=_CALLS,
        layers=_LAYERS,
        bytes=moved,
        paper_s=moved / H200.copy_bytes_per_s + H200.launch_s,
    )
    for name in names:
        line = dataclasses.replace(blank, contender=name)
        if clock.left() < _SECONDS_NEEDED:
            yield dataclasses.replace(line, reason="the time budget is spent")
        elif (name, "write", dtype) in settings.failed:
            reason = f"write of {dtype} failed the correctness sweep"
            yield dataclasses.replace(line, status=FAILED, reason=reason)
        else:
            yield _time(line, num_tokens, settings)


def _time(line: Record, num_tokens: int, settings: Settings) -> Record:
    num_blocks = 2 * -(-num_tokens // _SHAPE.block_size) + 64
    rng = np.random.default_rng(0)
    shape = (2, num_tokens, _SHAPE.kv_heads, _SHAPE.dim)
    k, v = jnp.asarray(rng.standard_normal(shape, dtype=np.float32), jnp.bfloat16)
    slots = rng.permutation(num_blocks * _SHAPE.block_size)[:num_tokens].astype(np.int32)
    pages = init_pages(
        num_blocks, _LAYERS, _SHAPE.kv_heads, _SHAPE.block_size, _SHAPE.dim, line.dtype
    )
    inputs = (k, v, jnp.asarray(slots))
    try:
        program = jax.jit(functools.partial(_write_often, line.contender), donate_argnums=0)
        compiled = program.lower(pages, inputs).compile()
        state = [jax.block_until_ready(compiled(pages, inputs))]

        def run() -> Any:
            state.append(compiled(state.pop(), inputs))  # the pool is donated to the next run
            return state[0]

        timing = measure(run, _CALLS, settings.seconds)
    except UnsupportedError as error:
        return dataclasses.replace(line, status=UNSUPPORTED, reason=str(error).splitlines()[0])
    except Exception as error:  # one that fails must not end the run
        return dataclasses.replace(line, status=FAILED, reason=first_line(error))
    return line.timed(timing, settings.copy_rate)


def _write_often(
    implementation: str, pages: KVPages, inputs: tuple[jax.Array, jax.Array, jax.Array]
) -> KVPages:
    def one(i: jax.Array, pages: KVPages) -> KVPages:
        # Tied to the pool, or XLA would quantise once for all calls.
        (k, v, slots), pages = jax.lax.optimization_barrier((inputs, pages))
        layer = jax.lax.rem(i, jnp.int32(_LAYERS))
        return write_kv(k, v, pages, slots, layer=layer, implementation=implementation)

    return jax.lax.fori_loop(0, _CALLS, one, pages)
