import numpy as np
import pytest

from paxkv.cache.groups import FULL, Span
from paxkv.models.perplexity import perplexity
from paxkv.models.source import Checkpoint, TinyRandom

# Largest change of the mean against the unquantised cache, nats. Measured on the default model with
# the whole reference text: 0.0003, 0.0027 and 0.0061; with its first 112 tokens, which the test
# uses: 0.00003, -0.0014 and 0.0092.
MAX_CHANGE = {"bfloat16": 0.001, "float8_e4m3fn": 0.006, "int8": 0.02}
PART = 112


@pytest.fixture(scope="module")
def windowed():
    return TinyRandom(layer_windows=(8, None)).load("float32")


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, 256, 30).tolist()


@pytest.fixture(scope="module")
def reference_nll(smollm2, smollm2_golden):
    return perplexity(smollm2, smollm2_golden["perplexity"]["input_ids"], "float32", chunk=224)


def test_unquantised_cache_gives_the_reference_value(reference_nll, smollm2_golden):
    expected = smollm2_golden["perplexity"]
    assert reference_nll.mean_nll == pytest.approx(expected["mean_nll"], abs=1e-3)
    np.testing.assert_allclose(reference_nll.nll[:16], expected["nll_first_16"], atol=1e-3)
    assert reference_nll.perplexity == pytest.approx(8.7294, abs=0.01)


@pytest.mark.parametrize("kv_dtype", MAX_CHANGE)
def test_each_kv_dtype_costs_at_most_its_bound(smollm2, smollm2_golden, reference_nll, kv_dtype):
    text = smollm2_golden["perplexity"]["input_ids"][:PART]
    measured = perplexity(smollm2, text, kv_dtype, chunk=PART)
    change = measured.mean_nll - reference_nll.nll[: PART - 1].mean()
    assert abs(change) < MAX_CHANGE[kv_dtype]
    assert not np.array_equal(measured.nll, reference_nll.nll[: PART - 1])


def test_chunks_and_blocks_do_not_matter():
    model = TinyRandom().load("float32")
    text = np.random.default_rng(0).integers(0, 256, 50).tolist()
    whole = perplexity(model, text, "float32", chunk=64)
    for block_size, chunk in ((16, 7), (32, 49)):
        parts = perplexity(model, text, "float32", block_size=block_size, chunk=chunk)
        np.testing.assert_allclose(parts.nll, whole.nll, atol=1e-4)
    assert whole.nll.shape == (49,)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_windowed_models_give_the_references_value(golden, family):
    """Their attention scale, soft caps and windows all show in these numbers."""
    model = Checkpoint(path=str(golden / "tiny" / family)).load("float32")
    with np.load(golden / "tiny" / family / "reference.npz") as reference:
        text, logits = reference["input_ids"], reference["logits"].astype(np.float64)
    expected = np.log(np.exp(logits).sum(-1))[:-1] - logits[np.arange(47), text[1:]]
    measured = perplexity(model, text.tolist(), "float32", block_size=8, chunk=20)
    np.testing.assert_allclose(measured.nll, expected, atol=1e-4)


def test_a_window_can_be_imposed(windowed, text):
    model = TinyRandom().load("float32")
    imposed = perplexity(model, text, "float32", chunk=16, spans=[Span(8), FULL])
    own = perplexity(windowed, text, "float32", chunk=16)
    np.testing.assert_allclose(imposed.nll, own.nll, atol=1e-5)
    sinks = perplexity(model, text, "float32", chunk=16, spans=[Span(8, 4), FULL])
    assert np.abs(sinks.nll - own.nll).max() > 1e-3


def test_length_is_checked():
    model = TinyRandom(max_model_len=32).load("float32")
    for count in (1, 33):
        with pytest.raises(ValueError, match=f"{count} tokens: perplexity needs 2 to 32"):
            perplexity(model, [1] * count, "float32")
