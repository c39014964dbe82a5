"""What a format costs: scores, greedy agreement and hidden codes, on a tiny model."""

import numpy as np
import pytest

from paxkv.cache.groups import Span
from paxkv.cache.quantize import KVFormat
from paxkv.models.perplexity import perplexity
from paxkv.quality.agreement import Continuation, agreement, continue_all, equal_choices
from paxkv.quality.cached import CachedModel
from paxkv.quality.needle import make_needles, recall
from paxkv.quality.report import make_suite, measure
from paxkv.quality.text import docs_tokens


@pytest.fixture(scope="module")
def auto(tiny):
    return CachedModel(tiny, KVFormat())


@pytest.fixture(scope="module")
def coarse(tiny):
    return CachedModel(tiny, KVFormat("int8", granularity="tensor", scale=1.0))


def test_perplexity_is_that_of_the_storage_dtype(tiny):
    text = docs_tokens(tiny.tokenizer, 60)
    for name, dtype in (("auto", "float32"), ("int8", "int8")):
        got = CachedModel(tiny, KVFormat(name)).perplexity(text)
        np.testing.assert_allclose(got.nll, perplexity(tiny, text, dtype).nll, atol=2e-4)


def test_greedy_goes_token_by_token_where_predict_reads_all_at_once(auto):
    prompt = list(b"The keys of a dictionary are")
    tokens = auto.greedy(prompt, 6)
    predicted = auto.predict([*prompt, *tokens])[len(prompt) - 1 :]
    assert tokens == predicted[:6].tolist() and len(set(tokens)) > 1


def test_a_model_agrees_with_itself_to_the_end(auto):
    references = continue_all(auto, [list(b"for x in"), list(b"while true")], 5)
    assert agreement(auto, references) == (1.0, (5, 5))


@pytest.mark.slow
def test_the_first_difference_is_where_a_free_run_parts(auto, coarse):
    references = continue_all(auto, [list(b"for x in range"), list(b"class Point")], 12)
    same = agreement(coarse, references)
    for first, (prompt, tokens) in zip(same.first_differences, references, strict=True):
        own = coarse.greedy(prompt, 12)
        assert own[:first] == tokens[:first] and own != tokens
        assert own[first] != tokens[first]
    assert same.equal_share == np.mean([equal_choices(coarse, r) for r in references]) < 1


def test_needles_hold_their_code_once_at_their_depth(tiny):
    needles = make_needles(tiny.tokenizer, num_tokens=80, depths=(0.0, 0.5, 1.0), repeats=2, seed=3)
    assert len({needle.prompt[0] for needle in needles}) > 1
    for needle, depth in zip(needles, (0.0, 0.0, 0.5, 0.5, 1.0, 1.0), strict=True):
        text, code = (tiny.tokenizer.decode(ids) for ids in needle)
        assert len(code.strip()) == 5 and code.strip().isdigit()
        assert text.count(code.strip()) == 1
        assert text.index("\n\nThe secret code") == pytest.approx(80 * depth, abs=2)
        assert text.endswith("secret code of the " + text.split()[-2] + " is")


def test_recall_counts_whole_answers(auto):
    prompt = list(b"the code is")
    right = auto.greedy(prompt, 4)
    wrong = [*right[:3], (right[3] + 1) % 256]
    needles = [Continuation(prompt, right), Continuation(prompt, wrong)]
    assert recall(auto, needles) == 0.5


def test_docs_tokens_start_anywhere_and_wrap(tiny):
    whole = docs_tokens(tiny.tokenizer, 40)
    assert whole == docs_tokens(tiny.tokenizer, 60)[:40]
    assert docs_tokens(tiny.tokenizer, 40, start=0.999999) != whole
    assert len(docs_tokens(tiny.tokenizer, 40, start=0.999999)) == 40


def test_a_static_scale_of_one_is_far_worse_than_a_measured_one(tiny):
    """InfiniLM#553."""
    exact = CachedModel(tiny, KVFormat())
    text = docs_tokens(tiny.tokenizer, 120, start=0.4)

    def change(kv):
        return np.abs(CachedModel(tiny, kv).perplexity(text).nll - nll).mean()

    nll = exact.perplexity(text).nll
    head = change(KVFormat("int8", granularity="head"))
    assert 0 < head < change(KVFormat("int8", granularity="tensor", scale=1.0)) / 4


@pytest.mark.slow
def test_keys_per_channel_cost_no_more_as_a_text_goes_on(tiny):
    """InfiniLM#553: 512 tokens; eight bits cost about what they do with a scale a token."""
    text = docs_tokens(tiny.tokenizer, 512, start=0.3)
    exact = CachedModel(tiny, KVFormat()).perplexity(text).nll

    def change(name, block_size):
        kv = KVFormat(name, granularity="channel")
        return np.abs(CachedModel(tiny, kv, block_size=block_size).perplexity(text).nll - exact)

    eight, four = change("int8", 16), change("int4", 16)
    assert 0 < eight.mean() < four.mean() / 4
    assert four[400:].mean() < 2 * four[100:200].mean()
    by_token = np.abs(CachedModel(tiny, KVFormat("int8")).perplexity(text).nll - exact)
    assert eight.mean() < 1.5 * by_token.mean()


@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_window_costs_no_more_quality_past_it(tiny, name):
    """ik_llama.cpp#1205: the change of each token's score does not grow past the window."""
    spans = [Span(8), Span()] * 2
    text = docs_tokens(tiny.tokenizer, 100)
    exact = CachedModel(tiny, KVFormat(), spans=spans, block_size=4).perplexity(text).nll
    coded = CachedModel(tiny, KVFormat(name), spans=spans, block_size=4).perplexity(text).nll
    change = np.abs(coded - exact)
    assert 0 < change[50:].mean() < 3 * change[:8].mean() + 0.1


def test_a_suite_measures_a_format(tiny):
    suite = make_suite(
        tiny, text_tokens=50, num_prompts=1, output_tokens=4, needle_tokens=30, repeats=1
    )
    assert (len(suite.text), len(suite.references), len(suite.needles)) == (50, 1, 3)
    same = measure(tiny, KVFormat(), suite)
    assert same.equal_share == 1.0 and same.first_differences == (4,)
    assert 0 <= same.recall <= 1 < same.perplexity
    four = measure(tiny, KVFormat("int4", skip_layers=[0]), suite)
    assert four.bytes_per_token == 2 * 2 * (3 * (8 + 4) + 64) < same.bytes_per_token
