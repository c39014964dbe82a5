"""What a decoder is: one frozen description, whatever file it was read from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paxkv.errors import ConfigError
from paxkv.models.rope import RopeScaling, scaling_from_hf

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer of the Llama family.

    Attributes:
        intermediate_size: Width of the gated feed-forward layer.
        rope_scaling: None where frequencies are used as trained.
        tie_embeddings: The output matrix is the embedding.
        max_model_len: Longest sequence (prompt and output), tokens, any RoPE scaling included.
        eos_token_ids: Tokens that end an output; may be empty.
        attention_bias: q, k and v projections add a bias (Qwen2).
        qk_norm: q and k are normalised head by head before RoPE (Qwen3).
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
    rms_norm_eps: float
    tie_embeddings: bool
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model: {self.num_heads} attention heads with {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise ConfigError(f"model: head_dim={self.head_dim}; RoPE needs an even number.")


def from_hf(given: Mapping[str, Any], *, eos_token_ids: Sequence[int] | None = None) -> ModelConfig:
    """Read a Hugging Face `config.json`, of transformers 4 or 5.

    Args:
        given: The parsed file.
        eos_token_ids: End tokens of `generation_config.json`, which win over those of the config.

    Raises:
        ConfigError: An architecture or an option that the decoder does not compute, by name.
    """
    problems = _hf_problems(given)
    if problems:
        raise ConfigError(problems)
    heads = int(given["num_attention_heads"])
    hidden = int(given["hidden_size"])
    positions = int(given["max_position_embeddings"])
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    theta = (rope or {}).get("rope_theta") or given.get("rope_theta") or 10000.0
    scaling = scaling_from_hf(rope, max_position_embeddings=positions)
    if eos_token_ids is None:
        eos_token_ids = token_ids(given.get("eos_token_id"))
    return ModelConfig(
        vocab_size=int(given["vocab_size"]),
        hidden_size=hidden,
        num_layers=int(given["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(given.get("num_key_value_heads") or heads),
        head_dim=int(given.get("head_dim") or hidden // heads),
        intermediate_size=int(given["intermediate_size"]),
        rope_theta=float(theta),
        rope_scaling=scaling,
        rms_norm_eps=float(given["rms_norm_eps"]),
        tie_embeddings=bool(given.get("tie_word_embeddings", False)),
        max_model_len=_usable_length(positions, scaling),
        eos_token_ids=tuple(eos_token_ids),
        bos_token_id=given.get("bos_token_id"),
        attention_bias=given["model_type"] == "qwen2",
        qk_norm=given["model_type"] == "qwen3",
    )


def _hf_problems(given: Mapping[str, Any]) -> list[str]:
    model_type = given.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        return [
            f"model.path: config.json has model_type={model_type!r}; supported are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}. Choose another folder with model.path=DIR."
        ]
    needed = (
        "num_attention_heads",
        "hidden_size",
        "max_position_embeddings",
        "vocab_size",
        "num_hidden_layers",
        "intermediate_size",
        "rms_norm_eps",
    )
    lacking = [key for key in needed if given.get(key) is None]
    problems = [f"model.path: config.json lacks {key!r}." for key in lacking]
    activation = given.get("hidden_act", "silu")
    if activation != "silu":
        problems.append(f"model.path: config.json has hidden_act={activation!r}; only 'silu' is.")
    unsupported = [key for key in ("attention_bias", "mlp_bias") if given.get(key)]
    if _uses_window(given):
        unsupported.append("sliding_window")
    if (given.get("partial_rotary_factor") or 1.0) != 1.0:
        unsupported.append("partial_rotary_factor")
    if given.get("quantization_config"):
        unsupported.append("quantization_config")
    problems += [
        f"model.path: config.json has {key}={given[key]!r}, which the decoder does not compute. "
        "Choose another folder with model.path=DIR."
        for key in unsupported
    ]
    return problems


def _uses_window(given: Mapping[str, Any]) -> bool:
    if given.get("sliding_window") is None:
        return False
    return bool(given.get("use_sliding_window", given["model_type"] == "mistral"))


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
        max_model_len=_usable_length(length, scaling),
        eos_token_ids=token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _usable_length(positions: int, scaling: RopeScaling | None) -> int:
    """Return the longest sequence: some files with yarn state the length before stretching."""
    if scaling is None or scaling.kind != "yarn":
        return positions
    return max(positions, int(scaling.factor * scaling.original_max_len))


def token_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return one id, several or none, as model files write them, as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)
