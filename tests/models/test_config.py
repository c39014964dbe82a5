import pytest

from paxkv.errors import ConfigError
from paxkv.models.config import from_gguf, from_hf

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


def test_old_and_new_forms_read_the_same(llama_config):
    new = {k: v for k, v in llama_config.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    assert from_hf(new) == from_hf(llama_config)
    assert from_hf(new).head_dim == 8


def test_one_end_token_several_or_none(llama_config):
    assert from_hf(llama_config).eos_token_ids == (2,)
    assert from_hf(llama_config | {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)
    assert from_hf(llama_config | {"eos_token_id": None}).eos_token_ids == ()


def test_yarn_makes_the_stretched_length_usable(llama_config):
    config = llama_config | {
        "max_position_embeddings": 32,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }
    assert from_hf(config).max_model_len == 128


def test_llama3_states_its_length_itself(llama_config):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    assert from_hf(llama_config | {"rope_scaling": scaling}).max_model_len == 64


@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", None])
def test_other_architectures_are_refused_by_name(llama_config, model_type):
    with pytest.raises(ConfigError, match=f"model_type={model_type!r}; supported are llama"):
        from_hf(llama_config | {"model_type": model_type})


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"model_type": "mistral", "sliding_window": 16},
        {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_options_that_would_change_the_output_are_refused_by_name(llama_config, change):
    option = next(key for key in change if key not in ("model_type", "use_sliding_window"))
    with pytest.raises(ConfigError, match=option):
        from_hf(llama_config | change)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False},
    ],
)
def test_a_window_that_is_off_is_fine(llama_config, change):
    assert from_hf(llama_config | change).num_layers == 2


def test_all_problems_are_reported_together(llama_config):
    with pytest.raises(ConfigError) as caught:
        from_hf(llama_config | {"mlp_bias": True, "hidden_act": "gelu", "hidden_size": None})
    assert len(caught.value.problems) == 3


def test_heads_must_divide(llama_config):
    with pytest.raises(ConfigError, match="4 attention heads with 3 KV heads"):
        from_hf(llama_config | {"num_key_value_heads": 3})


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
