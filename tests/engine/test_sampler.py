"""Sampling against NumPy, and the independence of streams."""

import jax
import numpy as np
import pytest

from paxkv.engine import sampler


def draw(logits, *, temperature=1.0, top_p=1.0, seed=0, index=0):
    rows = len(logits)

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), rows)

    return np.asarray(
        jax.jit(sampler.sample)(
            logits,
            column(temperature, np.float32),
            column(top_p, np.float32),
            column(seed, np.uint32),
            column(index, np.int32),
        )
    )


@pytest.mark.parametrize("vocab", [1, 7, 256, 300, 1024])
def test_greedy_is_the_first_largest(vocab):
    logits = np.random.default_rng(vocab).integers(-3, 3, (5, vocab)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(sampler.greedy)(logits), logits.argmax(-1))


def test_temperature_zero_is_greedy_beside_sampled_rows():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    tokens = draw(logits, temperature=[0, 1, 0, 2])
    np.testing.assert_array_equal(tokens[[0, 2]], logits.argmax(-1)[[0, 2]])


def test_draws_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    tokens = draw(np.tile(logits, (20_000, 1)), index=np.arange(20_000))
    shares = np.bincount(tokens, minlength=4) / 20_000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.015)


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p, kept):
    logits = np.log(np.array([0.15, 0.5, 0.05, 0.3], np.float32))
    tokens = draw(np.tile(logits, (4000, 1)), top_p=top_p, index=np.arange(4000))
    assert set(tokens.tolist()) == set(np.argsort(-logits)[:kept].tolist())


def test_a_seeded_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(3)
    mine = rng.normal(size=100).astype(np.float32)
    alone = draw(mine[None], seed=[42], index=[5])[0]
    for _ in range(4):
        others = rng.normal(size=(3, 100)).astype(np.float32)
        seeds = [*rng.integers(0, 1000, 2), 42, rng.integers(0, 1000)]
        batch = draw(np.stack([*others[:2], mine, others[2]]), seed=seeds, index=[1, 2, 5, 9])
        assert batch[2] == alone


def test_streams_differ_by_seed_and_by_index():
    logits = np.zeros((64, 1000), np.float32)
    assert len(set(draw(logits, seed=np.arange(64)).tolist())) > 55
    assert len(set(draw(logits, index=np.arange(64)).tolist())) > 55
