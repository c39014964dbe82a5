"""GGUF files written here with llama.cpp's row order, next to the same weights in safetensors."""

import gguf
import jax
import numpy as np
import pytest
from flax import nnx

from paxkv.errors import ConfigError
from paxkv.models.gguf import GGUFFile
from paxkv.models.safetensors import HFFolder
from paxkv.models.source import Checkpoint, LoadedModel
from paxkv.models.tokenizer import ByteTokenizer
from paxkv.models.weights import build_decoder

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def permute(rows, heads):
    """The converter's order: a head's first half and second half become alternate rows."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        first = rows[head * size : head * size + size // 2]
        second = rows[head * size + size // 2 : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = first
        out[head * size + 1 : (head + 1) * size : 2] = second
    return out


def write_gguf(path, tensors, *, architecture="llama", extra=None, quantise=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token {i} ü" for i in range(40)])
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in top:
            target = top[stem]
        else:
            _, _, layer, suffix = stem.split(".", 3)
            target = f"blk.{layer}.{NAMES[suffix]}"
            heads = HEADS.get(NAMES[suffix])
            tensor = tensor if heads is None else permute(tensor, heads)
        if quantise is not None and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            packed = gguf.quantize(tensor, quantise)
            writer.add_tensor(f"{target}.weight", packed, raw_dtype=quantise)
        else:
            writer.add_tensor(f"{target}.weight", tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


def state_of(files):
    return jax.tree.leaves(nnx.state(build_decoder(files.config, files, "float32")))


@pytest.mark.parametrize("tied", [False, True])
def test_same_decoder_as_from_safetensors(path, llama_config, llama_tensors, write_folder, tied):
    if tied:
        del llama_tensors["lm_head.weight"]
    folder = HFFolder(write_folder(llama_config | {"tie_word_embeddings": tied}, llama_tensors))
    file = GGUFFile(write_gguf(path, llama_tensors))
    assert file.config.tie_embeddings is tied
    from_file, from_folder = state_of(file), state_of(folder)
    assert len(from_file) == len(from_folder)
    for one, other in zip(from_file, from_folder, strict=True):
        np.testing.assert_array_equal(one, other)


def test_logits_agree_with_safetensors(
    path, llama_config, llama_tensors, write_folder, paged_runner
):
    file = GGUFFile(write_gguf(path, llama_tensors))
    loaded = LoadedModel(
        name="gguf",
        config=file.config,
        decoder=build_decoder(file.config, file, "float32"),
        tokenizer=ByteTokenizer(),
        dtype="float32",
        weights_bytes=0,
        source="",
        identity="",
    )
    other = Checkpoint(path=str(write_folder(llama_config, llama_tensors))).load("float32")
    tokens = list(range(5, 35))
    logits, expected = (paged_runner(m, max_len=64).prefill(0, tokens) for m in (loaded, other))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert np.ptp(expected) > 1


def test_metadata_is_what_the_library_reads(path, llama_tensors):
    write_gguf(path, llama_tensors)
    fields = gguf.GGUFReader(path).fields
    assert GGUFFile(path).metadata == {name: field.contents() for name, field in fields.items()}


def test_quantised_tensors_are_dequantised(path, llama_tensors):
    kind = gguf.GGMLQuantizationType.Q8_0
    file = GGUFFile(write_gguf(path, llama_tensors, quantise=kind))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        tensor = file.read(name)
        assert tensor.dtype == np.float32
        step = np.abs(llama_tensors[name]).max() / 127
        np.testing.assert_allclose(tensor, llama_tensors[name], atol=step)


@pytest.mark.parametrize("keep", [0, 3, 40, 700, 2000, -1000])
def test_a_file_cut_short_is_named(path, llama_tensors, keep):
    content = write_gguf(path, llama_tensors).read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(ConfigError, match=r"tiny\.gguf: not a complete GGUF file"):
        GGUFFile(path)


def test_other_contents_are_named(path, llama_tensors):
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ConfigError, match=r"tiny\.gguf: not a complete GGUF file"):
        GGUFFile(path)
    with pytest.raises(ConfigError, match="no such file"):
        GGUFFile(path.with_name("absent.gguf"))
    write_gguf(path, llama_tensors, architecture="mamba")
    with pytest.raises(ConfigError, match=r"general\.architecture='mamba'"):
        GGUFFile(path)


def test_scaling_by_a_tensor_is_refused(path, llama_tensors):
    write_gguf(path, llama_tensors, extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        GGUFFile(path)


def test_a_missing_tensor_is_named(path, llama_tensors):
    del llama_tensors["model.layers.1.mlp.up_proj.weight"]
    file = GGUFFile(write_gguf(path, llama_tensors))
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        build_decoder(file.config, file, "float32")
