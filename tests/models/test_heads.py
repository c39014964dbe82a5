"""Changed KV heads against models whose files hold such heads, and against the model itself."""

import numpy as np
import pytest

from paxkv.cache.layout import KVLayout
from paxkv.errors import ConfigError
from paxkv.models.heads import Mha, Native, Pooled
from paxkv.models.source import Checkpoint, TinyRandom

PROMPT = np.random.default_rng(3).integers(0, 40, 20)


@pytest.fixture
def qwen_config(llama_config):
    return llama_config | {"model_type": "qwen2"}


@pytest.fixture
def qwen_tensors(llama_tensors):
    rng = np.random.default_rng(7)
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    biases = {
        f"model.layers.{layer}.self_attn.{name}.bias": rng.standard_normal(size).astype("f4")
        for layer in range(2)
        for name, size in sizes.items()
    }
    return llama_tensors | biases


def mean_of_two_heads(tensor):
    return (tensor[:8] + tensor[8:]) / 2


def token_bytes(config):
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        kv_dtype="float32",
    )
    return layout.bytes_per_token


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_head_for_each_query_head_gives_the_reference(golden, paged_runner, family):
    source = Checkpoint(path=str(golden / "tiny" / family))
    model = source.load("float32", heads=Mha())
    assert token_bytes(model.config) == 2 * token_bytes(source.describe_config())
    with np.load(golden / "tiny" / family / "reference.npz") as reference:
        logits = paged_runner(model).prefill(0, reference["input_ids"])
        np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)


def test_a_head_for_each_query_head_keeps_greedy_tokens(paged_runner):
    native, mha = (
        paged_runner(TinyRandom().load("float32", heads=heads)).prefill(0, PROMPT)
        for heads in (Native(), Mha())
    )
    np.testing.assert_allclose(mha, native, atol=1e-4)
    np.testing.assert_array_equal(mha.argmax(-1), native.argmax(-1))


def test_the_default_model_keeps_its_logits(smollm2, smollm2_source, smollm2_golden, paged_runner):
    model = smollm2_source.load("float32", heads=Mha())
    assert token_bytes(model.config) == 3 * token_bytes(smollm2.config)
    entry = smollm2_golden["prompts"][0]
    logits = paged_runner(model).prefill(0, entry["input_ids"])[-1]
    np.testing.assert_allclose(logits[entry["top8_ids"]], entry["top8_logits"], atol=1e-3)
    assert int(logits.argmax()) == entry["greedy_ids"][0]


def test_pooled_heads_are_the_means_of_a_files_heads(
    qwen_config, qwen_tensors, write_folder, paged_runner
):
    native = Checkpoint(path=str(write_folder(qwen_config, qwen_tensors)))
    means = {
        name: mean_of_two_heads(tensor)
        for name, tensor in qwen_tensors.items()
        if ".k_proj." in name or ".v_proj." in name
    }
    pooled = write_folder(qwen_config | {"num_key_value_heads": 1}, qwen_tensors | means, "pooled")
    expected = Checkpoint(path=str(pooled)).load("float32")
    model = native.load("float32", heads=Pooled())
    assert model.config == expected.config
    assert model.weights_bytes == expected.weights_bytes
    assert token_bytes(model.config) * 2 == token_bytes(native.describe_config())
    logits = paged_runner(model).prefill(0, PROMPT)
    np.testing.assert_allclose(logits, paged_runner(expected).prefill(0, PROMPT), atol=1e-5)
    unchanged = paged_runner(native.load("float32")).prefill(0, PROMPT)
    assert np.abs(logits - unchanged).max() > 0.01


def test_pooling_to_the_models_own_number_changes_nothing(
    llama_config, llama_tensors, write_folder
):
    source = Checkpoint(path=str(write_folder(llama_config, llama_tensors)))
    weights = [
        source.load("float32", heads=heads).decoder.qkv.weights[1][...]
        for heads in (Native(), Pooled(num_kv_heads=2))
    ]
    np.testing.assert_array_equal(*weights)


def test_a_number_of_heads_that_does_not_divide_is_refused():
    model = TinyRandom(num_heads=8, num_kv_heads=8).describe_config()
    for number, fitting in ((3, 2), (16, 8)):
        message = f"num_kv_heads={number}: must divide the 8 KV heads .*num_kv_heads={fitting}"
        with pytest.raises(ConfigError, match=message):
            Pooled(num_kv_heads=number).config(model)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "two"])
def test_a_nonsense_number_of_heads_is_refused(number):
    with pytest.raises(ConfigError, match=r"heads\.num_kv_heads=.*from 1 is needed"):
        Pooled(num_kv_heads=number)


def test_a_file_that_does_not_fit_is_still_named(llama_config, llama_tensors, write_folder):
    folder = write_folder(llama_config | {"num_key_value_heads": 4}, llama_tensors)
    with pytest.raises(ConfigError, match=r"k_proj.* has shape \(16, 32\)"):
        Checkpoint(path=str(folder)).load("float32", heads=Mha())
