"""Swap or recompute by measured cost: the decision and its estimates are in the event."""

import pytest

from paxkv.policies.preemption import Auto, Recompute


@pytest.fixture
def events(make_harness, make_request, expect):
    """Preemption events of a busy run, in which steps and copies take what is given."""

    def run(step_s, bytes_per_block=1000, preemption=None, **changes):
        harness = make_harness(
            num_blocks=12,
            prefix_caching=False,
            preemption=preemption or Auto(),
            bytes_per_block=bytes_per_block,
            **changes,
        )
        harness.executor.step_s = step_s
        requests = [
            make_request(f"r{i}", prompt_len=5 + i, max_tokens=14, first=11 * i) for i in range(6)
        ]
        records = harness.run(requests)
        for request in requests:
            assert records[request.request_id].output_token_ids == expect(request)
        return [event for event in harness.log.events if event.kind == "preempt"]

    return run


def test_the_first_one_swaps_to_measure_the_copy(events):
    first, *others = events(step_s=1.0)
    assert first.data["mode"] == "swap"
    assert first.data["swap_s"] is None
    assert first.data["recompute_s"] > 0
    assert all(event.data["swap_s"] > 0 for event in others)


def test_slow_steps_make_it_swap_and_slow_copies_make_it_recompute(events):
    # A block of 1,000 bytes takes 10 ms to copy; a prompt of some 8 tokens takes about a step.
    slow_steps = events(step_s=100.0)
    assert {event.data["mode"] for event in slow_steps} == {"swap"}
    slow_copies = events(step_s=0.5, bytes_per_block=1_000_000)
    assert len(slow_copies) > 1
    assert {event.data["mode"] for event in slow_copies[1:]} == {"recompute"}


@pytest.mark.parametrize(
    ("step_s", "bytes_per_block"), [(0.5, 1_000_000), (5.0, 1000), (100.0, 1000)]
)
def test_the_cheaper_one_is_chosen_each_time(events, step_s, bytes_per_block):
    for event in events(step_s=step_s, bytes_per_block=bytes_per_block)[1:]:
        swap_s, recompute_s = event.data["swap_s"], event.data["recompute_s"]
        assert event.data["mode"] == ("swap" if swap_s < recompute_s else "recompute")


def test_a_full_host_pool_recomputes_whatever_the_cost(events):
    for event in events(step_s=100.0, preemption=Auto(host_blocks=0)):
        assert event.data["mode"] == "recompute"


def test_a_fixed_mode_estimates_nothing(events):
    for event in events(step_s=1.0, preemption=Recompute()):
        assert event.data["swap_s"] is event.data["recompute_s"] is None
