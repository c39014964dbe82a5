"""Preemption: outputs stay the same, work is counted once, nothing stalls."""

from dataclasses import dataclass

import pytest

from paxkv.errors import InvariantError
from paxkv.policies.admission import FullPrompt
from paxkv.policies.preemption import Recompute, Swap

MODES = {"recompute": Recompute(), "swap": Swap(), "swap-2": Swap(host_blocks=2)}


def busy(make_request, count=6):
    return [
        make_request(f"r{i}", prompt_len=5 + i, max_tokens=14, first=11 * i, arrival_s=0.4 * i)
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pool_that_forces_preemption_changes_no_output(
    make_harness, make_request, expect, mode, prefix_caching
):
    harness = make_harness(
        num_blocks=12,
        preemption=MODES[mode],
        prefix_caching=prefix_caching,
        max_num_batched_tokens=16,
    )
    requests = busy(make_request)
    records = harness.run(requests)
    assert sum(record.num_preemptions for record in records.values()) >= 2
    for request in requests:
        record = records[request.request_id]
        assert record.output_token_ids == expect(request, 48)
        assert record.output_tokens == 14  # regenerated tokens are not counted again
        assert len(record.token_times_s) == 14
    assert sum(step.preemptions for step in harness.log.steps) == sum(
        record.num_preemptions for record in records.values()
    )
    assert sum(step.recomputed_tokens for step in harness.log.steps) == sum(
        record.recomputed_tokens for record in records.values()
    )


def test_swap_recomputes_nothing_and_moves_each_block_twice(make_harness, make_request):
    harness = make_harness(num_blocks=12, preemption=Swap(), prefix_caching=False)
    records = harness.run(busy(make_request))
    out = sum(step.swap_out_blocks for step in harness.log.steps)
    assert out == sum(step.swap_in_blocks for step in harness.log.steps) > 0
    assert sum(record.recomputed_tokens for record in records.values()) == 0
    assert sum(record.num_swaps for record in records.values()) >= 1


def test_swap_without_host_blocks_falls_back_to_recompute(make_harness, make_request, expect):
    harness = make_harness(num_blocks=12, preemption=Swap(host_blocks=0), prefix_caching=False)
    requests = busy(make_request)
    records = harness.run(requests)
    assert all(records[r.request_id].output_token_ids == expect(r, 48) for r in requests)
    modes = {event.data["mode"] for event in harness.log.events if event.kind == "preempt"}
    assert modes == {"recompute"}


def test_only_as_many_victims_as_needed(make_harness, make_request):
    # Three requests fill the pool; the first to grow needs one block, so one victim gives way.
    requests = [
        make_request(name, prompt_len=16, max_tokens=6, first=20 * i)
        for i, name in enumerate("abc")
    ]
    harness = make_harness(
        num_blocks=12,
        max_num_batched_tokens=64,
        prefix_caching=False,
        admission=FullPrompt(watermark=0.0),
    )
    harness.run(requests)
    assert max(step.preemptions for step in harness.log.steps) == 1


def test_two_requests_that_each_lack_a_block_both_finish(make_harness, make_request, expect):
    requests = [
        make_request("a", prompt_len=16, max_tokens=4),
        make_request("b", prompt_len=12, max_tokens=4, first=50),
    ]
    harness = make_harness(num_blocks=7, max_num_batched_tokens=64)
    records = harness.run(requests)
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48)


def test_the_oldest_request_is_never_preempted_by_lifo(make_harness, make_request):
    records = make_harness(num_blocks=12).run(busy(make_request))
    assert records["r0"].num_preemptions == 0


def test_a_preempted_request_reports_what_it_lost(make_harness, make_request):
    harness = make_harness(num_blocks=12, prefix_caching=False)
    records = harness.run(busy(make_request))
    preempted = [record for record in records.values() if record.num_preemptions]
    assert preempted
    assert all(record.recomputed_tokens > 0 for record in preempted)
    events = [event for event in harness.log.events if event.kind == "preempt"]
    assert len(events) == sum(record.num_preemptions for record in records.values())


def test_a_swapped_request_that_is_aborted_leaves_nothing_in_host_memory(
    make_harness, make_request
):
    harness = make_harness(num_blocks=12, preemption=Swap(), prefix_caching=False)
    harness.submit(*busy(make_request))
    while not harness.state.num_swapped:
        harness.step()
    swapped = next(s for s in harness.state.waiting if s.host_block_ids is not None)
    harness.abort(swapped.request.request_id)
    assert harness.state.num_swapped == 0
    assert harness.finish()[swapped.request.request_id].finish_reason == "failed"


def test_an_abort_waits_for_the_swap_in_under_way(make_harness, make_request):
    # vllm#46283: blocks come back, and not before the copy can no longer write to them.
    harness = make_harness(num_blocks=12, preemption=Swap(), prefix_caching=False)
    state, refused = harness.state, []

    def abort_in_flight(plan):
        for move in plan.swap_ins:
            with pytest.raises(InvariantError, match="in flight"):
                harness.abort(move.request_id)
            refused.append(move.request_id)

    harness.executor.on_plan = abort_in_flight
    harness.submit(*busy(make_request))
    while not refused:
        harness.step()
    held = len(state.rows.blocks(state.sequences[refused[0]].row))
    spare = state.spare_blocks
    harness.abort(refused[0])
    assert state.spare_blocks == spare + held
    assert int(state.host_pool.num_free) == state.host_pool.num_blocks - sum(
        len(s.host_block_ids) for s in state.waiting if s.host_block_ids is not None
    )
    harness.finish()


@dataclass(frozen=True)
class Stranger:
    def choose(self, candidates, need_blocks):
        return None


@dataclass(frozen=True)
class Sideways:
    preempts = True

    def host_capacity(self, num_blocks):
        return 1

    def choose(self, victim, host):
        return "swap"


@dataclass(frozen=True)
class Maybe:
    def choose(self, view, need):
        return "perhaps"


@dataclass(frozen=True)
class Never:
    def choose(self, view, need):
        return "wait"


@dataclass(frozen=True)
class Greedy:
    def choose(self, view, need):
        return "context"


@dataclass(frozen=True)
class WrongBlocks:
    def choose(self, oldest_first, need_blocks):
        return [10_000] * need_blocks


@pytest.mark.parametrize(
    ("axis", "policy", "message"),
    [
        ("victim", Stranger(), "victim: Stranger chose None"),
        ("preemption", Sideways(), "preempt: Sideways answered 'swap'"),
        ("admission", Maybe(), "admit: Maybe answered 'perhaps'"),
        ("admission", Never(), "Never admits none"),
        ("admission", Greedy(), "admit: Greedy admitted request"),
        ("eviction", WrongBlocks(), "evict: WrongBlocks was asked for"),
    ],
)
def test_a_policy_that_returns_nonsense_is_named(make_harness, make_request, axis, policy, message):
    harness = make_harness(num_blocks=12, **{axis: policy})
    with pytest.raises(InvariantError, match=message):
        harness.engine.run(
            [
                *busy(make_request),
                make_request("late", first=77, arrival_s=60.0, prompt_len=40, max_tokens=4),
            ]
        )
