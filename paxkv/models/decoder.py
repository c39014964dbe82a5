"""The decoder of the Llama family, Gemma included, in Flax NNX: embedding, layers, logits.

Activations run features-first, [feature, token]: with weights kept as files store them, [out, in],
a projection is `w @ x`, which XLA:CPU computes 1.4 times as fast at 24 tokens as `x @ w`.
Where keys and values live is the caller's business: `hidden` hands them to an `attend` function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxkv.models.config import Activation, ModelConfig
from paxkv.models.rope import rotate, rotation

Pages = Any  # the caller's pytree; the decoder only carries it from layer to layer
Attend = Callable[
    [jax.Array, jax.Array, jax.Array, Pages, jax.Array],  # q, k, v, pages, layer
    tuple[jax.Array, Pages],
]


class Projection(nnx.Module):
    """One weight matrix a layer.

    They are not stacked: inside a scan, indexing a stacked weight makes XLA copy the slice first,
    which costs a 30-layer model of 135 M parameters 50 ms a step on a CPU, and would treble the
    weight traffic of a GPU. A branch reads its matrix where it lies.
    """

    def __init__(self, weights: Sequence[jax.Array]):
        self.weights = nnx.List([nnx.Param(weight) for weight in weights])

    def __call__(self, layer: int | jax.Array, x: jax.Array) -> jax.Array:
        """Return weight[layer] @ x for x [in, token]."""
        if isinstance(layer, int):
            return _project(self.weights[layer][...], x)
        branches = [functools.partial(_project, weight[...]) for weight in self.weights]
        return jax.lax.switch(layer, branches, x)


class Decoder(nnx.Module):
    """A decoder-only transformer; a plain tree, so that `nnx.split` gives it as one state.

    Attributes:
        embedding: [vocab, hidden].
        qkv: The q, k and v rows one under another, [(heads + 2 kv_heads) * head_dim, hidden].
        out: [hidden, heads * head_dim].
        gate_up: The gate rows over the up rows, [2 * intermediate, hidden].
        down: [hidden, intermediate].
        attention_norm, feed_forward_norm: [layer, hidden], of what goes into either half.
        attention_out_norm, feed_forward_out_norm: [layer, hidden], of what comes out, or None.
        qkv_bias: [layer, rows of qkv], or None.
        q_norm, k_norm: [layer, head_dim], or None.
        final_norm: [hidden].
        head: [vocab, hidden], or None where the embedding is used.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: jax.Array,
        qkv: Projection,
        out: Projection,
        gate_up: Projection,
        down: Projection,
        attention_norm: jax.Array,
        feed_forward_norm: jax.Array,
        final_norm: jax.Array,
        head: jax.Array | None = None,
        qkv_bias: jax.Array | None = None,
        q_norm: jax.Array | None = None,
        k_norm: jax.Array | None = None,
        attention_out_norm: jax.Array | None = None,
        feed_forward_out_norm: jax.Array | None = None,
    ):
        self.config = config
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.embedding = nnx.Param(embedding)
        self.attention_norm = nnx.Param(attention_norm)
        self.feed_forward_norm = nnx.Param(feed_forward_norm)
        self.final_norm = nnx.Param(final_norm)
        self.head = _optional(head)
        self.qkv_bias = _optional(qkv_bias)
        self.q_norm, self.k_norm = _optional(q_norm), _optional(k_norm)
        self.attention_out_norm = _optional(attention_out_norm)
        self.feed_forward_out_norm = _optional(feed_forward_out_norm)

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        pages: Pages,
        attend: Attend,
        *,
        unroll: bool = False,
    ) -> tuple[jax.Array, Pages]:
        """Run all layers over a flat list of tokens.

        Args:
            tokens: i32 [token], of any mix of sequences.
            positions: i32 [token], each token's place in its own sequence.
            pages: Carried through the layers; give the jitted caller's donated argument.
            attend: Stores k and v [token, kv_head, dim] in the pages and attends with
                q [token, head, dim]; returns [token, head, dim] and the new pages. Its last
                argument is the layer, a traced i32 scalar.
            unroll: Repeat the layers in the program instead of scanning over them: longer to
                compile; for a GPU, where branching on the layer would wait for the host.

        Returns:
            The last layer's output before the final norm, [token, hidden]; and the pages.
        """
        config = self.config
        turn = self._rotations(positions)
        activate = _ACTIVATIONS[config.activation]

        def run_layer(carry, layer):
            x, pages = carry
            h = _rms_norm(x, self.attention_norm[layer], config.rms_norm_eps)
            q, k, v = self._heads(layer, h, *turn(layer))
            attended, pages = attend(q, k, v, pages, jnp.int32(layer))
            h = self.out(layer, attended.reshape(attended.shape[0], -1).T.astype(x.dtype))
            x = x + self._out_norm(self.attention_out_norm, layer, h)
            h = _rms_norm(x, self.feed_forward_norm[layer], config.rms_norm_eps)
            gate, up = jnp.split(self.gate_up(layer, h), 2)
            h = self.down(layer, activate(gate) * up)
            x = x + self._out_norm(self.feed_forward_out_norm, layer, h)
            return (x, pages), None

        x = self.embedding[tokens].T
        if config.embedding_scale is not None:
            x = x * config.embedding_scale
        carry = (x, pages)
        if unroll:
            attend = jax.jit(attend)  # traced and lowered once, called by each layer
            for layer in range(config.num_layers):
                carry, _ = run_layer(carry, layer)
        else:
            layers = jnp.arange(config.num_layers, dtype=jnp.int32)
            carry, _ = jax.lax.scan(run_layer, carry, layers)
        x, pages = carry
        return x.T, pages

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return f32 logits [n, vocab] of rows of `hidden` [n, hidden]; applies norm and cap."""
        x = _rms_norm(hidden.T, self.final_norm[...], self.config.rms_norm_eps)
        head = self.embedding if self.head is None else self.head
        # Without the barrier XLA folds the transposition into the product, x.T @ head.T, which a
        # CPU computes half as fast at 16 rows.
        logits = jax.lax.optimization_barrier(_project(head[...], x, jnp.float32)).T
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _rotations(
        self, positions: jax.Array
    ) -> Callable[[int | jax.Array], tuple[jax.Array, jax.Array]]:
        """Return what gives a layer's cos and sin, each [dim // 2, token]."""
        config = self.config
        shared = rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        if config.local_rope_theta is None or not any(config.local_rope_layers):
            return lambda layer: shared
        local = rotation(positions, config.head_dim, config.local_rope_theta, None)
        stacked = jnp.stack([jnp.stack(shared), jnp.stack(local)])
        which = jnp.array(config.local_rope_layers, jnp.int32)

        def turn(layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
            cos, sin = stacked[which[layer]]
            return cos, sin

        return turn

    def _out_norm(
        self, weight: nnx.Param | None, layer: int | jax.Array, h: jax.Array
    ) -> jax.Array:
        """Normalise a half's output [hidden, token] where the model does."""
        return h if weight is None else _rms_norm(h, weight[layer], self.config.rms_norm_eps)

    def _heads(
        self, layer: int | jax.Array, h: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project [hidden, token] to rotated q, k and to v, each [token, its heads, dim]."""
        config = self.config
        qkv = self.qkv(layer, h)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[layer][:, None]
        qkv = qkv.reshape(-1, config.head_dim, qkv.shape[-1])
        q, k, v = jnp.split(qkv, [config.num_heads, config.num_heads + config.num_kv_heads])
        if self.q_norm is not None and self.k_norm is not None:
            q = _rms_norm(q, self.q_norm[layer], config.rms_norm_eps, axis=1)
            k = _rms_norm(k, self.k_norm[layer], config.rms_norm_eps, axis=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.transpose(2, 0, 1), k.transpose(2, 0, 1), v.transpose(2, 0, 1)


_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _optional(array: jax.Array | None) -> nnx.Param | None:
    return None if array is None else nnx.Param(array)


def _project(
    weight: jax.Array, x: jax.Array, out_dtype: jnp.dtype | type | None = None
) -> jax.Array:
    # A GPU would otherwise round float32 operands to TF32, which changes greedy tokens.
    return jnp.matmul(
        weight, x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out_dtype
    )


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float, axis: int = 0) -> jax.Array:
    """Normalise over the feature axis in float32, then scale by weight [feature] in its dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, [i for i in range(x.ndim) if i != axis])
    return (wide.astype(weight.dtype) * weight).astype(x.dtype)
