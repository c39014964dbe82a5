import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paxkv.models.source import Checkpoint, TinyRandom

FAMILIES = [
    "llama",
    "llama3_rope",
    "llama_yarn",
    "mistral_window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
]


@pytest.fixture(scope="module")
def tiny():
    return TinyRandom().load("float32")


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(1).integers(0, 256, 56).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_logits_and_greedy_tokens(golden, paged_runner, family):
    folder = golden / "tiny" / family
    model = Checkpoint(path=str(folder)).load("float32")
    with np.load(folder / "reference.npz") as reference:
        runner = paged_runner(model)
        logits = runner.prefill(0, reference["input_ids"])
        np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)
        tokens = paged_runner(model).greedy([reference["input_ids"]], 40)[0]
        assert tokens == reference["greedy"].tolist()


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 8), (7, 16), (16, 32), (41, 16)])
def test_chunks_give_the_logits_of_the_whole(tiny, prompt, paged_runner, chunk, block_size):
    whole = paged_runner(tiny, block_size=16).prefill(0, prompt)
    runner = paged_runner(tiny, block_size=block_size, chunk=chunk)
    parts = [
        runner.prefill(0, prompt[start : start + chunk], start)
        for start in range(0, len(prompt), chunk)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


def test_a_prefix_hit_starts_at_the_cached_position(tiny, prompt, paged_runner):
    runner = paged_runner(tiny, rows=2)
    miss = runner.prefill(0, prompt)
    runner.tables[1, :, :3] = runner.tables[
        0, :, :3
    ]  # three full blocks, as a prefix cache shares them
    hit = runner.prefill(1, prompt[48:], start=48)
    np.testing.assert_allclose(hit, miss[48:], atol=1e-4)


def test_rows_do_not_see_each_other(tiny, prompt, paged_runner):
    prompts = [prompt[:5], prompt[5:30], prompt[30:]]
    together = paged_runner(tiny, rows=3).greedy(prompts, 12)
    assert together == [paged_runner(tiny, rows=3).greedy([p], 12)[0] for p in prompts]


def test_the_random_model_reads_its_whole_prompt(tiny, prompt, paged_runner):
    changed = [(prompt[0] + 1) % 256, *prompt[1:]]
    first, second = (paged_runner(tiny).prefill(0, p)[-1] for p in (prompt, changed))
    assert np.abs(first - second).max() > 1e-3


def test_unrolled_layers_compute_the_same(tiny, prompt, paged_runner):
    expected = paged_runner(tiny).prefill(0, prompt)
    runner = paged_runner(tiny, unroll=True)
    np.testing.assert_allclose(runner.prefill(0, prompt), expected, atol=1e-5)


def test_unrolled_layers_have_their_own_window_and_rope(golden, paged_runner):
    folder = golden / "tiny" / "gemma3"
    model = Checkpoint(path=str(folder)).load("float32")
    with np.load(folder / "reference.npz") as reference:
        logits = paged_runner(model, unroll=True).prefill(0, reference["input_ids"])
        np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)


def test_gemma_in_bfloat16_keeps_its_norms_in_float32(golden, paged_runner):
    folder = golden / "tiny" / "gemma2"
    model = Checkpoint(path=str(folder)).load("bfloat16")
    decoder = model.decoder
    assert decoder.attention_norm[...].dtype == decoder.final_norm[...].dtype == jnp.float32
    assert decoder.embedding[...].dtype == jnp.bfloat16
    with np.load(folder / "reference.npz") as reference:
        logits = paged_runner(model).prefill(0, reference["input_ids"])
        error = np.abs(logits - reference["logits"]).mean()
        assert error < 0.03 * np.abs(reference["logits"]).mean()


def test_bfloat16_stays_close_and_logits_are_float32(tiny, prompt, paged_runner):
    half = TinyRandom().load("bfloat16")
    logits = paged_runner(half).prefill(0, prompt)
    expected = paged_runner(tiny).prefill(0, prompt)
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).mean() < 0.03 * np.abs(expected).mean()


def test_the_state_is_one_plain_tree(tiny):
    graph, state = nnx.split(tiny.decoder)
    leaves = jax.tree.leaves(state)
    assert len({id(leaf) for leaf in leaves}) == len(leaves)
    assert sum(leaf.nbytes for leaf in leaves) == tiny.weights_bytes
    hash(graph)  # a jitted function may close over it


def test_pages_are_updated_in_place(tiny):
    """The donated cache comes back without a copy of it among the temporaries."""
    config = tiny.config
    graph, state = nnx.split(tiny.decoder)
    shape = (config.num_layers, 4096, config.num_kv_heads, config.head_dim)

    def step(state, pages, tokens, positions):
        def attend(q, k, v, pages, layer):
            return q, pages.at[layer, positions].set(k + v)

        return nnx.merge(graph, state).hidden(tokens, positions, pages, attend)

    token = jnp.zeros(4, jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(state, jnp.zeros(shape), token, token)
    memory = compiled.compile().memory_analysis()
    pool_bytes = 4 * int(np.prod(shape))
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
