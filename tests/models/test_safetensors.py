import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from paxkv.errors import ConfigError
from paxkv.models.safetensors import HFFolder


def test_bfloat16_is_read_without_torch(llama_config, llama_tensors, write_folder):
    half = {name: t.astype(ml_dtypes.bfloat16) for name, t in llama_tensors.items()}
    folder = HFFolder(write_folder(llama_config, half))
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(folder.read(name), half[name])
    assert folder.read(name).dtype == ml_dtypes.bfloat16


def shard(folder, tensors):
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {name: file for file, members in files.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()


def test_shards_read_as_one(llama_config, llama_tensors, write_folder):
    path = write_folder(llama_config, llama_tensors)
    shard(path, llama_tensors)
    folder = HFFolder(path)
    assert [file.name for file in folder.weight_files()] == ["a.safetensors", "b.safetensors"]
    for name, tensor in llama_tensors.items():
        np.testing.assert_array_equal(folder.read(name), tensor)


def test_a_missing_shard_is_named(llama_config, llama_tensors, write_folder):
    path = write_folder(llama_config, llama_tensors)
    shard(path, llama_tensors)
    (path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names b\.safetensors, which the folder lacks"):
        HFFolder(path).has("lm_head.weight")


def test_folder_without_weights(llama_config, llama_tensors, write_folder):
    path = write_folder(llama_config, llama_tensors)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        HFFolder(path).weight_files()


def test_broken_files_are_named(llama_config, llama_tensors, write_folder, tmp_path):
    path = write_folder(llama_config, llama_tensors)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        HFFolder(path).weight_files()
    (path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        HFFolder(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read .it holds no JSON object"):
        HFFolder(path)
    with pytest.raises(ConfigError, match="no such folder"):
        HFFolder(tmp_path / "absent")


def test_integer_weights_are_refused(llama_config, llama_tensors, write_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    llama_tensors[name] = llama_tensors[name].astype(np.int8)
    folder = HFFolder(write_folder(llama_config, llama_tensors))
    with pytest.raises(ConfigError, match="stored as int8"):
        folder.read(name)


def test_generation_config_names_the_end_tokens(llama_config, llama_tensors, write_folder):
    path = write_folder(llama_config, llama_tensors)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    assert HFFolder(path).config.eos_token_ids == (3, 7)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert HFFolder(path).config.eos_token_ids == (2,)
