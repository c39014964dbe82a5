import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from paxkv.errors import ConfigError
from paxkv.models.tokenizer import ByteTokenizer, FastTokenizer, IdsOnly, from_folder, from_gguf

CHAT = [{"role": "user", "content": "Hi"}]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(st.lists(st.integers(0, 257)))
def test_any_bytes_decode(ids):
    assert "<end>" not in ByteTokenizer().decode(ids, skip_special_tokens=True)
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_byte_chat_ends_open():
    ids = ByteTokenizer().apply_chat_template(CHAT)
    assert ByteTokenizer().decode(ids) == "<start>user: Hi<end><start>assistant: "
    closed = ByteTokenizer().apply_chat_template(CHAT, add_generation_prompt=False)
    assert ids[: len(closed)] == closed


def test_default_model_round_trips(smollm2):
    text = "Tabs\tand  spaces,\r\n émigré 日本語 🙂 1234567 don't <|im_start|>x"
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    assert smollm2.tokenizer.vocab_size == smollm2.config.vocab_size
    assert 1 in ids  # a special token inside a text is one id


def test_default_model_decodes_half_a_character(smollm2):
    ids = smollm2.tokenizer.encode("🙂🙃")
    texts = [smollm2.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    assert texts[-1] == "🙂🙃"
    assert any("\ufffd" in text for text in texts)


def test_default_model_chat(smollm2):
    ids = smollm2.tokenizer.apply_chat_template(CHAT)
    text = smollm2.tokenizer.decode(ids)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    plain = smollm2.tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|im_" not in plain
    assert smollm2.tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize(("kind", "split"), [("llama", None), ("gpt2", "qwen2")])
def test_other_gguf_tokenizers_are_refused_by_name(kind, split):
    metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": split}
    with pytest.raises(ConfigError, match=f"kind '{kind}' with pre-tokenizer {split!r}"):
        from_gguf(metadata, (2,))


def save_tokenizer(folder):
    vocab = {c: i for i, c in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))


def read(folder):
    return from_folder(folder, vocab_size=300, eos_token_ids=(256,))


def test_folder_with_templates_in_each_place(tmp_path):
    save_tokenizer(tmp_path)
    assert read(tmp_path).encode("a<end>")[-1] == 256
    with pytest.raises(ConfigError, match="no chat template"):
        read(tmp_path).apply_chat_template(CHAT)

    settings = {"eos_token": {"content": "<end>"}, "chat_template": "A{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT)) == "A<end>"

    settings["chat_template"] = [
        {"name": "tool", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read(tmp_path).decode(read(tmp_path).apply_chat_template(CHAT)) == "D"

    (tmp_path / "chat_template.jinja").write_text("J")
    assert read(tmp_path).decode(read(tmp_path).apply_chat_template(CHAT)) == "J"


def test_folder_with_older_files_is_converted(tmp_path):
    vocab = {c: i for i, c in enumerate([*ALPHABET, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = read(tmp_path)
    assert isinstance(tokenizer, FastTokenizer)
    assert vocab["he"] in tokenizer.encode("hello")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_folder_without_tokenizer_works_with_ids(tmp_path):
    tokenizer = read(tmp_path)
    assert tokenizer == IdsOnly(vocab_size=300, eos_token_ids=(256,), folder=str(tmp_path))
    assert tokenizer.decode([4, 5]) == "4 5"
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.apply_chat_template(CHAT)):
        with pytest.raises(ConfigError, match=r"no tokenizer.*prompt_token_ids"):
            call()
