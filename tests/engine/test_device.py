"""The device executor with a tiny model: real tokens, every policy, the pool updated in place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.cache.attend import model_spans
from paxkv.cache.groups import group_layers
from paxkv.cache.layout import KVLayout, pool_bytes
from paxkv.engine.device import DeviceExecutor
from paxkv.models.source import TinyRandom
from paxkv.policies.preemption import Recompute, Swap


@pytest.fixture(scope="module")
def model():
    return TinyRandom().load("float32")


@pytest.fixture(scope="module")
def uncached(model):
    """Greedy continuation with plain causal attention over the whole context, no cache at all."""
    group = model.config.num_heads // model.config.num_kv_heads

    def attend(q, k, v, pages, layer):
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v), pages

    @jax.jit
    def logits(tokens):
        hidden, _ = model.decoder.hidden(tokens, jnp.arange(len(tokens)), None, attend)
        return model.decoder.logits(hidden)

    def continuation(prompt, max_tokens):
        tokens = np.zeros(64, np.int32)
        count = len(prompt)
        tokens[:count] = prompt
        for place in range(count, count + max_tokens):
            tokens[place] = np.argmax(logits(tokens)[place - 1])
        return tuple(tokens[count : count + max_tokens].tolist())

    return continuation


@pytest.fixture(scope="module")
def make_executor(model):
    """Executors are kept: what an earlier run left in the pool must not matter."""
    made = {}

    def build(kv_dtype="float32", block_size=4, num_blocks=24):
        key = (kv_dtype, block_size, num_blocks)
        if key not in made:
            layout = KVLayout(
                num_layers=model.config.num_layers,
                num_kv_heads=model.config.num_kv_heads,
                head_dim=model.config.head_dim,
                block_size=block_size,
                kv_dtype=kv_dtype,
            )
            made[key] = DeviceExecutor(
                model,
                layout,
                group_layers(model_spans(model.config.windows)),
                num_blocks=num_blocks,
                host_blocks=num_blocks,
                max_blocks=16,
            )
        return made[key]

    return build


@pytest.fixture
def serve(make_executor, make_harness, model):
    """Serve with the device executor; returns the harness and the records."""

    def run(requests, *, kv_dtype="float32", block_size=4, num_blocks=24, **changes):
        harness = make_harness(
            make_executor(kv_dtype, block_size, num_blocks),
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=64,
            vocab_size=model.config.vocab_size,
            **changes,
        )
        return harness, harness.run(requests)

    return run


@pytest.fixture
def requests(make_request):
    return [
        make_request(f"r{i}", prompt_len=5 + 4 * i, max_tokens=14, first=11 * i) for i in range(5)
    ]


@pytest.mark.parametrize("preemption", [Recompute(), Swap(), Swap(host_blocks=3)], ids=repr)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [5, 64])
def test_greedy_output_equals_the_uncached_model(
    serve, requests, uncached, preemption, prefix_caching, chunk
):
    harness, records = serve(
        requests,
        num_blocks=16,
        preemption=preemption,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=chunk,
    )
    assert sum(record.num_preemptions for record in records.values()) > 0
    for request in requests:
        expected = uncached(request.prompt_token_ids, request.max_tokens)
        assert records[request.request_id].output_token_ids == expected
    if preemption == Swap():
        assert sum(step.swap_bytes for step in harness.log.steps) > 0


@pytest.mark.parametrize(
    "kv_dtype",
    [
        "float8_e4m3fn",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "bfloat16")),
    ],
)
def test_preemption_changes_no_output_of_a_quantised_cache(serve, requests, kv_dtype):
    _, ample = serve(requests, kv_dtype=kv_dtype, num_blocks=48)
    harness, tight = serve(requests, kv_dtype=kv_dtype, num_blocks=16, preemption=Swap())
    assert sum(step.preemptions for step in harness.log.steps) > 0
    for request in requests:
        name = request.request_id
        assert tight[name].output_token_ids == ample[name].output_token_ids


def test_seeded_sampling_survives_neighbours_and_preemption(serve, requests):
    sampled = [replace(r, temperature=1.0, top_p=0.9, seed=7 + i) for i, r in enumerate(requests)]
    _, alone = serve(sampled[2:3])
    _, together = serve(sampled, num_blocks=48)
    harness, tight = serve(sampled, num_blocks=16)
    assert sum(step.preemptions for step in harness.log.steps) > 0
    for records in (together, tight):
        assert records["r2"].output_token_ids == alone["r2"].output_token_ids
    outputs = {record.output_token_ids for record in together.values()}
    assert len(outputs) == len(sampled)


def test_each_step_updates_the_pool_in_place(serve, make_executor, requests):
    serve(requests)
    executor = make_executor()
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(executor.pages))
    kinds = set()
    for (kind, *_), compiled in executor.compiled.items():
        memory = compiled.memory_analysis()
        kinds.add(kind)
        assert memory.alias_size_in_bytes >= pool
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024
    assert kinds == {"prefill", "decode"}


def test_no_step_keeps_a_copy_of_a_large_pool(make_executor, serve, requests):
    # Large enough that a copy of the pool would dwarf everything else a step needs.
    serve(requests, num_blocks=8192)
    executor = make_executor(num_blocks=8192)
    pool = sum(leaf.nbytes for leaf in jax.tree.leaves(executor.pages))
    for compiled in executor.compiled.values():
        assert compiled.memory_analysis().temp_size_in_bytes < pool / 4


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_planned_bytes_are_allocated_bytes(make_executor, model, kv_dtype):
    layout = KVLayout(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=4,
        kv_dtype=kv_dtype,
    )
    pages = make_executor(kv_dtype, 4, 16).pages
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == pool_bytes(16, layout)


def test_compilation_is_counted_once_a_shape(make_executor, serve, requests):
    serve(requests)
    harness, _ = serve(requests)
    assert sum(step.num_compiles for step in harness.log.steps) == 0
    assert sum(step.compile_s for step in harness.log.steps) == 0
