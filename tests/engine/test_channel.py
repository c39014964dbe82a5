"""Keys quantised per channel through the engine: an open block is bound to its row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.cache.groups import LayerGroup, Span, group_layers
from paxkv.cache.layout import pool_bytes
from paxkv.cache.quantize import KVFormat
from paxkv.engine.device import DeviceExecutor
from paxkv.models.source import TinyRandom
from paxkv.policies.preemption import Recompute, Swap

BLOCK, ROWS, LONGEST = 4, 8, 64
FULL, WINDOWS = (Span(), Span()), (Span(6), Span())
CODES = {"int8": 127, "int4": 7}


@pytest.fixture(scope="module")
def model():
    return TinyRandom().load("float32")


@pytest.fixture(scope="module")
def uncached(model):
    """Greedy continuation by the definition: no cache, the whole context at once, every time."""
    group = model.config.num_heads // model.config.num_kv_heads
    place = jnp.arange(LONGEST)
    same_block = (place[:, None] // BLOCK) == (place // BLOCK)

    def rounded(x, axis, codes):
        scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / codes
        return jnp.round(x / scale) * scale

    def logits_of(spans, codes):
        windows = jnp.array([span.window or LONGEST for span in spans])

        def attend(q, k, v, pages, layer):
            coded = rounded(k.reshape(-1, BLOCK, *k.shape[1:]), 1, codes).reshape(k.shape)
            v = jnp.repeat(rounded(v, 2, codes), group, axis=1)
            by_keys = [
                jnp.einsum("qhd,khd->hqk", q, jnp.repeat(keys, group, axis=1))
                for keys in (k, coded)
            ]
            scores = jnp.where(same_block, *by_keys) * q.shape[-1] ** -0.5
            behind = place[:, None] - place
            seen = (behind >= 0) & (behind < windows[layer])
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weights, v), pages

        @jax.jit
        def logits(tokens):
            hidden, _ = model.decoder.hidden(tokens, place, None, attend)
            return model.decoder.logits(hidden)

        return logits

    made, found = {}, {}

    def continuation(request, spans, codes):
        key = (request.prompt_token_ids, request.max_tokens, spans, codes)
        if key not in found:
            if key[2:] not in made:
                made[key[2:]] = logits_of(spans, codes)
            prompt = request.prompt_token_ids
            tokens, count = np.ones(LONGEST, np.int32), len(prompt)
            tokens[:count] = prompt
            for at in range(count, count + request.max_tokens):
                tokens[at] = np.argmax(made[key[2:]](tokens)[at - 1])
            found[key] = tuple(tokens[count : count + request.max_tokens].tolist())
        return found[key]

    return continuation


@pytest.fixture(scope="module")
def make_executor(model):
    """Executors are kept: what an earlier run left in pool and rows must not matter."""
    made = {}

    def build(kv, spans):
        if (kv, spans) not in made:
            groups, config = group_layers(spans), model.config
            layout = KVFormat(kv, granularity="channel").layout(
                "float32",
                groups,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_size=BLOCK,
            )
            executor = DeviceExecutor(
                model,
                layout,
                groups,
                num_blocks=96,  # of every pool: runs use the first ones
                host_blocks=96,
                max_blocks=LONGEST // BLOCK,
                num_rows=ROWS,
            )
            made[kv, spans] = executor, layout
        return made[kv, spans]

    return build


@pytest.fixture
def serve(make_executor, make_harness, model):
    """Serve with the device executor; returns the harness and the records."""

    def run(requests, *, kv="int8", spans=FULL, num_blocks=16, **changes):
        executor, _ = make_executor(kv, spans)
        groups = group_layers(spans)
        harness = make_harness(
            executor,
            block_size=BLOCK,
            num_blocks=num_blocks * len(groups),
            max_num_seqs=ROWS,
            max_model_len=LONGEST,
            vocab_size=model.config.vocab_size,
            groups=groups,
            open_block_in_row=True,
            **changes,
        )
        return harness, harness.run(requests)

    return run


@pytest.fixture
def requests(make_request):
    return [
        make_request(f"r{i}", prompt_len=5 + 4 * i, max_tokens=14, first=11 * i) for i in range(5)
    ]


def samples(leader, count):
    return [
        leader,
        *[
            replace(leader, request_id=f"{leader.request_id}.{i}", fork_of=leader.request_id)
            for i in range(1, count)
        ],
    ]


@pytest.mark.parametrize(
    ("preemption", "prefix_caching", "chunk"),
    [
        (Recompute(), True, 1),
        (Swap(), False, 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Recompute(), False, 16),
                (Swap(), True, 32),
                (Swap(host_blocks=3), True, 16),
            )
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    ("kv", "spans"), [("int8", FULL), ("int4", WINDOWS)], ids=["int8", "int4-windows"]
)
def test_output_is_that_of_the_definition_whatever_happens_to_the_cache(
    serve, requests, uncached, kv, spans, preemption, prefix_caching, chunk
):
    harness, records = serve(
        requests,
        kv=kv,
        spans=spans,
        preemption=preemption,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=chunk,
        num_blocks=16 if chunk > 3 else 11,  # small chunks: few run at once
    )
    for request in requests:
        expected = uncached(request, spans, CODES[kv])
        assert records[request.request_id].output_token_ids == expected
    if chunk > 1:
        assert sum(record.num_preemptions for record in records.values()) > 0
    if preemption == Swap():
        assert sum(step.swap_bytes for step in harness.log.steps) > 0


def test_samples_share_full_blocks_and_compute_the_rest(serve, make_request, uncached):
    lead = make_request("lead", prompt_len=15, max_tokens=9)
    harness, records = serve(samples(lead, 3), prefix_caching=False, num_blocks=24)
    assert {r.output_token_ids for r in records.values()} == {uncached(lead, FULL, 127)}
    assert [records[name].forked_prompt_tokens for name in ("lead", "lead.1", "lead.2")] == [
        0,
        12,
        12,
    ]
    assert sum(step.prefill_tokens for step in harness.log.steps) == 15 + 2 * 3


def test_a_found_prefix_and_the_batch_change_nothing(serve, make_request, uncached):
    long = make_request("long", prompt_len=21, max_tokens=6)
    again = replace(long, request_id="again", arrival_s=50.0)
    longer = replace(again, request_id="longer", prompt_token_ids=(*again.prompt_token_ids, 7, 8))
    _, records = serve([long, again, longer], num_blocks=30)
    assert [records[name].cached_prompt_tokens for name in ("again", "longer")] == [20, 20]
    for request in (long, again, longer):
        expected = uncached(request, FULL, 127)
        assert records[request.request_id].output_token_ids == expected


def test_only_full_blocks_are_swapped_and_the_tail_counts_as_recomputed(serve, requests):
    harness, records = serve(requests, preemption=Swap(), prefix_caching=False)
    out = [event for event in harness.log.events if event.kind == "swap_out"]
    preempted = [event for event in harness.log.events if event.kind == "preempt"]
    swapped = [event for event in preempted if event.data["mode"] == "swap"]
    assert len(out) == len(swapped) > 0
    for event, move in zip(swapped, out, strict=True):
        assert move.data["blocks"] == event.data["context_tokens"] // BLOCK
    lost = sum(
        event.data["context_tokens"] % (BLOCK if event.data["mode"] == "swap" else LONGEST)
        for event in preempted
    )
    assert sum(record.recomputed_tokens for record in records.values()) == lost > 0


def test_planned_bytes_are_allocated_bytes(make_executor):
    for kv, spans in (("int8", FULL), ("int4", WINDOWS)):
        executor, layout = make_executor(kv, spans)
        planned = pool_bytes(96, layout)
        planned += layout.open_bytes(num_rows=ROWS, num_groups=len(group_layers(spans)))
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(executor.pages)) == planned


@pytest.mark.parametrize(
    "groups", [(LayerGroup((0,)),), (LayerGroup((0,), Span(6)), LayerGroup((1,)))]
)
@pytest.mark.parametrize("preemption", [Recompute(), Swap(), Swap(host_blocks=5)], ids=repr)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_nothing_is_read_from_an_open_block_of_another_row(
    make_harness, make_request, expect, groups, preemption, prefix_caching
):
    """On the scripted model, which refuses to: samples, preemption and found prefixes together."""
    requests = samples(make_request("lead", prompt_len=14, max_tokens=18), 3)
    requests += [make_request(f"r{i}", prompt_len=3 + 4 * i, max_tokens=15) for i in range(4)]
    harness = make_harness(
        num_blocks=20 * len(groups),
        groups=groups,
        preemption=preemption,
        prefix_caching=prefix_caching,
        open_block_in_row=True,
    )
    records = harness.run(requests)
    assert sum(record.num_preemptions for record in records.values()) > 0
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48, groups)


def test_the_scripted_model_notices_a_partly_filled_block_that_moves(make_harness, make_request):
    harness = make_harness(num_blocks=20, preemption=Swap())
    harness.executor.open_block_in_row = True  # and the scheduler does not know
    requests = [make_request(f"r{i}", prompt_len=7 + 4 * i, max_tokens=15) for i in range(5)]
    with pytest.raises(AssertionError, match="open block"):
        harness.run(requests)
