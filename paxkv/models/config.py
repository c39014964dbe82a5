"""What a decoder is: one frozen description, whatever file it was read from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paxkv.errors import ConfigError
from paxkv.models.rope import RopeScaling, scaling_from_hf

Activation = Literal["silu", "gelu_tanh"]
SUPPORTED_GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer of the Llama family, Gemma included.

    Attributes:
        intermediate_size: Width of the gated feed-forward layer.
        rope_scaling: None where frequencies are used as trained.
        local_rope_theta: Base of the layers that `local_rope_layers` names, whose frequencies are
            used as trained (Gemma 3); None where all layers turn alike.
        local_rope_layers: Whether each layer turns by the local base; empty: none does. Layers turn
            as they were trained, whatever window is imposed on them later.
        tie_embeddings: The output matrix is the embedding.
        max_model_len: Longest sequence (prompt and output), tokens, any RoPE scaling included.
        eos_token_ids: Tokens that end an output; may be empty.
        attention_bias: q, k and v projections add a bias (Qwen2).
        qk_norm: q and k are normalised head by head before RoPE (Qwen3, Gemma 3).
        layer_windows: Tokens that each layer attends to, the query's own included; None is all.
            Empty: every layer attends to all.
        attention_scale: Multiplies attention scores; None is `head_dim ** -0.5`.
        attention_soft_cap: Attention scores become `cap * tanh(scores / cap)` (Gemma 2).
        final_soft_cap: The same for output logits (Gemma 2).
        activation: Of the gate of the feed-forward layer; `gelu_tanh` is GELU's tanh form.
        embedding_scale: Multiplies embeddings on the way in (Gemma); None is 1.
        post_norms: The outputs of attention and feed-forward are normalised too (Gemma).
        norm_offset: Norm weights are stored less 1 (Gemma).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    local_rope_layers: tuple[bool, ...] = ()
    rms_norm_eps: float
    tie_embeddings: bool
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    activation: Activation = "silu"
    embedding_scale: float | None = None
    post_norms: bool = False
    norm_offset: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model: {self.num_heads} attention heads with {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise ConfigError(f"model: head_dim={self.head_dim}; RoPE needs an even number.")
        for field in ("layer_windows", "local_rope_layers"):
            count = len(getattr(self, field))
            if count not in (0, self.num_layers):
                raise ConfigError(
                    f"model: {field} has {count} entries for {self.num_layers} layers; it needs "
                    "one a layer, or none."
                )
        for window in self.layer_windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ConfigError(
                    f"model: layer_windows has {window!r}; a window is a whole number of tokens "
                    "from 1, or null for all."
                )
        if any(self.local_rope_layers) and self.local_rope_theta is None:
            raise ConfigError("model: local_rope_layers needs local_rope_theta, its base.")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer in tokens, the query's own included; None is all."""
        return self.layer_windows or (None,) * self.num_layers


def from_gguf(metadata: Mapping[str, Any], *, tie_embeddings: bool) -> ModelConfig:
    """Read the key-value part of a GGUF file.

    Args:
        metadata: Keys as GGUF names them, values as plain Python.
        tie_embeddings: The file has no `output.weight`; GGUF has no key for it.

    Raises:
        ConfigError: Another architecture than Llama's, a scaling that is unknown, a missing key.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
        raise ConfigError(
            f"model: the GGUF file has general.architecture={architecture!r}; supported are "
            f"{', '.join(SUPPORTED_GGUF_ARCHITECTURES)}. Choose another with model.path=FILE."
        )

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"model: the GGUF file lacks the key {architecture}.{key}.")
        if isinstance(value, list):
            raise ConfigError(
                f"model: the GGUF file has {architecture}.{key}={value}, a value for each layer; "
                "only models whose layers are alike are supported. Choose another with "
                "model.path=FILE."
            )
        return value

    heads, hidden = int(read("attention.head_count")), int(read("embedding_length"))
    head_dim = int(read("attention.key_length", hidden // heads))
    if int(read("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError(
            f"model: the GGUF file rotates {read('rope.dimension_count')} of {head_dim} head "
            "dimensions (llama.rope.dimension_count); only all of them is supported."
        )
    length = int(read("context_length"))
    kind = read("rope.scaling.type", "none")
    rope = None
    if kind != "none":
        rope = {
            "rope_type": kind,
            "factor": read("rope.scaling.factor"),
            "original_max_position_embeddings": read(
                "rope.scaling.original_context_length", length
            ),
        }
    scaling = scaling_from_hf(rope, max_position_embeddings=length)
    return ModelConfig(
        vocab_size=int(read("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))),
        hidden_size=hidden,
        num_layers=int(read("block_count")),
        num_heads=heads,
        num_kv_heads=int(read("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(read("feed_forward_length")),
        rope_theta=float(read("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        rms_norm_eps=float(read("attention.layer_norm_rms_epsilon")),
        tie_embeddings=tie_embeddings,
        max_model_len=usable_length(length, scaling),
        eos_token_ids=token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def usable_length(positions: int, scaling: RopeScaling | None) -> int:
    """Return the longest sequence: some files with yarn state the length before stretching."""
    if scaling is None or scaling.kind != "yarn":
        return positions
    return max(positions, int(scaling.factor * scaling.original_max_len))


def token_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return one id, several or none, as model files write them, as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)
