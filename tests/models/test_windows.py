"""Windowed layers against a dense forward pass that masks what lies outside the window."""

import numpy as np
import pytest

from paxkv.models.source import Checkpoint

WINDOW, PROMPT_LEN, DECODED = 8, 6, 12
LAYER_TYPES = [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]]


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotate(x):
    """Turn x [token, head, dim] by its position: pairs are half a head apart."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] / 10000 ** (np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(q, k, v, window):
    """Attend with all tokens [token, head, dim] at once; returns [token, head * dim]."""
    q_at, k_at = np.arange(len(q))[:, None], np.arange(len(k))
    visible = (k_at <= q_at) & (k_at > q_at - window)
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(visible, scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def dense_logits(tensors, tokens, windows):
    """Logits [token, vocab] of the whole sequence in float64."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for layer, window in enumerate(windows):

        def project(name, x, layer=layer):
            return x @ weights[f"model.layers.{layer}.{name}.weight"].T

        norm = f"model.layers.{layer}.{{}}.weight".format
        h = rms_norm(x, weights[norm("input_layernorm")])
        q, k, v = (project(f"self_attn.{p}_proj", h).reshape(len(x), -1, 8) for p in "qkv")
        x = x + project("self_attn.o_proj", attend(rotate(q), rotate(k), v, window))
        h = rms_norm(x, weights[norm("post_attention_layernorm")])
        gate = project("mlp.gate_proj", h)
        x = x + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", h))
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("layer_types", LAYER_TYPES)
def test_decoding_past_the_window_equals_a_window_mask(
    llama_config, llama_tensors, write_folder, paged_runner, layer_types
):
    """Lengths 7 to 18 with a window of 8: at 8 nothing is lost yet, at 9 the first key is."""
    config = llama_config | {
        "model_type": "mistral",
        "sliding_window": WINDOW,
        "layer_types": layer_types,
    }
    folder = write_folder(config, llama_tensors)
    runner = paged_runner(Checkpoint(path=str(folder)).load("float32"), max_len=32, block_size=4)
    tokens = np.random.default_rng(5).integers(0, 40, PROMPT_LEN + DECODED)
    windows = [WINDOW if kind.startswith("sliding") else 10**6 for kind in layer_types]

    expected = dense_logits(llama_tensors, tokens, windows)
    got = [*runner.prefill(0, tokens[:PROMPT_LEN])]
    for length in range(PROMPT_LEN + 1, len(tokens) + 1):
        got.append(runner.decode(tokens[length - 1 : length], [length])[0])
    np.testing.assert_allclose(got, expected, atol=1e-4)

    # A key too few shows at length 8, a key too many at length 9.
    for wrong, length in ((WINDOW - 1, WINDOW), (WINDOW + 1, WINDOW + 1)):
        other = dense_logits(llama_tensors, tokens, [wrong if w == WINDOW else w for w in windows])
        differs = np.abs(other - expected).max(axis=-1) > 1e-3
        assert np.flatnonzero(differs)[0] + 1 == length
