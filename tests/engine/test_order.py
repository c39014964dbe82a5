"""Who comes first, and who has to make room for whom."""

import pytest

from paxkv.policies.preemption import Recompute, Swap
from paxkv.policies.schedule import Continuous

DISPLACING = Continuous(policy="priority", preempt_to_admit=True)


def preempted(harness):
    return [(e.request_id, e.data["cause"]) for e in harness.log.events if e.kind == "preempt"]


def in_order(records):
    """Ids by the time of their first step."""
    return sorted(records, key=lambda name: records[name].first_scheduled_s)


@pytest.mark.parametrize("mode", [Recompute(), Swap()], ids=["recompute", "swap"])
def test_an_urgent_arrival_displaces_and_equals_never_do(make_harness, make_request, expect, mode):
    # vllm#54530: one row; low runs, high arrives; then a third, equal to high.
    harness = make_harness(max_num_seqs=1, schedule=DISPLACING, preemption=mode)
    low = make_request("low", priority=5)
    high = make_request("high", priority=0, first=30, arrival_s=3.0)
    equal = make_request("equal", priority=0, first=60, arrival_s=5.0)
    records = harness.run([low, high, equal])
    assert preempted(harness) == [("low", "displace")]
    assert records["high"].first_scheduled_s == 3.0
    assert records["equal"].first_scheduled_s >= records["high"].finish_s
    assert records["low"].finish_s > records["equal"].finish_s
    for request in (low, high, equal):
        assert records[request.request_id].output_token_ids == expect(request)


def test_without_the_option_an_arrival_displaces_nobody(make_harness, make_request):
    # vllm#19057: priority orders the queue; only memory pressure or the option preempts.
    for schedule in (Continuous(policy="priority"), DISPLACING):
        harness = make_harness(schedule=schedule)  # memory and rows for both
        harness.run([make_request("low", priority=5), make_request("high", arrival_s=2.0)])
        assert preempted(harness) == []
    harness = make_harness(schedule=Continuous(policy="priority"), max_num_seqs=1)
    records = harness.run([make_request("low", priority=5), make_request("high", arrival_s=2.0)])
    assert preempted(harness) == []
    assert records["high"].first_scheduled_s >= records["low"].finish_s


def test_an_arrival_displaces_for_blocks_and_only_as_many_as_it_needs(make_harness, make_request):
    harness = make_harness(
        schedule=DISPLACING, num_blocks=12, prefix_caching=False, max_num_batched_tokens=64
    )
    low = [
        make_request(f"l{i}", prompt_len=9, max_tokens=3, first=20 * i, priority=5 + i)
        for i in range(3)
    ]
    high = make_request("high", prompt_len=13, max_tokens=3, first=80, arrival_s=1.5)
    records = harness.run([*low, high])
    assert preempted(harness) == [("l2", "displace")]
    assert records["high"].first_scheduled_s == 2.0


def test_nobody_is_displaced_where_it_would_not_do(make_harness, make_request):
    # The urgent one needs more than the displaceable one holds.
    harness = make_harness(
        schedule=DISPLACING, num_blocks=12, prefix_caching=False, max_num_batched_tokens=64
    )
    records = harness.run(
        [
            make_request("equal", prompt_len=21, max_tokens=7, priority=0),
            make_request("low", prompt_len=9, max_tokens=7, first=40, priority=5),
            make_request("high", prompt_len=30, max_tokens=2, first=70, priority=0, arrival_s=1.0),
        ]
    )
    assert preempted(harness) == []
    assert records["high"].first_scheduled_s >= records["equal"].finish_s


def test_ageing_brings_a_waiting_request_ahead_and_protects_it(make_harness, make_request):
    ageing = Continuous(policy="priority", preempt_to_admit=True, ageing_s=2.0)
    harness = make_harness(max_num_seqs=1, schedule=ageing)
    records = harness.run(
        [
            make_request("old", priority=3, max_tokens=12),
            make_request("young", priority=0, max_tokens=2, arrival_s=8.0),  # 6 s make up for 3
        ]
    )
    assert preempted(harness) == []
    assert records["young"].first_scheduled_s >= records["old"].finish_s


@pytest.mark.parametrize("ageing_s", [0.5, float("inf")])
def test_under_a_stream_of_urgent_ones_only_ageing_lets_the_other_start(
    make_harness, make_request, ageing_s
):
    harness = make_harness(
        max_num_seqs=1, schedule=Continuous(policy="priority", ageing_s=ageing_s), num_blocks=40
    )
    stream = [
        make_request(f"u{i:02}", max_tokens=4, first=3 * i, arrival_s=2.0 * i) for i in range(12)
    ]
    records = harness.run([*stream, make_request("other", priority=8, arrival_s=1.0)])
    place = in_order(records).index("other")
    assert (place == 12) == (ageing_s == float("inf"))


def test_sjf_takes_the_shortest_first(make_harness, make_request):
    harness = make_harness(max_num_seqs=1, schedule=Continuous(policy="sjf"))
    records = harness.run(
        [
            make_request("first", max_tokens=2),
            make_request("long", prompt_len=20, max_tokens=9, first=30, arrival_s=0.1),
            make_request("short", prompt_len=3, max_tokens=2, first=60, arrival_s=0.2),
            make_request("middle", prompt_len=8, max_tokens=4, first=90, arrival_s=0.3),
        ]
    )
    assert in_order(records) == ["first", "short", "middle", "long"]


def test_a_preempted_request_returns_ahead_of_later_arrivals(make_harness, make_request):
    harness = make_harness(num_blocks=9, prefix_caching=False, max_num_batched_tokens=64)
    records = harness.run(
        [
            make_request("a", prompt_len=12, max_tokens=10),
            make_request("b", prompt_len=12, max_tokens=10, first=30),
            make_request("c", prompt_len=4, max_tokens=2, first=60, arrival_s=8.0),
        ]
    )
    assert [name for name, _ in preempted(harness)] == ["b"]
    back = next(t for t in records["b"].token_times_s if t > records["a"].finish_s)
    assert records["c"].first_token_s >= back
