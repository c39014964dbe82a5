"""Builds a decoder from named tensors, whichever file format they come from.

Names are those of Hugging Face checkpoints; a reader of another format translates them.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig
from paxkv.models.decoder import Decoder, Projection

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class TensorSource(Protocol):
    """Where tensors come from; `read` may be called from several threads at once."""

    @property
    def description(self) -> str:
        """The file or folder, for messages."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Return the tensor, [out, in] or [feature], in any floating dtype."""
        ...


def build_decoder(config: ModelConfig, source: TensorSource, dtype: str) -> Decoder:
    """Read every tensor and lay the decoder out, q, k, v and gate, up fused.

    Args:
        config: What the tensors must fit.
        source: Where they come from.
        dtype: Of weights and activations: float32, bfloat16 or float16.

    Raises:
        ConfigError: A tensor is missing or has another shape than the config says.
    """
    check_dtype(dtype)
    if not config.tie_embeddings and not source.has(HEAD):
        raise ConfigError(
            f"model: {source.description} has no tensor {HEAD!r}, but its config has "
            "tie_word_embeddings=false. Set tie_word_embeddings to true there if the output matrix "
            "is the embedding, or use a complete checkpoint."
        )
    target = jnp.dtype(dtype)
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size

    def read(name: str, *shape: int) -> np.ndarray:
        if not source.has(name):
            raise ConfigError(f"model: {source.description} has no tensor {name!r}.")
        tensor = source.read(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"model: tensor {name!r} in {source.description} has shape {tensor.shape}; its "
                f"config asks for {shape}."
            )
        return tensor

    def put(tensor: np.ndarray) -> jax.Array:
        return jnp.asarray(tensor.astype(target, copy=False))

    def matrices(layer: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        prefix = f"model.layers.{layer}"
        qkv = [
            read(f"{prefix}.self_attn.q_proj.weight", query, hidden),
            read(f"{prefix}.self_attn.k_proj.weight", key, hidden),
            read(f"{prefix}.self_attn.v_proj.weight", key, hidden),
        ]
        gate_up = [
            read(f"{prefix}.mlp.gate_proj.weight", inner, hidden),
            read(f"{prefix}.mlp.up_proj.weight", inner, hidden),
        ]
        return (
            put(np.concatenate(qkv)),
            put(read(f"{prefix}.self_attn.o_proj.weight", hidden, query)),
            put(np.concatenate(gate_up)),
            put(read(f"{prefix}.mlp.down_proj.weight", hidden, inner)),
        )

    def vectors(suffix: str, size: int) -> jax.Array:
        names = [f"model.layers.{layer}.{suffix}" for layer in range(config.num_layers)]
        return put(np.stack([read(name, size) for name in names]))

    def bias() -> jax.Array:
        parts = [
            vectors("self_attn.q_proj.bias", query),
            vectors("self_attn.k_proj.bias", key),
            vectors("self_attn.v_proj.bias", key),
        ]
        return jnp.concatenate(parts, axis=1)

    with ThreadPoolExecutor() as threads:  # dequantising is NumPy, which frees the interpreter
        embedding = threads.submit(lambda: put(read(EMBEDDING, config.vocab_size, hidden)))
        qkv, out, gate_up, down = zip(*threads.map(matrices, range(config.num_layers)), strict=True)
    return Decoder(
        config,
        embedding=embedding.result(),
        qkv=Projection(qkv),
        out=Projection(out),
        gate_up=Projection(gate_up),
        down=Projection(down),
        attention_norm=vectors("input_layernorm.weight", hidden),
        feed_forward_norm=vectors("post_attention_layernorm.weight", hidden),
        final_norm=put(read("model.norm.weight", hidden)),
        head=None if config.tie_embeddings else put(read(HEAD, config.vocab_size, hidden)),
        qkv_bias=bias() if config.attention_bias else None,
        q_norm=vectors("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=vectors("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
    )


def check_dtype(dtype: str) -> None:
    """Raise ConfigError unless weights can be kept in that dtype."""
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(
            f"model.dtype={dtype}: weights are kept in one of {', '.join(COMPUTE_DTYPES)}. "
            "Try model.dtype=float32."
        )
