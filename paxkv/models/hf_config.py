"""Reads a Hugging Face `config.json`, of transformers 4 or 5.

Source: the configuration classes of transformers, whose defaults hold for keys that a file lacks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paxkv.errors import ConfigError
from paxkv.models.config import Activation, ModelConfig, token_ids, usable_length
from paxkv.models.rope import scaling_from_hf

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_DEFAULT_WINDOW = 4096
_NEEDED = (
    "num_attention_heads",
    "hidden_size",
    "max_position_embeddings",
    "vocab_size",
    "num_hidden_layers",
    "intermediate_size",
    "rms_norm_eps",
)
_ANOTHER = "Choose another folder with model.path=DIR."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What a model type says that its file may leave open.

    Attributes:
        windowed: Layers that use `sliding_window` unless `layer_types` says: `all`, those from
            `max_window_layers` on (`late`), or all but every n-th (`pattern`).
        full_every: The n of `pattern`, unless the file has `sliding_window_pattern`.
        gemma: Norms around both halves of a layer, stored less 1; scaled embeddings; GELU.
        soft_caps: Gemma's defaults of the caps on attention scores and on logits.
        theta: Default RoPE base.
        local_theta: Default RoPE base of windowed layers; None: they turn like the others.
    """

    attention_bias: bool = False
    qk_norm: bool = False
    windowed: Literal["all", "late", "pattern"] | None = None
    full_every: int = 1
    gemma: bool = False
    soft_caps: tuple[float | None, float | None] = (None, None)
    theta: float = 10_000.0
    local_theta: float | None = None


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(windowed="all"),
    "qwen2": _Family(attention_bias=True, windowed="late"),
    "qwen3": _Family(qk_norm=True, windowed="late"),
    "gemma2": _Family(gemma=True, windowed="pattern", full_every=2, soft_caps=(50.0, 30.0)),
    "gemma3_text": _Family(
        gemma=True,
        qk_norm=True,
        windowed="pattern",
        full_every=6,
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
}


def from_hf(given: Mapping[str, Any], *, eos_token_ids: Sequence[int] | None = None) -> ModelConfig:
    """Read a Hugging Face `config.json`, of transformers 4 or 5.

    Args:
        given: The parsed file.
        eos_token_ids: End tokens of `generation_config.json`, which win over those of the config.

    Raises:
        ConfigError: An architecture or an option that the decoder does not compute, by name.
    """
    problems = _problems(given)
    if problems:
        raise ConfigError(problems)
    family = _FAMILIES[given["model_type"]]
    heads = int(given["num_attention_heads"])
    hidden = int(given["hidden_size"])
    positions = int(given["max_position_embeddings"])
    rope, local_theta = _rope(given, family)
    scaling = scaling_from_hf(rope, max_position_embeddings=positions)
    max_model_len = usable_length(positions, scaling)
    kinds = _layer_kinds(given, family)
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
        rope_theta=float(rope.get("rope_theta") or given.get("rope_theta") or family.theta),
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        local_rope_layers=() if local_theta is None else tuple(kind == SLIDING for kind in kinds),
        rms_norm_eps=float(given["rms_norm_eps"]),
        tie_embeddings=bool(given.get("tie_word_embeddings", family.gemma)),
        max_model_len=max_model_len,
        eos_token_ids=tuple(eos_token_ids),
        bos_token_id=given.get("bos_token_id"),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(kinds, _window(given, family), max_model_len),
        activation=ACTIVATIONS[_activation(given, family)[1]],
        **_gemma_fields(given, family),
    )


def _gemma_fields(given: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    if not family.gemma:
        return {}
    attention_cap, final_cap = family.soft_caps
    return {
        "attention_scale": float(given.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_soft_cap": given.get("attn_logit_softcapping", attention_cap),
        "final_soft_cap": given.get("final_logit_softcapping", final_cap),
        "embedding_scale": float(given["hidden_size"]) ** 0.5,
        "post_norms": True,
        "norm_offset": True,
    }


def _activation(given: Mapping[str, Any], family: _Family) -> tuple[str, str]:
    """Return the key that names the activation, and the name."""
    key, default = "hidden_act", "silu"
    if family.gemma:
        key, default = "hidden_activation", "gelu_pytorch_tanh"
    return key, given.get(key) or default


def _rope(given: Mapping[str, Any], family: _Family) -> tuple[Mapping[str, Any], float | None]:
    """Return the RoPE parameters of full layers, and the base of windowed ones if it is another."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    local_theta = given.get("rope_local_base_freq") or family.local_theta
    if FULL in rope or SLIDING in rope:
        local = rope.get(SLIDING) or {}
        rope = rope.get(FULL) or {}
        local_theta = local.get("rope_theta") or local_theta
    return rope, None if local_theta is None else float(local_theta)


def _window(given: Mapping[str, Any], family: _Family) -> int | None:
    """Return the window of the layers that have one, tokens."""
    if family.windowed is None:
        return None
    if family.windowed == "late" and not given.get("use_sliding_window", False):
        return None
    return given.get("sliding_window", _DEFAULT_WINDOW)


def _layer_kinds(given: Mapping[str, Any], family: _Family) -> list[str]:
    """Return what each layer attends to: `FULL` or `SLIDING`."""
    if given.get("layer_types"):
        return list(given["layer_types"])
    layers = range(int(given["num_hidden_layers"]))
    if family.windowed == "pattern":
        every = int(given.get("sliding_window_pattern") or family.full_every)
        return [SLIDING if (layer + 1) % every else FULL for layer in layers]
    if _window(given, family) is None:
        return [FULL for _ in layers]
    first = int(given.get("max_window_layers", 28)) if family.windowed == "late" else 0
    return [SLIDING if layer >= first else FULL for layer in layers]


def _layer_windows(
    kinds: Sequence[str], window: int | None, max_model_len: int
) -> tuple[int | None, ...]:
    """Return each layer's window; a window that no sequence outgrows is none."""
    if window is None or window >= max_model_len or SLIDING not in kinds:
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _problems(given: Mapping[str, Any]) -> list[str]:
    """Return what the decoder does not compute, or the file lacks, a sentence each."""
    model_type = given.get("model_type")
    if model_type not in _FAMILIES:
        return [
            f"model.path: config.json has model_type={model_type!r}; supported are "
            f"{', '.join(_FAMILIES)}. {_ANOTHER}"
        ]
    family = _FAMILIES[model_type]
    lacking = [key for key in _NEEDED if given.get(key) is None]
    problems = [f"model.path: config.json lacks {key!r}." for key in lacking]
    key, activation = _activation(given, family)
    if activation not in ACTIVATIONS:
        problems.append(
            f"model.path: config.json has {key}={activation!r}; supported are "
            f"{', '.join(ACTIVATIONS)}. {_ANOTHER}"
        )
    problems += [
        f"model.path: config.json has {key}={given[key]!r}, which the decoder does not compute. "
        f"{_ANOTHER}"
        for key in _unsupported_keys(given)
    ]
    return problems if lacking else problems + _layer_problems(given, family)


def _unsupported_keys(given: Mapping[str, Any]) -> list[str]:
    options = ("attention_bias", "mlp_bias", "quantization_config", "use_bidirectional_attention")
    keys = [key for key in options if given.get(key)]
    if (given.get("partial_rotary_factor") or 1.0) != 1.0:
        keys.append("partial_rotary_factor")
    # transformers ignores this cap in Gemma 3: a model that states one is not the one it runs.
    if given["model_type"] == "gemma3_text" and given.get("attn_logit_softcapping"):
        keys.append("attn_logit_softcapping")
    return keys


def _layer_problems(given: Mapping[str, Any], family: _Family) -> list[str]:
    """Return what does not fit together in the attention and the RoPE of the layers."""
    problems, kinds = [], _layer_kinds(given, family)
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        problems.append(
            f"model.path: config.json has layer_types with {', '.join(unknown)}; supported are "
            f"{FULL}, {SLIDING}. {_ANOTHER}"
        )
    if len(kinds) != given["num_hidden_layers"]:
        problems.append(
            f"model.path: config.json has {len(kinds)} layer_types for num_hidden_layers="
            f"{given['num_hidden_layers']}; it needs one a layer."
        )
    if SLIDING in kinds and not _window(given, family):
        problems.append(
            f"model.path: config.json has {SLIDING} layers but no sliding_window in use; set one "
            "there, with use_sliding_window=true where the model has that switch."
        )
    rope = given.get("rope_parameters") or {}
    local = rope.get(SLIDING) or {}
    if local.get("rope_type", "default") != "default":
        problems.append(
            f"model.path: config.json has rope_type={local['rope_type']!r} for {SLIDING} layers; "
            f"only 'default' is computed there. {_ANOTHER}"
        )
    return problems
