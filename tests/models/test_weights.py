import numpy as np
import pytest

from paxkv.entry.sizing import weights_bytes
from paxkv.errors import ConfigError
from paxkv.models.safetensors import HFFolder
from paxkv.models.source import Checkpoint
from paxkv.models.weights import build_decoder


@pytest.fixture
def build(write_folder):
    def build(config, tensors, dtype="float32"):
        folder = HFFolder(write_folder(config, tensors))
        return build_decoder(folder.config, folder, dtype)

    return build


def test_tied_embeddings_without_output_matrix(build, llama_config, llama_tensors):
    del llama_tensors["lm_head.weight"]
    decoder = build(llama_config | {"tie_word_embeddings": True}, llama_tensors)
    assert decoder.head is None
    hidden = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    norm, embedding = (llama_tensors[f"model.{n}.weight"] for n in ("norm", "embed_tokens"))
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5) * norm
    np.testing.assert_allclose(decoder.logits(hidden), normed @ embedding.T, atol=1e-4)


def test_untied_without_output_matrix_names_tensor_and_flag(build, llama_config, llama_tensors):
    del llama_tensors["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*tie_word_embeddings=false"):
        build(llama_config, llama_tensors)


def test_wrong_shape_is_named(build, llama_config, llama_tensors):
    with pytest.raises(ConfigError, match=r"mlp.*has shape \(48, 32\); its config asks for \(50"):
        build(llama_config | {"intermediate_size": 50}, llama_tensors)


def test_unknown_dtype(build, llama_config, llama_tensors):
    with pytest.raises(ConfigError, match=r"model\.dtype=int8"):
        build(llama_config, llama_tensors, "int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_bytes_are_loaded_bytes_for_every_family(golden, dtype):
    folders = sorted((golden / "tiny").iterdir())
    assert len(folders) == 8
    for folder in folders:
        source = Checkpoint(path=str(folder))
        loaded = source.load(dtype).weights_bytes
        assert weights_bytes(source.describe_config(), dtype) == loaded, folder.name


def test_offset_norms_keep_the_last_bits_of_what_is_stored(golden):
    """A norm weight near 0 that bfloat16 holds would vanish from a sum with 1 in bfloat16."""
    source = Checkpoint(path=str(golden / "tiny" / "gemma2"))
    stored = HFFolder(golden / "tiny" / "gemma2").read("model.norm.weight")
    for dtype in ("float32", "bfloat16"):
        np.testing.assert_array_equal(source.load(dtype).decoder.final_norm[...], 1 + stored)
