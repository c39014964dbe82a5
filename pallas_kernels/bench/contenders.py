"""What is timed: our implementations, and what JAX itself ships.

A baseline gets its own layout before the clock starts. One that cannot serve a shape says why.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.timing import Arguments
from pallas_kernels.bench.workload import Workload
from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.paged_attention import paged_decode, paged_prefill
from pallas_kernels.pages import KV_DTYPES, KVPages

JAX_TRITON, JAX_CUDNN = "jax-triton", "jax-cudnn"
OURS = "mosaic"
# Calls of a program that are worth waiting for: these take many milliseconds each on a GPU.
_MAX_CALLS = {"xla": 1, "reference": 6}
_GATHERED_BYTES = 16 * 2**30  # most that the reference may gather
# What jax's Triton kernel does by default, which is what its users get.
_TRITON_SPLITS, _TRITON_PAGES = 16, 8


class UnavailableError(Exception):
    """A baseline cannot serve a shape, or is not there; the message says why."""


class Contender(NamedTuple):
    """Something that computes a workload's attention.

    Attributes:
        call: `(operands, arguments, layer) -> output`.
        operands: the pool in the layout it wants.
        max_calls: most calls of a timed program; None is no limit.
        static_layer: `layer` must be a Python int.
    """

    call: Callable[[Any, Arguments, Any], jax.Array]
    operands: Any
    max_calls: int | None = None
    static_layer: bool = False


def contender_names() -> tuple[str, ...]:
    """Everything that is timed on a GPU; our kernels first, then what they are compared with."""
    others = (name for name in IMPLEMENTATIONS if name != OURS)
    return (OURS, JAX_TRITON, JAX_CUDNN, *others)


def default_contenders(dtype: str) -> tuple[str, ...]:
    """What a GPU run times at a KV dtype: the slow forms in XLA in bfloat16 only."""
    names = contender_names()
    return names if dtype == "bfloat16" else tuple(n for n in names if n not in _MAX_CALLS)


def make_contender(name: str, load: Workload) -> Contender:
    """Prepare a contender for a workload.

    Raises:
        UnavailableError: it cannot serve the workload.
    """
    if name == JAX_TRITON:
        return _jax_triton(load)
    if name == JAX_CUDNN:
        return _jax_cudnn(load)
    if name == "reference":
        spec, width = load.spec, load.tables.shape[1] * load.spec.block_size
        gathered = spec.rows * width * spec.kv_heads * spec.dim * 8
        gathered += 4 * spec.rows * (spec.chunk or 1) * spec.heads * width
        if gathered > _GATHERED_BYTES:
            raise UnavailableError(
                f"gathers {gathered / 2**30:.0f} GiB, more than the {_GATHERED_BYTES / 2**30:.0f} "
                "it is allowed"
            )
    return Contender(_our_call(name, load), load.pages, _MAX_CALLS.get(name))


def arguments_of(load: Workload) -> Arguments:
    """The small arguments of a workload's op, by name."""
    arguments = {"q": load.q, "block_tables": load.tables, "context_lens": load.lens}
    if load.spec.chunk is not None:
        arguments["query_lens"] = load.query_lens
    return arguments


def _our_call(name: str, load: Workload) -> Callable[[Any, Arguments, Any], jax.Array]:
    spec = load.spec
    op = paged_decode if spec.chunk is None else paged_prefill
    options = {
        "window": spec.window,
        "num_sink_tokens": spec.num_sink_tokens,
        "soft_cap": spec.soft_cap,
        "implementation": name,
    }

    def call(pages: KVPages, arguments: Arguments, layer: Any) -> jax.Array:
        return op(pages=pages, layer=layer, **arguments, **options)

    return call


def _jax_triton(load: Workload) -> Contender:
    """The deprecated Pallas Triton kernel; wants `[kv_head, page, page_size, dim]`."""
    spec, pages = load.spec, load.pages
    if spec.chunk is not None:
        raise UnavailableError("decodes only")
    if spec.window is not None:
        raise UnavailableError("has no window")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    except ImportError as error:
        raise UnavailableError(f"not in jax {jax.__version__}: {error}") from error
    layers = pages.num_layers

    def heads_first(leaf: jax.Array | None) -> jax.Array | None:
        if leaf is None:
            return None
        flat = leaf.reshape(-1, *leaf.shape[2:])  # page = block * layers + layer
        return flat.swapaxes(0, 1)

    def codes(leaf: jax.Array) -> jax.Array:
        storage = KV_DTYPES[load.dtype]
        if not storage.stored_as_bytes:
            return leaf
        return jax.lax.bitcast_convert_type(leaf, storage.dtype)

    operands = jax.jit(
        lambda p: (
            heads_first(codes(p.k)),
            heads_first(codes(p.v)),
            heads_first(p.k_scale),
            heads_first(p.v_scale),
        )
    )(pages)
    multiple = _TRITON_SPLITS * _TRITON_PAGES

    def call(operands: Any, arguments: Arguments, layer: Any) -> jax.Array:
        k, v, k_scale, v_scale = operands
        tables = arguments["block_tables"] * layers + layer
        tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % multiple)))
        q = arguments["q"]
        return module.paged_attention(
            (q * spec.dim**-0.5).astype(q.dtype),
            k,
            v,
            tables,
            arguments["context_lens"],
            k_scale,
            v_scale,
            pages_per_compute_block=_TRITON_PAGES,
            k_splits=_TRITON_SPLITS,
            attn_logits_soft_cap=spec.soft_cap,
        )

    return Contender(call, operands)


def _jax_cudnn(load: Workload) -> Contender:
    """CuDNN's paged attention through jax's private module; wants a pool of each layer's own."""
    spec, pages = load.spec, load.pages
    if load.dtype not in ("float16", "bfloat16") or load.q.dtype != pages.k.dtype:
        raise UnavailableError(f"has no {load.dtype} KV")
    if spec.chunk is not None:
        raise UnavailableError("aligns its causal mask to the first key: no chunk over a context")
    if spec.window is not None:
        raise UnavailableError("has windows with a causal mask only")
    if spec.soft_cap is not None:
        raise UnavailableError("has no soft cap")
    rows, width = load.tables.shape
    if rows * width != pages.num_blocks:
        raise UnavailableError(
            f"wants rows × table width = {rows * width} pages in the pool, here {pages.num_blocks}"
        )
    try:
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        attention, padding = module.paged_attention, module.MaskType.PADDING
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"not in jax {jax.__version__}: {error}") from error
    split = jax.jit(
        lambda p: tuple((p.k[:, layer], p.v[:, layer]) for layer in range(p.num_layers))
    )

    def call(operands: Any, arguments: Arguments, layer: Any) -> jax.Array:
        k, v = operands[layer]  # [page, kv_head, page_size, dim]
        tables = arguments["block_tables"][:, None, :, None]
        out = attention(
            arguments["q"][:, :, None],  # [row, head, 1, dim]
            k,
            v,
            jnp.ones(rows, jnp.int32),
            arguments["context_lens"],
            tables,
            tables,
            scale=spec.dim**-0.5,
            mask_type=padding,
            qkv_layout="BNTH",
        )
        return out[:, :, 0]

    return Contender(call, split(pages), static_layer=True)
