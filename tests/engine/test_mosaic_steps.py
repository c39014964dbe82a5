"""The engine's steps with the Mosaic kernels, in the GPU interpreter, against the XLA kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import init_pages, mosaic, read_kv
from paxkv.cache.attend import PagedAttention, model_spans
from paxkv.cache.groups import group_layers
from paxkv.engine.forward import Forward, split_weights
from paxkv.models.source import TinyRandom

BLOCK_SIZE, NUM_BLOCKS = 16, 8
PROMPT_LENS = (21,)
TABLES, ROWS = np.array([[[5, 2, 7, 0]]], np.int32), np.zeros(1, np.int32)


def serve(model, implementation, kv_dtype):
    """Prefill a prompt and decode one token; returns the tokens and pages."""
    config = model.config
    weights, merge = split_weights(model.decoder)
    groups = group_layers(model_spans(config.windows))
    attention = PagedAttention(groups=groups, block_size=BLOCK_SIZE, implementation=implementation)
    forward = Forward(merge, attention, unroll=True)
    sizes = (NUM_BLOCKS, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pages = init_pages(*sizes, kv_dtype)
    lens = np.array(PROMPT_LENS, np.int32)
    tokens = np.zeros(24, np.int32)
    tokens[: lens.sum()] = np.random.default_rng(0).integers(0, 256, lens.sum())
    pages, first = jax.jit(forward.prefill)(weights, pages, tokens, lens, lens, TABLES, ROWS)
    ones = np.ones_like(lens)
    pages, second = jax.jit(forward.decode)(weights, pages, first, ones, lens + 1, TABLES, ROWS)
    return np.asarray([first, second]), pages


def slots(row, count):
    position = np.arange(count)
    return jnp.asarray(TABLES[row, 0][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
def test_mosaic_serves_what_xla_serves(kv_dtype, capsys):
    model = TinyRandom(head_dim=64, num_heads=2, num_kv_heads=1).load("bfloat16")
    expected, expected_pages = serve(model, "xla", kv_dtype)
    with mosaic.interpret():
        tokens, pages = serve(model, "mosaic", kv_dtype)
        jax.effects_barrier()
    assert "RACE DETECTED" not in capsys.readouterr().out
    np.testing.assert_array_equal(tokens, expected)
    for row, length in enumerate(PROMPT_LENS):
        for layer in range(model.config.num_layers):
            found, wanted = (
                np.stack(read_kv(p, slots(row, length + 1), layer=layer))
                for p in (pages, expected_pages)
            )
            # The first layer's K and V come before any attention; later ones carry its rounding.
            bound = 0 if layer == 0 else 2**-5 * np.abs(wanted).max()
            assert np.abs(found - wanted).max() <= bound
