import pytest

from paxkv.errors import ConfigError
from paxkv.models.config import ModelConfig, from_gguf

GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.vocab_size": 40,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_gguf_metadata():
    config = from_gguf(GGUF, tie_embeddings=True)
    assert (config.num_layers, config.head_dim, config.rope_theta) == (2, 8, 5000.0)
    assert config.eos_token_ids == (2,)


def test_gguf_missing_key_architecture_and_uneven_layers_are_named():
    with pytest.raises(ConfigError, match=r"lacks the key llama\.block_count"):
        from_gguf({k: v for k, v in GGUF.items() if k != "llama.block_count"}, tie_embeddings=True)
    with pytest.raises(ConfigError, match=r"general\.architecture='phi3'; supported are llama"):
        from_gguf(GGUF | {"general.architecture": "phi3"}, tie_embeddings=True)
    with pytest.raises(ConfigError, match=r"head_count_kv=.*a value for each layer"):
        from_gguf(GGUF | {"llama.attention.head_count_kv": [2, 4]}, tie_embeddings=True)
    with pytest.raises(ConfigError, match="rotates 4 of 8"):
        from_gguf(GGUF | {"llama.rope.dimension_count": 4}, tie_embeddings=True)


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_embeddings": True,
    "max_model_len": 64,
}


def test_windows_have_one_entry_a_layer():
    assert ModelConfig(**SIZES).windows == (None, None)
    assert ModelConfig(**SIZES, layer_windows=(8, None)).windows == (8, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_windows": (8,)}, "layer_windows has 1 entries for 2 layers"),
        ({"layer_windows": (8, 0)}, "layer_windows has 0; a window is a whole number"),
        ({"layer_windows": ("8", None)}, "layer_windows has '8'; a window is a whole number"),
        ({"local_rope_layers": (True,), "local_rope_theta": 1e4}, "local_rope_layers has 1 ent"),
        ({"local_rope_layers": (True, False)}, "needs local_rope_theta"),
    ],
)
def test_layers_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**SIZES, **change)
