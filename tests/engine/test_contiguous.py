"""Blocks side by side: the waste and the fragmentation of allocators before paging, for real."""

import numpy as np
import pytest

from paxkv.blocks.runs import largest_free_run
from paxkv.policies.admission import FullPrompt
from paxkv.policies.allocator import ContiguousMax, ContiguousOracle, ContiguousPow2, Paged
from paxkv.policies.preemption import Never, Swap
from paxkv.policies.schedule import Continuous, Static

RUNS = {"max": ContiguousMax(), "pow2": ContiguousPow2(), "oracle": ContiguousOracle()}


@pytest.fixture
def make_contiguous(make_harness):
    return lambda **changes: make_harness(
        **{"prefix_caching": False, "preemption": Never(), "allocator": ContiguousOracle()}
        | changes
    )


@pytest.mark.parametrize(("allocator", "blocks"), [("max", 12), ("pow2", 1 + 4), ("oracle", 1 + 3)])
def test_each_reserves_its_own_measure_on_entry(make_contiguous, make_request, allocator, blocks):
    harness = make_contiguous(allocator=RUNS[allocator])
    harness.submit(make_request("a", prompt_len=4, max_tokens=11))  # pow2 of 11 is 16
    harness.step()
    ids = harness.state.rows.blocks(harness.state.running[0].row)
    np.testing.assert_array_equal(ids, np.arange(ids[0], ids[0] + blocks))
    harness.finish()
    record = harness.log.steps[0]
    assert record.blocks_live == blocks
    assert record.tokens_held == 4


def test_waste_orders_the_allocators(make_contiguous, make_harness, make_request):
    requests = [make_request(f"r{i}", prompt_len=5, max_tokens=9, first=i) for i in range(6)]
    occupancy, steps = {}, {}
    for name, allocator in (RUNS | {"paged": Paged()}).items():
        harness = (
            make_harness(prefix_caching=False)
            if name == "paged"
            else make_contiguous(allocator=allocator)
        )
        harness.run(requests)
        busy = [step for step in harness.log.steps if step.blocks_live]
        held, tokens = sum(s.blocks_live for s in busy), sum(s.tokens_held for s in busy)
        occupancy[name], steps[name] = tokens / (held * 4), len(harness.log.steps)
    assert occupancy["max"] < occupancy["pow2"] < occupancy["oracle"] < occupancy["paged"]
    assert steps["max"] > steps["pow2"] >= steps["paged"]


def test_holes_keep_a_request_out_though_enough_blocks_are_free(
    make_contiguous, make_request, expect
):
    # Four neighbours of 4 blocks fill the pool; the second and the fourth end. 8 blocks are free,
    # 4 side by side: a request of 5 waits until a neighbour of a hole ends.
    long, short = {"prompt_len": 6, "max_tokens": 10}, {"prompt_len": 14, "max_tokens": 2}
    harness = make_contiguous()
    requests = [
        make_request("a", **long),
        make_request("b", first=20, **short),
        make_request("c", first=40, **long),
        make_request("d", first=60, **short),
    ]
    harness.submit(*requests[:2])
    harness.step()
    harness.submit(*requests[2:])
    harness.step(3)
    assert harness.running == ["a", "c"]
    assert harness.state.spare_blocks == 8
    assert largest_free_run(harness.state.pool) == 4
    large = make_request("large", prompt_len=10, max_tokens=10, first=80)
    harness.submit(large)
    harness.step()
    assert harness.running == ["a", "c"]
    step = harness.log.steps[-1]
    assert 1 - step.largest_free_run_blocks / step.blocks_free == 0.5
    records = harness.finish()
    assert records["large"].first_scheduled_s >= records["a"].finish_s
    for request in (*requests, large):
        assert records[request.request_id].output_token_ids == expect(request)


def test_paged_blocks_know_no_holes(make_harness, make_request):
    harness = make_harness(
        prefix_caching=False, max_num_batched_tokens=64, admission=FullPrompt(watermark=0.0)
    )
    for name, tokens in (("a", 10), ("b", 2), ("c", 10), ("d", 2)):
        harness.submit(make_request(name, prompt_len=14, max_tokens=tokens))
    harness.step(3)
    harness.submit(make_request("large", prompt_len=20, max_tokens=4))
    harness.step()
    assert "large" in harness.running
    harness.finish()


@pytest.mark.parametrize("allocator", RUNS)
def test_the_largest_request_that_is_taken_can_start(make_contiguous, make_request, allocator):
    harness = make_contiguous(allocator=RUNS[allocator], num_blocks=12)
    assert harness.submit(make_request("a", prompt_len=40, max_tokens=8)) == [True]
    assert harness.finish()["a"].output_tokens == 8
    harness = make_contiguous(allocator=RUNS[allocator], num_blocks=11)
    assert harness.submit(make_request("a", prompt_len=40, max_tokens=8)) == [False]


def test_a_displaced_request_gives_its_run_back(make_contiguous, make_request, expect):
    harness = make_contiguous(
        num_blocks=12,
        preemption=Swap(),
        schedule=Continuous(policy="priority", preempt_to_admit=True),
    )
    low = make_request("low", prompt_len=30, max_tokens=10, priority=5)
    high = make_request("high", prompt_len=30, max_tokens=4, priority=0, first=50)
    harness.submit(low)
    harness.step(3)
    harness.submit(high)
    harness.step()
    assert harness.running == ["high"]
    records = harness.finish()
    assert records["low"].num_swaps == 1
    for request in (low, high):
        assert records[request.request_id].output_token_ids == expect(request)


def test_nobody_is_displaced_for_a_run_that_would_not_be_there(make_contiguous, make_request):
    # 8 of 12 blocks could be freed, 4 and 4 around a request as urgent as the one that waits.
    harness = make_contiguous(
        num_blocks=12,
        preemption=Swap(),
        max_num_batched_tokens=64,
        schedule=Continuous(policy="priority", preempt_to_admit=True, ageing_s=float("inf")),
        admission=FullPrompt(watermark=0.0),
    )
    for name, priority in (("low", 5), ("high", 0), ("lower", 6)):
        harness.submit(make_request(name, prompt_len=8, max_tokens=8, priority=priority))
        harness.step()
    harness.submit(make_request("urgent", prompt_len=16, max_tokens=4, priority=0))
    harness.step()
    assert harness.running == ["low", "high", "lower"]
    records = harness.finish()
    assert not any(record.num_preemptions for record in records.values())


def test_nobody_is_preempted_where_nothing_preempts(make_contiguous, make_request):
    harness = make_contiguous(
        num_blocks=12, schedule=Continuous(policy="priority", preempt_to_admit=True)
    )
    harness.submit(make_request("low", prompt_len=30, max_tokens=10, priority=5))
    harness.step()
    harness.submit(make_request("high", prompt_len=30, max_tokens=4, priority=0))
    records = harness.finish()
    assert records["high"].first_scheduled_s >= records["low"].finish_s


def test_static_batches_run_to_their_end(make_harness, make_request):
    harness = make_harness(schedule=Static(), max_num_seqs=3, num_blocks=40)
    for i in range(5):
        harness.submit(make_request(f"r{i}", prompt_len=6, max_tokens=2 + 3 * i, first=9 * i))
    records = harness.finish()
    first = max(records[f"r{i}"].finish_s for i in range(3))
    assert all(records[f"r{i}"].first_scheduled_s >= first for i in (3, 4))
    assert max(step.running for step in harness.log.steps) == 3


def test_a_static_batch_is_filled_whatever_the_first_step_computes(make_harness, make_request):
    harness = make_harness(schedule=Static(), max_num_batched_tokens=4, num_blocks=40)
    for i in range(4):
        harness.submit(make_request(f"r{i}", prompt_len=10, max_tokens=3, first=9 * i))
    harness.step()
    assert len(harness.running) == 4
    assert harness.log.steps[0].prefill_tokens == 4
    harness.finish()


def test_a_request_preempted_from_a_static_batch_waits_for_the_next(make_harness, make_request):
    harness = make_harness(schedule=Static(), num_blocks=8, prefix_caching=False)
    harness.submit(
        make_request("a", prompt_len=12, max_tokens=12),
        make_request("b", prompt_len=12, max_tokens=12, first=50),
    )
    records = harness.finish()
    assert records["b"].num_preemptions == 1
    when = next(e.time_s for e in harness.log.events if e.kind == "preempt")
    ended = records["a"].finish_s
    assert ended > when + 3
    assert not [t for t in records["b"].token_times_s if when < t <= ended]
