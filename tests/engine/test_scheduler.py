"""Scheduling: batches, chunks, admission, refusals, ends."""

import pickle

import numpy as np
import pytest

from paxkv.engine import scheduler
from paxkv.engine.state import init_state
from paxkv.engine.step import StepResult
from paxkv.errors import ConfigError, InvariantError
from paxkv.policies.admission import FullPrompt
from paxkv.policies.schedule import Continuous


def test_one_request_yields_its_tokens_once(make_harness, make_request, expect):
    request = make_request("a", prompt_len=6, max_tokens=10)
    record = make_harness().run([request])["a"]
    assert record.output_token_ids == expect(request, 48)
    assert record.finish_reason == "length"
    assert record.arrival_s <= record.first_scheduled_s < record.first_token_s <= record.finish_s


def test_a_long_prompt_is_computed_in_chunks_beside_a_decode(make_harness, make_request, expect):
    requests = [
        make_request("short", prompt_len=2, max_tokens=12),
        make_request("long", prompt_len=30, max_tokens=4, first=50, arrival_s=1.5),
    ]
    harness = make_harness(max_num_batched_tokens=8)
    records = harness.run(requests)
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48)
    mixed = [s for s in harness.log.steps if s.prefill_tokens and s.decode_rows]
    assert [step.prefill_tokens for step in mixed[:4]] == [7, 7, 7, 7]
    assert all(s.prefill_tokens + s.decode_rows <= 8 for s in harness.log.steps)


@pytest.mark.parametrize("chunk", [1, 3, 4, 32])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_output_does_not_depend_on_chunk_or_block_size(
    make_harness, make_request, expect, chunk, block_size
):
    requests = [make_request(f"r{i}", prompt_len=3 + 4 * i, first=10 * i) for i in range(4)]
    harness = make_harness(
        max_num_batched_tokens=chunk, block_size=block_size, num_blocks=160 // block_size
    )
    records = harness.run(requests)
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48)


def test_end_token_stops_and_ignore_eos_runs_on(make_harness, make_request, expect):
    request = make_request("a", max_tokens=16)
    third = expect(request, 48)[2]
    harness = make_harness(eos_token_ids=(third,))
    record = harness.run([request])["a"]
    assert record.finish_reason == "stop"
    assert record.output_token_ids[-1] == third
    assert len(record.output_token_ids) == expect(request, 48).index(third) + 1

    ignoring = make_request("a", max_tokens=16, ignore_eos=True)
    record = make_harness(eos_token_ids=(third,)).run([ignoring])["a"]
    assert record.finish_reason == "length"
    assert len(record.output_token_ids) == 16


@pytest.mark.parametrize(
    ("prompt_len", "reason", "tokens"),
    [(31, "length", 1), (32, "rejected", 0), (33, "rejected", 0)],
)
def test_prompts_around_the_model_length(make_harness, make_request, prompt_len, reason, tokens):
    harness = make_harness(max_model_len=32)
    record = harness.run([make_request("a", prompt_len=prompt_len)])["a"]
    assert (record.finish_reason, record.output_tokens) == (reason, tokens)
    if reason == "rejected":
        assert str(prompt_len) in record.message
        assert "engine.max_model_len=32" in record.message


def test_a_request_larger_than_the_pool_is_refused_and_the_next_runs(
    make_harness, make_request, expect
):
    harness = make_harness(
        num_blocks=13, block_size=8, max_model_len=120, max_num_batched_tokens=64
    )
    fits = make_request("fits", prompt_len=94, max_tokens=10)
    records = harness.run([make_request("large", prompt_len=100, max_tokens=10), fits])
    assert records["large"].finish_reason == "rejected"
    assert "104 tokens" in records["large"].message
    assert "13 blocks of 8" in records["large"].message
    assert records["fits"].output_token_ids == expect(fits, 120)


def test_other_refusals_say_why(make_harness, make_request):
    harness = make_harness()
    records = harness.run(
        [
            make_request("empty", prompt_len=0),
            make_request("none", max_tokens=0),
            make_request("foreign", prompt_token_ids=(3, 100)),
        ]
    )
    assert "empty" in records["empty"].message
    assert "max_tokens=0" in records["none"].message
    assert "vocabulary of 100" in records["foreign"].message
    assert [event.kind for event in harness.log.events] == ["reject"] * 3


def test_a_live_id_is_refused_a_second_time(make_harness, make_request):
    harness = make_harness()
    harness.engine.run([make_request("a"), make_request("a", first=30)])
    reasons = [record.finish_reason for record in harness.log.requests]
    assert sorted(reasons) == ["length", "rejected"]
    refused = next(r for r in harness.log.requests if r.finish_reason == "rejected")
    assert "request_id=a" in refused.message
    assert all(step.running >= 0 and step.waiting >= 0 for step in harness.log.steps)


def test_watermark_holds_back_but_not_from_an_idle_engine(make_harness, make_request):
    requests = [make_request(name, prompt_len=24, max_tokens=2) for name in "ab"]
    harness = make_harness(num_blocks=13, admission=FullPrompt(watermark=0.5), prefix_caching=False)
    records = harness.run(requests)
    assert records["b"].first_scheduled_s >= records["a"].finish_s
    harness = make_harness(num_blocks=13, admission=FullPrompt(watermark=0.0), prefix_caching=False)
    records = harness.run(requests)
    assert records["b"].first_scheduled_s < records["a"].finish_s


def test_priority_orders_the_queue_but_displaces_nobody(make_harness, make_request):
    requests = [
        make_request("low", priority=5, max_tokens=8),
        make_request("middle", priority=5, arrival_s=1.5),
        make_request("high", priority=0, arrival_s=2.5),
    ]
    start = {}
    for policy in ("fcfs", "priority"):
        harness = make_harness(max_num_seqs=1, schedule=Continuous(policy=policy))
        records = harness.run(requests)
        start[policy] = {k: r.first_scheduled_s for k, r in records.items()}
        assert records["low"].num_preemptions == 0
    assert start["fcfs"]["middle"] < start["fcfs"]["high"]
    assert start["priority"]["high"] < start["priority"]["middle"]
    assert start["priority"]["high"] >= 8


def test_abort_gives_every_block_back(make_config, make_request):
    state = init_state(make_config())
    scheduler.submit(state, make_request("a"), 0.0)
    scheduler.submit(state, make_request("b", first=40), 0.0)
    plan = scheduler.schedule(state, 0.0)
    with pytest.raises(InvariantError, match="in flight"):
        scheduler.abort(state, "a", 0.5)
    tokens = np.full(plan.prefills.num_rows, 20, np.int32)
    result = StepResult(prefill_tokens=tokens, decode_tokens=tokens[:0], duration_s=1.0)
    scheduler.commit(state, plan, result, 1.0)
    scheduler.abort(state, "a", 1.0)
    scheduler.abort(state, "b", 1.0)
    assert state.spare_blocks == 16
    assert [record.finish_reason for record in state.records] == ["failed", "failed"]


def test_state_pickles_and_branches(make_config, make_request):
    state = init_state(make_config())
    scheduler.submit(state, make_request("a"), 0.0)
    copy = pickle.loads(pickle.dumps(state))
    plan, again = scheduler.schedule(state, 0.0), scheduler.schedule(copy, 0.0)
    np.testing.assert_array_equal(plan.prefills.block_tables, again.prefills.block_tables)
    np.testing.assert_array_equal(plan.prefills.tokens, again.prefills.tokens)
    assert len(state.running) == len(copy.running) == 1


def test_a_schedule_without_commit_is_refused(make_config, make_request):
    state = init_state(make_config())
    scheduler.submit(state, make_request("a"), 0.0)
    scheduler.schedule(state, 0.0)
    with pytest.raises(InvariantError, match="not been committed"):
        scheduler.schedule(state, 0.0)


def test_sizes_below_one_are_refused_together(make_config):
    with pytest.raises(ConfigError) as error:
        make_config(block_size=0, max_num_seqs=-1)
    assert len(error.value.problems) == 2
