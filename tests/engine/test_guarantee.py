"""Promises: what a request can ever hold is there for it, so it is never preempted."""

from dataclasses import dataclass

import pytest

from paxkv.cache.groups import LayerGroup, Span
from paxkv.policies.admission import Expected, FirstChunk, FullPrompt, Guaranteed
from paxkv.policies.preemption import Never, Recompute, Swap


def busy(make_request, count=6):
    return [
        make_request(f"r{i}", prompt_len=5 + i, max_tokens=14, first=11 * i, arrival_s=0.4 * i)
        for i in range(count)
    ]


@pytest.mark.parametrize("preemption", [Never(), Recompute()], ids=["none", "recompute"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    "groups",
    [(LayerGroup((0,)),), (LayerGroup((0,), Span(6)), LayerGroup((1,)))],
    ids=["full", "mixed"],
)
def test_what_is_promised_is_never_preempted(
    make_harness, make_request, expect, preemption, prefix_caching, groups
):
    harness = make_harness(
        num_blocks=12 * len(groups),
        admission=Guaranteed(),
        preemption=preemption,
        prefix_caching=prefix_caching,
        groups=groups,
        max_num_batched_tokens=8,
    )
    requests = busy(make_request)
    most = 0

    def watch(plan):
        nonlocal most
        state = harness.state
        promised = sum(sequence.promised_blocks for sequence in state.running)
        assert promised <= state.config.num_blocks
        assert all(sequence.promised_blocks for sequence in state.running)
        most = max(most, len(state.running))

    harness.executor.on_plan = watch
    records = harness.run(requests)
    assert most > 1
    assert sum(record.num_preemptions for record in records.values()) == 0
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request, 48, groups)


def test_a_promise_is_kept_from_those_who_have_none(make_harness, make_request, expect):
    # After one preemption b comes back under a promise: from then on others give way to it.
    harness = make_harness(
        num_blocks=12,
        max_preemptions=1,
        prefix_caching=False,
        max_num_batched_tokens=64,
        admission=FirstChunk(watermark=0.0),
    )
    requests = busy(make_request)
    records = harness.run(requests)
    assert max(record.num_preemptions for record in records.values()) == 1
    assert sum(record.num_preemptions for record in records.values()) >= 2
    for request in requests:
        assert records[request.request_id].output_token_ids == expect(request)


@pytest.mark.parametrize("max_preemptions", [1, 2, 8])
@pytest.mark.parametrize("mode", [Recompute(), Swap()], ids=["recompute", "swap"])
def test_preemptions_of_a_request_are_bounded(make_harness, make_request, mode, max_preemptions):
    harness = make_harness(
        num_blocks=10,
        max_preemptions=max_preemptions,
        preemption=mode,
        admission=FirstChunk(watermark=0.0),
        max_num_batched_tokens=6,
        prefix_caching=False,
    )
    requests = [make_request(f"r{i}", prompt_len=20, max_tokens=18, first=13 * i) for i in range(6)]
    records = harness.run(requests)
    counts = [record.num_preemptions for record in records.values()]
    assert max(counts) <= max_preemptions
    if mode == Recompute() and max_preemptions < 8:
        assert max(counts) == max_preemptions  # the bound was reached
    # vllm#42827: each request tells its own preemptions and what they cost.
    events = [e.request_id for e in harness.log.events if e.kind == "preempt"]
    assert {name: events.count(name) for name in records} == {
        name: record.num_preemptions for name, record in records.items()
    }
    if mode == Recompute():
        for record in records.values():
            assert (record.recomputed_tokens > 0) == (record.num_preemptions > 0)


def test_a_promise_ends_with_its_request(make_harness, make_request):
    harness = make_harness(admission=Guaranteed(), num_blocks=8)
    harness.submit(
        make_request("a", prompt_len=8, max_tokens=20),
        make_request("b", prompt_len=8, max_tokens=20),
    )
    harness.step()
    assert harness.running == ["a"]
    harness.abort("a")
    harness.step()
    assert harness.running == ["b"]
    harness.finish()


def test_first_chunk_starts_earlier_than_full_prompt(make_harness, make_request):
    started = {}
    for admission in (FullPrompt(watermark=0.0), FirstChunk(watermark=0.0)):
        harness = make_harness(
            admission=admission, num_blocks=14, max_num_batched_tokens=8, prefix_caching=False
        )
        records = harness.run(
            [
                make_request("a", prompt_len=16, max_tokens=20),
                make_request("b", prompt_len=40, max_tokens=4, first=50),
            ]
        )
        started[type(admission)] = records["b"].first_scheduled_s
        assert records["b"].output_tokens == 4
    assert started[FirstChunk] < started[FullPrompt]


def test_expected_admits_more_once_outputs_turn_out_short(make_harness, make_request, expect):
    # Requests whose limit is 20 and that stop early teach it that more fit at a time.
    request = make_request("x", prompt_len=6, max_tokens=20)
    ends = (expect(request)[1],)
    most = {}
    for name, tokens in (("ignore", True), ("stop", False)):
        harness = make_harness(
            admission=Expected(watermark=0.0, prior_share=0.9, prior_tokens=20),
            eos_token_ids=ends,
            num_blocks=16,
            max_num_batched_tokens=64,
        )
        for i in range(12):
            harness.submit(make_request(f"r{i}", prompt_len=6, max_tokens=20, ignore_eos=tokens))
        harness.finish()
        assert not any(step.preemptions for step in harness.log.steps)
        most[name] = max(step.running for step in harness.log.steps[4:])
    assert most["stop"] > most["ignore"]


@dataclass(frozen=True)
class PromiseLong:
    """Promises everything to long requests, and nothing to short ones."""

    def choose(self, view, need):
        if need.max_blocks >= 10:
            return Guaranteed().choose(view, need)
        return FullPrompt(watermark=0.0).choose(view, need)


def test_what_is_promised_is_kept_free(make_harness, make_request):
    harness = make_harness(
        num_blocks=12, prefix_caching=False, admission=PromiseLong(), max_num_batched_tokens=64
    )
    harness.submit(
        make_request("promised", prompt_len=8, max_tokens=32),
        make_request("small", prompt_len=4, max_tokens=8, first=30),
        make_request("large", prompt_len=12, max_tokens=4, first=60),
    )
    harness.step()
    assert harness.running == ["promised", "small"]  # 9 blocks are free, 8 of them promised
    assert harness.state.spare_blocks == 9
    while "large" not in harness.running:
        harness.step()
        small = harness.state.sequences.get("small")
        if small is not None and {"promised", "small"} <= set(harness.running):
            assert len(harness.state.rows.blocks(small.row)) <= 2
    records = harness.finish()
    assert records["promised"].num_preemptions == 0
    assert records["small"].num_preemptions >= 1  # it outgrew the two blocks that are not promised
    assert records["large"].first_scheduled_s >= records["promised"].finish_s
