import pytest

from paxkv.errors import ConfigError
from paxkv.models.hf_config import from_hf


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


@pytest.mark.parametrize("model_type", ["gemma3", "gpt2", None])
def test_other_architectures_are_refused_by_name(llama_config, model_type):
    with pytest.raises(ConfigError, match=f"model_type={model_type!r}; supported are llama"):
        from_hf(llama_config | {"model_type": model_type})


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_options_that_would_change_the_output_are_refused_by_name(llama_config, change):
    option = next(key for key in change if key != "model_type")
    with pytest.raises(ConfigError, match=option):
        from_hf(llama_config | change)


FULL, SLIDING = "full_attention", "sliding_attention"
QWEN = {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}
GEMMA2 = {"model_type": "gemma2", "num_hidden_layers": 5, "sliding_window": 16}
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 16}


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, (16, 16)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        # Transformers reads a Mistral file without the key as a window of 4,096 tokens.
        ({"model_type": "mistral", "max_position_embeddings": 8192}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": 64}, (None, None)),  # as long as the model
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": [SLIDING, FULL]}, (8, None)),
        (QWEN | {"max_window_layers": 1}, (None, 16)),
        (QWEN | {"max_window_layers": 28}, (None, None)),
        (QWEN | {"layer_types": [SLIDING, FULL]}, (16, None)),
        (QWEN | {"use_sliding_window": False, "max_window_layers": 0}, (None, None)),
        (GEMMA2, (16, None, 16, None, 16)),
        (GEMMA3, (16, 16, 16, 16, 16, None, 16)),
        (GEMMA3 | {"sliding_window_pattern": 3}, (16, 16, None, 16, 16, None, 16)),
        ({"sliding_window": 16}, (None, None)),  # a Llama has no use for it
    ],
)
def test_each_layer_gets_its_window(llama_config, change, windows):
    assert from_hf(llama_config | change).windows == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [FULL, "chunked_attention"]}, "layer_types with chunked_attention"),
        ({"layer_types": [FULL]}, "1 layer_types for num_hidden_layers=2"),
        (
            QWEN | {"use_sliding_window": False, "layer_types": [SLIDING, FULL]},
            "no sliding_window in use",
        ),
        (GEMMA2 | {"sliding_window": None}, "no sliding_window in use"),
        (
            GEMMA3 | {"rope_parameters": {SLIDING: {"rope_type": "yarn", "factor": 2.0}}},
            "rope_type='yarn' for sliding_attention",
        ),
    ],
)
def test_layers_that_make_no_sense_are_named(llama_config, change, message):
    with pytest.raises(ConfigError, match=message):
        from_hf(llama_config | change)


def test_gemma2_defaults_are_those_of_transformers(llama_config):
    del llama_config["tie_word_embeddings"]
    config = from_hf(llama_config | GEMMA2 | {"query_pre_attn_scalar": 64})
    assert config.tie_embeddings
    assert (config.attention_scale, config.embedding_scale) == (1 / 8, 32**0.5)
    assert (config.attention_soft_cap, config.final_soft_cap) == (50.0, 30.0)
    assert (config.activation, config.post_norms, config.norm_offset) == ("gelu_tanh", True, True)
    assert (config.qk_norm, config.local_rope_theta) == (False, None)
    off = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = from_hf(llama_config | GEMMA2 | off)
    assert (config.attention_soft_cap, config.final_soft_cap) == (None, None)


def test_gemma3_turns_windowed_layers_by_their_own_base_in_old_and_new_files(llama_config):
    given = llama_config | GEMMA3
    linear = {"rope_type": "linear", "factor": 8.0}
    old = from_hf(given | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": linear})
    del given["rope_theta"], given["rope_scaling"]
    local = {"rope_type": "default", "rope_theta": 2e4}
    new = from_hf(given | {"rope_parameters": {FULL: linear | {"rope_theta": 5e5}, SLIDING: local}})
    assert old == new
    assert (old.rope_theta, old.local_rope_theta) == (5e5, 2e4)
    assert old.rope_scaling is not None
    assert old.rope_scaling.factor == 8.0
    assert old.local_rope_layers == (True, True, True, True, True, False, True)
    assert old.qk_norm
    assert (old.attention_soft_cap, old.final_soft_cap) == (None, None)
    bare = from_hf(given)
    assert (bare.rope_theta, bare.local_rope_theta) == (1e6, 1e4)


def test_windows_longer_than_the_model_leave_its_local_rope(llama_config):
    config = from_hf(llama_config | GEMMA3 | {"sliding_window": 4096})
    assert config.layer_windows == ()
    assert sum(config.local_rope_layers) == 6


def test_all_problems_are_reported_together(llama_config):
    with pytest.raises(ConfigError) as caught:
        from_hf(llama_config | {"mlp_bias": True, "hidden_act": "gelu", "hidden_size": None})
    assert len(caught.value.problems) == 3


def test_heads_must_divide(llama_config):
    with pytest.raises(ConfigError, match="4 attention heads with 3 KV heads"):
        from_hf(llama_config | {"num_key_value_heads": 3})
