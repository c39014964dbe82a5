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
        dtype: Of weights and activations: float32, bfloat16 or float16. Norm weights that are
            stored less 1 are kept in float32.

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
    tensors = _Tensors(config, source, jnp.dtype(dtype))
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    with ThreadPoolExecutor() as threads:  # dequantising is NumPy, which frees the interpreter
        embedding = threads.submit(lambda: tensors.put(tensors.read(EMBEDDING, *table)))
        layers = threads.map(tensors.matrices, range(config.num_layers))
        qkv, out, gate_up, down = zip(*layers, strict=True)
    return Decoder(
        config,
        embedding=embedding.result(),
        qkv=Projection(qkv),
        out=Projection(out),
        gate_up=Projection(gate_up),
        down=Projection(down),
        final_norm=tensors.put_norm(tensors.read("model.norm.weight", hidden)),
        head=None if config.tie_embeddings else tensors.put(tensors.read(HEAD, *table)),
        qkv_bias=tensors.bias() if config.attention_bias else None,
        **tensors.norms(),
    )


class _Tensors:
    """Reads a source's tensors, checks their shapes and puts them on the device."""

    def __init__(self, config: ModelConfig, source: TensorSource, dtype: np.dtype):
        self._config, self._source, self._dtype = config, source, dtype
        self._query = config.num_heads * config.head_dim
        self._key = config.num_kv_heads * config.head_dim

    def read(self, name: str, *shape: int) -> np.ndarray:
        if not self._source.has(name):
            raise ConfigError(f"model: {self._source.description} has no tensor {name!r}.")
        tensor = self._source.read(name)
        if tensor.shape != shape:
            raise ConfigError(
                f"model: tensor {name!r} in {self._source.description} has shape {tensor.shape}; "
                f"its config asks for {shape}."
            )
        return tensor

    def put(self, tensor: np.ndarray) -> jax.Array:
        return jnp.asarray(tensor.astype(self._dtype, copy=False))

    def put_norm(self, tensor: np.ndarray) -> jax.Array:
        if not self._config.norm_offset:
            return self.put(tensor)
        # In bfloat16 the sum would lose what the stored w has below 1 / 256.
        return jnp.asarray(1 + tensor.astype(np.float32))

    def matrices(self, layer: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return a layer's q, k, v rows; its output; its gate and up rows; its down matrix."""
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        prefix = f"model.layers.{layer}"
        qkv = [
            self.read(f"{prefix}.self_attn.q_proj.weight", self._query, hidden),
            self.read(f"{prefix}.self_attn.k_proj.weight", self._key, hidden),
            self.read(f"{prefix}.self_attn.v_proj.weight", self._key, hidden),
        ]
        gate_up = [
            self.read(f"{prefix}.mlp.gate_proj.weight", inner, hidden),
            self.read(f"{prefix}.mlp.up_proj.weight", inner, hidden),
        ]
        return (
            self.put(np.concatenate(qkv)),
            self.put(self.read(f"{prefix}.self_attn.o_proj.weight", hidden, self._query)),
            self.put(np.concatenate(gate_up)),
            self.put(self.read(f"{prefix}.mlp.down_proj.weight", hidden, inner)),
        )

    def norms(self) -> dict[str, jax.Array]:
        """Return the norm weights of all layers, `[layer, feature]`, under the decoder's names."""
        hidden, head_dim = self._config.hidden_size, self._config.head_dim
        names = {"attention_norm": ("input_layernorm", hidden)}
        # One name, two meanings: in Llama the norm of what goes into the second half of a layer, in
        # Gemma that of what comes out of the first.
        if self._config.post_norms:
            names |= {
                "attention_out_norm": ("post_attention_layernorm", hidden),
                "feed_forward_norm": ("pre_feedforward_layernorm", hidden),
                "feed_forward_out_norm": ("post_feedforward_layernorm", hidden),
            }
        else:
            names["feed_forward_norm"] = ("post_attention_layernorm", hidden)
        if self._config.qk_norm:
            names |= {
                "q_norm": ("self_attn.q_norm", head_dim),
                "k_norm": ("self_attn.k_norm", head_dim),
            }
        return {
            name: self.put_norm(self._all_layers(f"{stored}.weight", size))
            for name, (stored, size) in names.items()
        }

    def bias(self) -> jax.Array:
        """Return the biases of q, k and v, `[layer, rows of qkv]`."""
        sizes = {"q": self._query, "k": self._key, "v": self._key}
        parts = [self._all_layers(f"self_attn.{p}_proj.bias", size) for p, size in sizes.items()]
        return self.put(np.concatenate(parts, axis=1))

    def _all_layers(self, suffix: str, size: int) -> np.ndarray:
        names = [f"model.layers.{layer}.{suffix}" for layer in range(self._config.num_layers)]
        return np.stack([self.read(name, size) for name in names])


def check_dtype(dtype: str) -> None:
    """Raise ConfigError unless weights can be kept in that dtype."""
    if dtype not in COMPUTE_DTYPES:
        raise ConfigError(
            f"model.dtype={dtype}: weights are kept in one of {', '.join(COMPUTE_DTYPES)}. "
            "Try model.dtype=float32."
        )
