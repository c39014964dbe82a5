import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.errors import ConfigError
from paxkv.models.rope import RopeScaling, inverse_frequencies, rotate, rotation, scaling_from_hf

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_key_names_are_read(key):
    scaling = scaling_from_hf({key: "llama3", **LLAMA3}, max_position_embeddings=256)
    assert scaling == RopeScaling(
        kind="llama3", factor=8, original_max_len=64, low_freq_factor=1, high_freq_factor=4
    )


@pytest.mark.parametrize("given", [None, {}, {"rope_type": "default", "rope_theta": 1e4}])
def test_no_scaling(given):
    assert scaling_from_hf(given, max_position_embeddings=256) is None


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "su"])
def test_unknown_kinds_are_refused_by_name(kind):
    with pytest.raises(ConfigError, match=f"rope_type='{kind}'.*llama3, yarn"):
        scaling_from_hf({"type": kind, "factor": 2.0}, max_position_embeddings=256)


def test_a_missing_factor_is_named():
    given = {"rope_type": "llama3", **LLAMA3}
    del given["low_freq_factor"]
    with pytest.raises(ConfigError, match="lacks low_freq_factor"):
        scaling_from_hf(given, max_position_embeddings=256)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    scaling = scaling_from_hf({"rope_type": "llama3", **LLAMA3}, max_position_embeddings=256)
    plain, _ = inverse_frequencies(64, 10000.0, None)
    scaled, factor = inverse_frequencies(64, 10000.0, scaling)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 16], plain[wavelength < 16])
    np.testing.assert_allclose(scaled[wavelength > 64], plain[wavelength > 64] / 8, rtol=1e-6)
    between = (wavelength > 16) & (wavelength < 64)
    assert between.any()
    assert np.all((scaled < plain) & (scaled > plain / 8), where=between)
    assert factor == 1.0


def test_yarn_scales_attention_and_low_frequencies():
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaling = scaling_from_hf(given, max_position_embeddings=32)
    plain, _ = inverse_frequencies(64, 10000.0, None)
    scaled, factor = inverse_frequencies(64, 10000.0, scaling)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)


def test_linear_divides_every_frequency():
    scaling = scaling_from_hf({"type": "linear", "factor": 2.0}, max_position_embeddings=64)
    plain, _ = inverse_frequencies(16, 10000.0, None)
    np.testing.assert_allclose(inverse_frequencies(16, 10000.0, scaling)[0], plain / 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 50))
def test_products_depend_on_distance_only(first, second, shift):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 8, 1)).astype(np.float32)

    def score(a, b):
        turned = [
            rotate(jnp.asarray(x), *rotation(jnp.array([p]), 8, 10000.0, None))
            for x, p in ((q, a), (k, b))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=1e-3)
