"""Static scales: measured on a text, or given."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels import init_pages, paged_prefill, write_kv
from paxkv.cache.quantize import KVFormat
from paxkv.cache.scales import scales_from_absmax
from paxkv.errors import ConfigError
from paxkv.quality.calibrate import CALIBRATION_TOKENS, MARGIN, kv_absmax, static_scales
from paxkv.quality.text import docs_tokens

TENSOR = KVFormat("int8", granularity="tensor")
HEAD = KVFormat("int8", granularity="head")


@pytest.fixture(scope="module")
def absmax(tiny):
    return kv_absmax(tiny, docs_tokens(tiny.tokenizer, CALIBRATION_TOKENS))


def test_absmax_is_that_of_what_is_written(tiny):
    """The decoder run by hand, its keys and values caught before they reach a cache."""
    tokens = np.arange(40, dtype=np.int32)
    pages = init_pages(3, 4, 2, 16, 16, "float32")
    seen = []

    def attend(q, k, v, pages, layer):
        seen.append((k, v))
        pages = write_kv(k, v, pages, tokens, layer=int(layer))
        table, lens = np.arange(3, dtype=np.int32)[None], np.array([40], np.int32)
        return paged_prefill(q[None], pages, table, lens, lens, layer=int(layer))[0], pages

    with jax.disable_jit():
        tiny.decoder.hidden(tokens, tokens, pages, attend, unroll=True)
    assert len(seen) == tiny.config.num_layers
    for which, got in enumerate(kv_absmax(tiny, tokens.tolist())):
        want = [np.abs(np.asarray(kv[which])).max(axis=(0, 2)) for kv in seen]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_scales_put_the_margin_at_the_largest_code(tiny, absmax):
    scales = static_scales(tiny, HEAD)
    for got, size in zip((scales.k, scales.v), absmax, strict=True):
        np.testing.assert_allclose(np.array(got) * 127, size * MARGIN, rtol=1e-5)


def test_one_scale_a_layer_is_that_of_its_largest_head(tiny, absmax):
    scales = static_scales(tiny, TENSOR)
    for got, size in zip((scales.k, scales.v), absmax, strict=True):
        want = np.repeat(size.max(axis=1, keepdims=True), 2, axis=1)
        np.testing.assert_allclose(np.array(got) * 127, want * MARGIN, rtol=1e-5)


def test_given_scales_are_not_measured(tiny):
    scales = static_scales(tiny, dataclasses.replace(TENSOR, scale=0.5))
    assert set(np.ravel([scales.k, scales.v])) == {0.5}
    assert np.shape(scales.k) == (4, 2)
    assert static_scales(tiny, KVFormat("int8")) is None
    assert static_scales(tiny, KVFormat()) is None


@pytest.mark.parametrize("size", [np.nan, np.inf, 1e-44, -1.0])
def test_a_model_that_gives_no_scale_is_refused(size):
    """onnxruntime/mobius#447: measured scales pass the same check as given ones."""
    bad = np.array([[1.0, size]], np.float32)
    with pytest.raises(ConfigError, match=r"kv.scale=calibrate: V of the text.*=token_head"):
        scales_from_absmax(np.ones((1, 2)), bad, HEAD, margin=MARGIN)


def test_a_head_of_zeros_has_scale_one():
    scales = scales_from_absmax(np.zeros((1, 2)), np.ones((1, 2)), HEAD, margin=1.0)
    assert scales.k == ((1.0, 1.0),)
    np.testing.assert_allclose(scales.v, 1 / 127, rtol=1e-6)
