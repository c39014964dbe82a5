"""Join the partial outputs of a decode: the last step of split-KV attention, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.mosaic.work_plan import WorkPlan, WorkSharing

_UNROLL = 4  # partials whose loads are in flight together


def combine(
    out: jax.Array, lse: jax.Array, sharing: WorkSharing, plan: WorkPlan, *, dtype: np.dtype
) -> jax.Array:
    """Join partial outputs, each normalised, by their log-sum-exp.

    Args:
        out: float32 `[slot, dim, heads]`.
        lse: float32 `[slot, heads]`, in units of log2.
        sharing: how the work was cut.
        plan: for these lengths; the two say which slots belong to which output.
        dtype: of the result.

    Returns:
        `[row * kv_head, dim, heads]`; zeros where an output has no slots.
    """
    _, dim, heads = out.shape
    num_outputs = sharing.rows * sharing.kv_heads
    layout = plgpu.Layout.WGMMA
    by_head = layout.reduce(0)

    def body(plan, out, lse, joined) -> None:
        index = lax.axis_index("output")
        parts = sharing.parts(plan, index)

        def step(nth, state):
            loaded = []
            for ahead in range(_UNROLL):
                wanted = nth * _UNROLL + ahead
                # Past the end: the last one again, without weight.
                at = parts.first + jnp.minimum(wanted, parts.count - 1) * parts.stride
                absent = jnp.where(wanted < parts.count, 0.0, mosaic.MASKED)
                part_lse = plgpu.load(lse.at[at], layout=by_head, optimized=False) + absent
                loaded.append((part_lse, plgpu.load(out.at[at], layout=layout, optimized=False)))
            top, total, acc = state
            for part_lse, part in loaded:
                new_top = jnp.maximum(top, part_lse)
                kept, weight = jnp.exp2(top - new_top), jnp.exp2(part_lse - new_top)
                total = total * kept + weight
                acc = acc * _spread(kept, acc.shape) + part * _spread(weight, acc.shape)
                top = new_top
            return top, total, acc

        state = (
            plgpu.layout_cast(jnp.full((heads,), mosaic.MASKED, jnp.float32), by_head),
            plgpu.layout_cast(jnp.zeros((heads,), jnp.float32), by_head),
            plgpu.layout_cast(jnp.zeros((dim, heads), jnp.float32), layout),
        )
        steps = lax.div(parts.count + (_UNROLL - 1), jnp.int32(_UNROLL))
        _, total, acc = lax.fori_loop(0, steps, step, state)
        total = jnp.where(total > 0, total, 1.0)  # no parts at all: zeros
        joined[index] = (acc / _spread(total, acc.shape)).astype(dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_outputs, dim, heads), dtype),
        grid=(num_outputs,),
        grid_names=("output",),
        kernel_name="combine_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(plan, out, lse)


def _spread(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [1])
