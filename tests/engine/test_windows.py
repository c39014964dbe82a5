"""Windows: layers forget what they no longer see, and everything else still works."""

import numpy as np
import pytest

from paxkv.blocks import pool as block_pool
from paxkv.cache.groups import LayerGroup, Span
from paxkv.policies.admission import FirstChunk
from paxkv.policies.preemption import Recompute, Swap

MIXED = (LayerGroup((0,), Span(8)), LayerGroup((1,)))


@pytest.mark.parametrize(("span", "visible"), [(Span(8), 8), (Span(8, 4), 12)])
def test_the_cache_keeps_exactly_what_the_next_token_sees(
    make_harness, make_request, span, visible
):
    # transformers#37574: at length n the last min(n, 8) keys are there, and no block without one.
    groups = (LayerGroup((0,), span),)
    harness = make_harness(block_size=1, num_blocks=40, groups=groups)
    harness.submit(make_request("a", prompt_len=6, max_tokens=20))
    while harness.state.has_work:
        harness.step()
        for sequence in harness.state.running:
            row = sequence.row
            context_len = int(harness.state.rows.context_len[row])
            held = len(harness.state.rows.blocks(row))
            # The token to come counts as the window's last, so one fewer is kept before it.
            assert held == min(context_len, visible - 1)
    harness.finish()


@pytest.mark.parametrize("first_token", [0, 1, 2, 3])
def test_blocks_wholly_outside_are_freed_at_once(make_harness, make_request, first_token):
    harness = make_harness(groups=(LayerGroup((0,), Span(8)),), num_blocks=40)
    harness.submit(make_request("a", prompt_len=16 + first_token, max_tokens=16))
    while harness.state.has_work:
        harness.step()
        for sequence in harness.state.running:
            rows, row = harness.state.rows, sequence.row
            oldest = max(int(rows.context_len[row]) - 7, 0)
            assert int(rows.live_from[row, 0]) == oldest // 4
            counts = harness.state.pool.ref_counts
            assert int((counts == 1).sum()) == len(rows.blocks(row)) <= 3
    harness.finish()


@pytest.mark.parametrize("groups", [MIXED, (LayerGroup((0,), Span(8, 4)), LayerGroup((1,)))])
def test_a_prompt_sent_twice_reuses_what_every_group_still_has(
    make_harness, make_request, expect, groups
):
    # TensorRT-LLM#2912: two layers, window 8 and full, a 24-token prompt twice.
    harness = make_harness(groups=groups, num_blocks=64)
    for name in ("cold", "warm"):
        harness.submit(make_request(name, prompt_len=24, max_tokens=8))
        records = harness.finish()
    assert records["warm"].cached_prompt_tokens == 20
    cold, warm = (records[name].output_token_ids for name in ("cold", "warm"))
    assert cold == warm == expect(make_request("x", prompt_len=24, max_tokens=8), 48, groups)


def test_a_hit_is_cut_to_what_the_window_group_still_has(make_harness, make_request, expect):
    # The window's blocks of the hit's end are evicted, those of the full group stay: a shorter hit
    # needs older window blocks, so it has to be one that they are there for.
    harness = make_harness(groups=MIXED, num_blocks=64)
    harness.submit(make_request("cold", prompt_len=24, max_tokens=2))
    harness.finish()
    index, state = harness.state.index, harness.state
    last = index.match(np.arange(1, 25), limit_tokens=23)[0]
    assert last.tolist()[:3] == [-1, -1, -1]  # the next token sees none of the first 12
    victim = int(last[4])
    index.drop(victim)
    state.accounts.count_cached("default", -1)
    state.evictable.remove([victim])
    state.pool = block_pool.evict(state.pool, np.array([victim]))
    harness.submit(make_request("warm", prompt_len=24, max_tokens=2))
    record = harness.finish()["warm"]
    assert record.cached_prompt_tokens == 16
    assert record.output_token_ids == expect(
        make_request("x", prompt_len=24, max_tokens=2), 48, MIXED
    )


@pytest.mark.parametrize("mode", [Recompute(), Swap(), Swap(host_blocks=3)])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    "groups",
    [
        MIXED,
        (LayerGroup((0,), Span(5, 2)), LayerGroup((1,))),
        (LayerGroup((0,)), LayerGroup((1,)), LayerGroup((2,), Span(3)), LayerGroup((3,), Span(11))),
    ],
    ids=["mixed", "sinks", "four"],
)
def test_windows_and_preemption_change_no_output(
    make_harness, make_request, expect, mode, prefix_caching, groups
):
    requests = [
        make_request(f"r{i}", prompt_len=9 + i, max_tokens=16, first=17 * i) for i in range(5)
    ]
    harness = make_harness(
        groups=groups,
        num_blocks=12 * len(groups),
        preemption=mode,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=9,
    )
    records = harness.run(requests)
    assert sum(record.num_preemptions for record in records.values()) > 0
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48, groups)


def test_swap_moves_only_what_the_window_sees(make_harness, make_request):
    groups = (LayerGroup((0,), Span(6)),)
    requests = [make_request(f"r{i}", prompt_len=5, max_tokens=30, first=30 * i) for i in range(3)]
    harness = make_harness(
        groups=groups,
        num_blocks=5,
        preemption=Swap(),
        prefix_caching=False,
        max_num_batched_tokens=6,
        admission=FirstChunk(watermark=0.0),
    )
    records = harness.run(requests)
    swaps = [e.data["blocks"] for e in harness.log.events if e.kind == "swap_out"]
    assert swaps
    assert max(swaps) <= 3  # 5 tokens that are still seen touch at most 3 blocks of 4
    assert sum(record.recomputed_tokens for record in records.values()) == 0
