"""Tenants: what is reserved is there when claimed, what is lent comes back, limits are hard."""

import pytest

from paxkv.policies.admission import FullPrompt, Guaranteed
from paxkv.policies.eviction import Lfu, Lru, Priority
from paxkv.policies.preemption import Recompute, Swap
from paxkv.policies.schedule import Continuous
from paxkv.policies.tenancy import TenantTable, TenantTerms


def table(unnamed=None, **named):
    terms = {name: TenantTerms(**values) for name, values in named.items()}
    return TenantTable(named=terms, unnamed=unnamed or TenantTerms(), accounts=True)


@pytest.fixture
def tenants(make_harness):
    """A harness of 16 blocks of 4 tokens, with terms by name."""

    def build(unnamed=None, changes=None, **named):
        values = {"tenants": table(unnamed, **named), "admission": FullPrompt(watermark=0.0)}
        return make_harness(**values | {"prefix_caching": False} | (changes or {}))

    return build


def held(harness, tenant):
    return harness.state.accounts.of(tenant).held_blocks


def causes(harness):
    return [(e.request_id, e.data["cause"]) for e in harness.log.events if e.kind == "preempt"]


@pytest.mark.parametrize("mode", [Recompute(), Swap()], ids=["recompute", "swap"])
def test_what_is_lent_is_taken_back_in_the_step_it_is_claimed(tenants, make_request, expect, mode):
    harness = tenants(quiet={"reservation_blocks": 8}, changes={"preemption": mode})
    loans = [
        make_request(f"b{i}", prompt_len=16, max_tokens=16, first=20 * i, tenant="busy")
        for i in range(4)
    ]
    harness.submit(*loans)
    harness.step(2)
    assert held(harness, "busy") > 8  # borrows what the quiet one does not use
    claim = make_request("q", prompt_len=28, max_tokens=4, first=80, tenant="quiet")
    harness.submit(claim)
    harness.step()
    assert "q" in harness.running
    assert held(harness, "quiet") == 7
    assert {cause for _, cause in causes(harness)} == {"reclaim"}
    records = harness.finish()
    for request in (*loans, claim):
        assert records[request.request_id].output_token_ids == expect(request)


def test_a_watermark_does_not_hold_back_a_claim(tenants, make_request):
    changes = {"admission": FullPrompt(watermark=0.5)}
    harness = tenants(quiet={"reservation_blocks": 8}, changes=changes)
    harness.submit(make_request("b", prompt_len=20, max_tokens=4, tenant="busy"))
    harness.step()
    # 11 of 16 blocks are left. Both ask for 6, which would leave less than half of the pool.
    harness.submit(
        make_request("b2", prompt_len=24, max_tokens=4, first=30, tenant="busy"),
        make_request("q", prompt_len=24, max_tokens=4, first=60, tenant="quiet"),
    )
    harness.step()
    assert harness.running == ["b", "q"]


def test_what_borrowers_share_counts_as_what_they_leave_together(tenants, make_request):
    harness = tenants(
        quiet={"reservation_blocks": 12},
        changes={"prefix_caching": True, "max_num_batched_tokens": 64},
    )
    for pair in ("a0", "b0"), ("a1", "b1"):
        harness.submit(
            *[
                make_request(
                    name, prompt_len=13, max_tokens=3, first=30 * (name[0] == "b"), tenant="x"
                )
                for name in pair
            ]
        )
        harness.step()
    assert held(harness, "x") == 2 * (3 + 1 + 1)  # three blocks of each prompt are shared
    harness.submit(make_request("q", prompt_len=45, max_tokens=3, first=60, tenant="quiet"))
    harness.step()  # 6 blocks are missing; each borrower alone would leave one
    assert "q" in harness.running
    harness.finish()


def test_a_claim_is_heard_before_others_borrow_in_the_same_step(tenants, make_request):
    harness = tenants(quiet={"reservation_blocks": 12}, changes={"max_num_batched_tokens": 64})
    harness.submit(
        make_request("s0", prompt_len=13, max_tokens=3, tenant="busy"),
        make_request("s1", prompt_len=13, max_tokens=3, first=30, tenant="busy"),
        make_request("q", prompt_len=40, max_tokens=4, first=50, tenant="quiet"),
    )
    harness.step()
    assert harness.running == ["q", "s0"]
    harness.finish()
    assert not causes(harness)


def test_nobody_within_its_reservation_gives_way(tenants, make_request):
    harness = tenants(
        a={"reservation_blocks": 8}, b={"reservation_blocks": 8}, changes={"max_num_seqs": 6}
    )
    harness.submit(
        *[make_request(f"a{i}", prompt_len=12, max_tokens=16, tenant="a") for i in range(2)],
        *[make_request(f"b{i}", prompt_len=12, max_tokens=16, tenant="b") for i in range(2)],
    )
    harness.finish()
    # Each outgrows its half, and preempts its own: nobody borrows, so nobody reclaims.
    assert {cause for _, cause in causes(harness)} == {"growth"}
    assert {name[0] for name, _ in causes(harness)} == {"a", "b"}


def test_a_growing_request_takes_back_what_its_tenant_has_lent(tenants, make_request, expect):
    harness = tenants(
        quiet={"reservation_blocks": 4},
        changes={"block_size": 16, "num_blocks": 8, "max_num_batched_tokens": 128},
    )
    grows = make_request("q", prompt_len=31, max_tokens=14, tenant="quiet")
    loans = [
        make_request(name, prompt_len=33, max_tokens=14, first=first, tenant="busy")
        for name, first in (("b", 40), ("c", 70))
    ]
    harness.submit(grows, *loans)
    records = harness.finish()
    assert causes(harness) == [("c", "reclaim")]
    for request in (grows, *loans):
        assert records[request.request_id].output_token_ids == expect(request)


def test_a_limit_holds_in_an_empty_pool_and_blocks_nobody_else(tenants, make_request):
    harness = tenants(capped={"limit_blocks": 6})
    capped = [
        make_request(f"c{i}", prompt_len=15, max_tokens=6, first=9 * i, tenant="capped")
        for i in range(3)
    ]
    other = make_request("o", prompt_len=20, max_tokens=4, first=70, tenant="other")
    harness.submit(*capped, other)
    harness.step()
    assert harness.running == ["c0", "o"]  # c1 waits for its limit, o for nothing
    most = 0
    while harness.state.has_work:
        harness.step()
        most = max(most, held(harness, "capped"))
    assert most <= 6
    records = harness.finish()
    assert all(records[f"c{i}"].finish_reason == "length" for i in range(3))


def test_a_tenant_that_outgrows_its_limit_preempts_its_own(tenants, make_request, expect):
    harness = tenants(capped={"limit_blocks": 6})
    capped = [
        make_request(f"c{i}", prompt_len=8, max_tokens=12, first=30 * i, tenant="capped")
        for i in range(2)
    ]
    other = make_request("o", prompt_len=8, max_tokens=12, first=70, tenant="other")
    harness.submit(*capped, other)
    records = harness.finish()
    assert [cause for _, cause in causes(harness)] == ["limit"]
    assert records["o"].num_preemptions == 0
    for request in (*capped, other):
        assert records[request.request_id].output_token_ids == expect(request)


def test_a_promise_at_the_limit_blocks_nobody_else(tenants, make_request):
    harness = tenants(capped={"limit_blocks": 6}, changes={"admission": Guaranteed()})
    first = make_request("c0", prompt_len=8, max_tokens=12, tenant="capped")
    second = make_request("c1", prompt_len=8, max_tokens=12, first=30, tenant="capped")
    other = make_request("o", prompt_len=8, max_tokens=4, first=70, tenant="other")
    harness.submit(first, second, other)
    harness.step()
    assert harness.running == ["c0", "o"]
    harness.finish()
    assert not causes(harness)


def test_a_shared_block_is_paid_by_each_tenant_that_holds_it_once(tenants, make_request):
    harness = tenants(a={}, b={}, changes={"prefix_caching": True})
    prompt = {"prompt_len": 17, "max_tokens": 20}
    harness.submit(make_request("a0", tenant="a", **prompt))
    harness.step()
    harness.submit(
        make_request("a1", tenant="a", **prompt), make_request("b0", tenant="b", **prompt)
    )
    harness.step()
    assert held(harness, "a") == 4 + 1 + 1  # four blocks shared, a tail for each
    assert held(harness, "b") == 4 + 1
    assert harness.state.spare_blocks == 16 - 4 - 3
    harness.abort("a0")
    harness.abort("a1")
    assert (held(harness, "a"), held(harness, "b")) == (0, 5)
    harness.finish()


def test_a_salt_keeps_tenants_apart_and_a_tenant_together(tenants, make_request):
    harness = tenants(a={"salt": True}, b={"salt": True}, changes={"prefix_caching": True})
    for name, tenant in (("a0", "a"), ("b0", "b"), ("o0", "other"), ("p0", "another"), ("a1", "a")):
        harness.submit(make_request(name, prompt_len=9, max_tokens=2, tenant=tenant))
        records = harness.finish()
    hits = {name: record.cached_prompt_tokens for name, record in records.items()}
    assert hits == {"a0": 0, "b0": 0, "o0": 0, "p0": 8, "a1": 8}


@pytest.mark.parametrize("eviction", [Lru(), Lfu(), Priority()])
def test_a_busy_tenant_leaves_a_quiet_one_its_cached_floor(tenants, make_request, eviction):
    # fak#2674: 100 requests of one tenant against one of another.
    harness = tenants(
        quiet={"reservation_blocks": 4, "salt": True},
        changes={"prefix_caching": True, "eviction": eviction},
    )
    mine = make_request("q", prompt_len=17, max_tokens=2, tenant="quiet", priority=9)
    harness.submit(mine)
    harness.finish()
    for i in range(100):
        harness.submit(
            make_request(
                f"b{i}",
                prompt_token_ids=tuple((7 * i + j * (i + 2)) % 100 for j in range(30)),
                max_tokens=4,
                tenant="busy",
            )
        )
    harness.finish()
    assert harness.state.accounts.of("quiet").cached_blocks == 4
    harness.submit(make_request("q2", prompt_len=17, max_tokens=2, tenant="quiet"))
    assert harness.finish()["q2"].cached_prompt_tokens == 16


def test_without_a_floor_a_busy_tenant_evicts_all(tenants, make_request):
    harness = tenants(quiet={"salt": True}, changes={"prefix_caching": True})
    harness.submit(make_request("q", prompt_len=17, max_tokens=2, tenant="quiet"))
    harness.finish()
    for i in range(4):
        prompt = tuple((7 * i + j * (i + 2)) % 100 for j in range(30))
        harness.submit(make_request(f"b{i}", prompt_token_ids=prompt, max_tokens=4, tenant="busy"))
        harness.finish()
    assert harness.state.accounts.of("quiet").cached_blocks == 0


def test_requests_that_no_terms_allow_are_refused_with_the_numbers(tenants, make_request):
    harness = tenants(
        TenantTerms(limit_blocks=3), big={"reservation_blocks": 12}, small={"limit_blocks": 2}
    )
    ok = harness.submit(
        make_request("u", prompt_len=12, max_tokens=4, tenant="unnamed"),
        make_request("s", prompt_len=8, max_tokens=4, tenant="small"),
        make_request("b", prompt_len=40, max_tokens=8, tenant="big"),
        make_request("fits", prompt_len=8, max_tokens=4, tenant="unnamed"),
    )
    assert ok == [False, False, True, True]
    records = harness.finish()
    assert "take 4 blocks: tenant 'unnamed' can be sure of 3" in records["u"].message
    assert "take 3 blocks: tenant 'small' can be sure of 2" in records["s"].message


def test_reservations_of_others_bound_one_request(tenants, make_request):
    harness = tenants(a={"reservation_blocks": 10})
    assert harness.submit(
        make_request("x", prompt_len=24, max_tokens=1, tenant="b"),
        make_request("y", prompt_len=23, max_tokens=1, tenant="b"),
    ) == [False, True]
    assert "can be sure of 6" in harness.finish()["x"].message


def test_what_others_were_promised_cannot_be_reserved_away(tenants, make_request):
    harness = tenants(a={"reservation_blocks": 6}, changes={"admission": Guaranteed()})
    harness.submit(make_request("b0", prompt_len=20, max_tokens=20, tenant="b"))  # promised 10
    harness.step()
    harness.submit(
        make_request("b1", prompt_len=8, max_tokens=4, first=40, tenant="b"),
        make_request("a0", prompt_len=12, max_tokens=12, first=60, tenant="a"),
    )
    harness.step()
    assert harness.running == ["b0", "a0"]  # all of it is certain now: b1 waits
    harness.finish()
    assert not causes(harness)


@pytest.mark.parametrize(("policy", "second"), [("fcfs", "a1"), ("vtc", "b0")])
def test_vtc_serves_the_tenant_that_was_served_least(tenants, make_request, policy, second):
    harness = tenants(
        a={}, b={}, changes={"schedule": Continuous(policy=policy), "max_num_seqs": 1}
    )
    harness.submit(
        make_request("a0", tenant="a"),
        make_request("a1", tenant="a"),
        make_request("b0", tenant="b", arrival_s=0.5),
    )
    records = harness.finish()
    order = sorted(records, key=lambda name: records[name].first_scheduled_s)
    assert order[1] == second


def test_a_tenants_priority_overrides_that_of_its_requests(tenants, make_request):
    harness = tenants(
        urgent={"priority": 0},
        changes={"schedule": Continuous(policy="priority"), "max_num_seqs": 1},
    )
    harness.submit(
        make_request("first", tenant="other", priority=1),
        make_request("other", tenant="other", priority=1),
        make_request("urgent", tenant="urgent", priority=7, arrival_s=0.5),
    )
    records = harness.finish()
    assert records["urgent"].priority == 0
    assert records["urgent"].first_scheduled_s < records["other"].first_scheduled_s


def test_vtc_gives_a_tenant_of_twice_the_weight_twice_the_service(tenants, make_request):
    harness = tenants(
        a={"weight": 2.0},
        b={},
        changes={"schedule": Continuous(policy="vtc"), "max_num_seqs": 1},
    )
    for i in range(12):
        harness.submit(*[make_request(f"{name}{i:02}", max_tokens=3, tenant=name) for name in "ab"])
    records = harness.finish()
    order = sorted(records, key=lambda name: records[name].first_scheduled_s)
    assert [name[0] for name in order[:12]].count("a") == 8


def test_vtc_does_not_pay_back_for_time_without_requests(tenants, make_request):
    harness = tenants(a={}, b={}, changes={"schedule": Continuous(policy="vtc"), "max_num_seqs": 1})
    harness.submit(*[make_request(f"a{i}", max_tokens=3, tenant="a") for i in range(8)])
    harness.step(14)  # four of them are done before anybody else asks
    harness.submit(*[make_request(f"b{i}", max_tokens=3, tenant="b") for i in range(4)])
    records = harness.finish()
    late = sorted(records, key=lambda name: records[name].first_scheduled_s)[5:]
    assert "a" in {name[0] for name in late[:3]}
