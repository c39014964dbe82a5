"""A byte tokenizer and a model's limits, so that workloads need no model."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Limits:
    vocab_size: int = 256
    max_model_len: int = 2048


class ByteTokenizer:
    def encode(self, text):
        return list(text.strip().encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def apply_chat_template(self, messages, add_generation_prompt=True):
        turns = [f"<{m['role']}>{m['content']}" for m in messages]
        return self.encode("".join(turns) + ("<assistant>" if add_generation_prompt else ""))


@pytest.fixture
def tokenizer():
    return ByteTokenizer()


@pytest.fixture
def limits():
    return Limits()
