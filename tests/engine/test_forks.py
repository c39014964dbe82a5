"""Samples of one prompt: they share its blocks, copy the last one, and go their own ways."""

from dataclasses import replace

import numpy as np
import pytest

from paxkv.cache.groups import LayerGroup, Span
from paxkv.policies.preemption import Recompute, Swap
from paxkv.policies.schedule import Continuous


def samples(leader, count):
    """The leader and further samples of its prompt, each with a random stream of its own."""
    return [
        leader,
        *[
            replace(leader, request_id=f"{leader.request_id}.{i}", fork_of="lead", seed=i)
            for i in range(1, count)
        ],
    ]


@pytest.fixture
def lead(make_request):
    return make_request("lead", prompt_len=14, max_tokens=8)


def copies(harness):
    return [copy for plan in harness.executor.plans for copy in plan.copies]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_four_samples_compute_their_prompt_once(make_harness, lead, expect, prefix_caching):
    harness = make_harness(prefix_caching=prefix_caching, num_blocks=32)
    requests = samples(lead, 4)
    harness.submit(*requests)
    harness.step()
    assert harness.running == ["lead"]  # the others wait for its prompt
    harness.step()
    assert harness.running == ["lead", "lead.1", "lead.2", "lead.3"]
    tables = [harness.state.rows.blocks(sequence.row) for sequence in harness.state.running]
    for table in tables[1:]:
        np.testing.assert_array_equal(table[:3], tables[0][:3])  # 12 of 13 tokens before the last
    assert len({int(table[3]) for table in tables}) == 4  # each has a last block of its own
    assert [len(copy.src) for copy in copies(harness)] == [1, 1, 1]
    records = harness.finish()
    assert {records[r.request_id].output_token_ids for r in requests} == {expect(lead)}
    assert [records[r.request_id].forked_prompt_tokens for r in requests] == [0, 13, 13, 13]
    assert not any(record.cached_prompt_tokens for record in records.values())
    # The prompt, the last token of it for each other sample, and nothing else.
    assert sum(step.prefill_tokens for step in harness.log.steps) == 14
    assert sum(step.decode_rows for step in harness.log.steps) == 3 + 4 * 7


def test_samples_have_streams_of_their_own(make_harness, lead):
    # AReaL#1524: what an executor draws with differs between samples, and not between runs.
    streams = []
    for _ in range(2):
        harness = make_harness(num_blocks=32)
        harness.submit(*samples(replace(lead, temperature=1.0), 4))
        harness.step(3)
        sampling = harness.executor.plans[-1].decodes.sampling
        streams.append(
            list(zip(sampling.seed.tolist(), sampling.output_index.tolist(), strict=True))
        )
        harness.finish()
    assert streams[0] == streams[1] == [(0, 2), (1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 8, 9])
def test_a_prompt_of_any_length_forks(make_harness, make_request, expect, prompt_len):
    lead = make_request("lead", prompt_len=prompt_len, max_tokens=6)
    harness = make_harness(prefix_caching=False, num_blocks=32)
    harness.submit(*samples(lead, 3))
    records = harness.finish()
    assert all(record.output_token_ids == expect(lead) for record in records.values())
    # A prompt whose last token starts a block leaves nothing half full to copy.
    assert len(copies(harness)) == (0 if prompt_len % 4 == 1 else 2)


@pytest.mark.parametrize("span", [Span(6), Span(5, 3), Span(1), Span(40)])
def test_samples_share_what_their_windows_see(make_harness, lead, expect, span):
    groups = (LayerGroup((0,), span), LayerGroup((1,)))
    harness = make_harness(groups=groups, num_blocks=64, prefix_caching=False)
    harness.submit(*samples(lead, 3))
    records = harness.finish()
    assert all(r.output_token_ids == expect(lead, 48, groups) for r in records.values())
    assert [r.forked_prompt_tokens for r in records.values()].count(13) == 2


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_leader_that_is_aborted_leaves_its_samples_whole(
    make_harness, lead, expect, steps, prefix_caching
):
    harness = make_harness(prefix_caching=prefix_caching, num_blocks=32, max_num_batched_tokens=8)
    requests = samples(lead, 3)
    harness.submit(*requests)
    for _ in range(steps):
        harness.step()
    harness.abort("lead")
    records = harness.finish()
    assert records["lead"].finish_reason == "failed"
    for request in requests[1:]:
        assert records[request.request_id].output_token_ids == expect(lead)


def test_a_held_sample_can_be_aborted(make_harness, lead, expect):
    harness = make_harness()
    harness.submit(*samples(lead, 3))
    harness.abort("lead.1")
    records = harness.finish()
    assert records["lead.1"].finish_reason == "failed"
    assert records["lead.2"].output_token_ids == expect(lead)


def test_a_leader_of_one_token_has_ended_before_its_samples_start(make_harness, lead, expect):
    for prefix_caching, cached in ((True, 12), (False, 0)):
        harness = make_harness(prefix_caching=prefix_caching)
        harness.submit(*samples(replace(lead, max_tokens=1), 2))
        record = harness.finish()["lead.1"]
        assert record.output_token_ids == expect(lead)[:1]
        assert record.cached_prompt_tokens == cached


@pytest.mark.parametrize("mode", [Recompute(), Swap()], ids=["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_survive_preemption_at_a_full_pool(
    make_harness, make_request, expect, mode, prefix_caching
):
    lead = make_request("lead", prompt_len=14, max_tokens=20)
    other = make_request("other", prompt_len=20, max_tokens=20, first=60)
    harness = make_harness(num_blocks=14, preemption=mode, prefix_caching=prefix_caching)
    harness.submit(other, *samples(lead, 4))
    records = harness.finish()
    assert sum(record.num_preemptions for record in records.values()) > 0
    assert records.pop("other").output_token_ids == expect(other)
    assert all(record.output_token_ids == expect(lead) for record in records.values())


def test_a_leader_keeps_its_blocks_until_they_are_copied(make_harness, make_request, expect):
    # A sample starts, and in the same step a swapped request would displace its leader, whose last
    # block would be overwritten before the sample has copied it.
    harness = make_harness(
        max_num_seqs=3,
        max_num_batched_tokens=8,
        num_blocks=32,
        prefix_caching=False,
        preemption=Swap(),
        schedule=Continuous(policy="priority", preempt_to_admit=True),
    )
    lead = make_request("lead", prompt_len=10, max_tokens=20, priority=9)
    first, second = (
        replace(lead, request_id=name, fork_of="lead", priority=0) for name in ("first", "second")
    )
    short = make_request("short", prompt_len=2, max_tokens=2, first=40)
    swapped = make_request("swapped", prompt_len=2, max_tokens=9, first=60, priority=1)
    harness.submit(lead)
    harness.step()
    harness.submit(short, swapped, first)
    harness.step(2)
    assert harness.state.num_swapped == 1  # it gave way to the first sample
    harness.submit(second)
    plan = harness.step()
    assert harness.running == ["lead", "first", "second"]
    assert len(plan.copies) == 1
    plan = harness.step()  # now the leader may be displaced
    assert (len(plan.swap_outs), len(plan.swap_ins)) == (1, 1)
    records = harness.finish()
    for request in (lead, first, second, short, swapped):
        assert records[request.request_id].output_token_ids == expect(request)


def test_forks_of_somebody_else_are_refused(make_harness, lead, make_request):
    harness = make_harness()
    ok = harness.submit(
        lead,
        replace(lead, request_id="other prompt", fork_of="lead", prompt_token_ids=(1, 2)),
        replace(lead, request_id="other tenant", fork_of="lead", tenant="b"),
    )
    assert ok == [True, False, False]
    records = harness.finish()
    assert "fork_of=lead: a fork has the prompt" in records["other prompt"].message
    assert "fork_of=lead: a fork has the tenant" in records["other tenant"].message


def test_an_id_that_is_used_again_is_not_taken_for_the_leader(make_harness, make_request, expect):
    # The leader ends while its sample waits for a row; then its id names another prompt, which
    # is computed by the time the sample gets its row.
    harness = make_harness(
        max_num_seqs=2, prefix_caching=False, num_blocks=32, schedule=Continuous(policy="priority")
    )
    lead = make_request("lead", prompt_len=14, max_tokens=2)
    fork = replace(lead, request_id="fork", fork_of="lead", priority=9)
    other = make_request("other", prompt_len=6, max_tokens=9, first=30)
    harness.submit(lead, other, fork)
    harness.step(2)
    harness.submit(make_request("lead", prompt_len=14, max_tokens=12, first=60))
    harness.step()
    assert harness.running == ["other", "lead"]
    records = harness.finish()
    assert records["fork"].output_token_ids == expect(lead)[:2]
    assert records["fork"].forked_prompt_tokens == 0
