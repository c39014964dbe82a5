"""The prefix cache as requests see it."""

from paxkv.blocks import pool as block_pool


def test_a_repeated_prompt_reuses_all_full_blocks_but_the_last_token(
    make_harness, make_request, expect
):
    requests = [
        make_request("first", prompt_len=8, max_tokens=4),
        make_request("again", prompt_len=8, max_tokens=4, arrival_s=30.0),
    ]
    records = make_harness().run(requests)
    assert records["first"].cached_prompt_tokens == 0
    assert records["again"].cached_prompt_tokens == 4  # the second block would leave nothing to do
    assert records["again"].output_token_ids == expect(requests[1], 48)


def test_running_requests_share_their_common_start(make_harness, make_request, expect):
    requests = [
        make_request("a", prompt_len=17, max_tokens=12),
        make_request("b", prompt_len=18, max_tokens=12, arrival_s=2.5),
    ]
    harness = make_harness()
    records = harness.run(requests)
    assert records["b"].cached_prompt_tokens == 16
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48)


def test_a_recycled_block_is_not_found_again(make_harness, make_request, expect):
    requests = [
        make_request("a", prompt_len=8, max_tokens=2),
        make_request("b", prompt_len=11, max_tokens=2, first=50, arrival_s=20.0),
        make_request("a2", prompt_len=8, max_tokens=2, arrival_s=40.0),
    ]
    harness = make_harness(num_blocks=3, max_model_len=12)
    records = harness.run(requests)
    assert records["a2"].cached_prompt_tokens == 0
    assert records["a2"].output_token_ids == expect(requests[2], 12)
    assert any(event.kind == "evict" for event in harness.log.events)


def test_after_each_request_nothing_is_held_and_all_is_evictable(make_harness, make_request):
    requests = [
        make_request(f"r{i}", prompt_len=9, first=7 * i, arrival_s=40.0 * i) for i in range(10)
    ]
    harness = make_harness()
    harness.run(requests)
    counts = block_pool.counts(harness.state.pool)
    assert counts.live == 0
    assert harness.state.spare_blocks == 16
    assert counts.cached == len(harness.state.evictable) > 0


def test_two_requests_sharing_blocks_leave_each_in_one_state(make_harness, make_request):
    requests = [make_request(name, prompt_len=21, max_tokens=2) for name in "ab"]
    harness = make_harness(max_num_batched_tokens=21)
    harness.run(requests)
    counts = block_pool.counts(harness.state.pool)
    assert (counts.free + counts.cached, counts.live) == (16, 0)


def test_a_preempted_request_finds_its_own_blocks_again(make_harness, make_request):
    requests = [make_request(f"r{i}", prompt_len=8, max_tokens=14, first=20 * i) for i in range(3)]
    with_cache = make_harness(num_blocks=16, max_model_len=24)
    without = make_harness(num_blocks=16, max_model_len=24, prefix_caching=False)
    again = [
        sum(r.recomputed_tokens for r in h.run(requests).values()) for h in (with_cache, without)
    ]
    assert again[0] < again[1]


def test_a_request_that_hits_but_does_not_fit_changes_nothing(make_harness, make_request, expect):
    # vllm#11565: 3 blocks hit, more needed than are free: no reference may stay behind.
    harness = make_harness(num_blocks=10, max_model_len=40)
    harness.submit(make_request("first", prompt_len=13, max_tokens=1))
    harness.finish()
    harness.submit(make_request("holds", prompt_len=17, max_tokens=8, first=50))
    harness.step()
    state = harness.state
    before = (state.pool.ref_counts + 0, list(state.evictable), int(state.pool.num_free))
    assert before[2] == 2
    hits = make_request("hits", prompt_len=28, max_tokens=4)
    harness.submit(hits)
    harness.step()
    assert harness.running == ["holds"]
    after = (state.pool.ref_counts + 0, list(state.evictable), int(state.pool.num_free))
    assert after[1:] == before[1:]
    assert (after[0] == before[0]).all()
    record = harness.finish()["hits"]
    assert record.cached_prompt_tokens == 12
    assert record.output_token_ids == expect(hits, 40)
