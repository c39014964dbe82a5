import itertools

import pytest

from paxkv.policies.victim import Cost, FewestOutput, Lcf, Lifo, Priority

POLICIES = [Lifo(), Priority(), Lcf(), FewestOutput(), Cost()]


@pytest.mark.parametrize(
    ("policy", "field", "values", "victim"),
    [
        (Lifo(), "context_len", (1, 9, 5), 2),
        (Priority(), "priority", (0, 2, 1), 1),
        (Lcf(), "context_len", (7, 3, 5), 1),
        (FewestOutput(), "output_len", (7, 3, 5), 1),
        (Cost(), "priority", (0, 2, 1), 1),
        (Cost(), "context_len", (7, 3, 5), 1),  # less to restore
        (Cost(), "exclusive_blocks", (1, 2, 1), 1),  # frees more of what is missing
        (Cost(), "exclusive_blocks", (3, 4, 3), 2),  # 3 are enough: all free what is missing
        (Cost(), "exclusive_blocks", (0, 1, 0), 1),  # what others share frees nothing
        (Cost(), "max_total_tokens", (40, 90, 50), 1),  # keeps its blocks for longest
    ],
)
def test_whom_it_chooses(running, policy, field, values, victim):
    views = [running(order, **{field: value}) for order, value in enumerate(values)]
    assert policy.choose(views, 3) is views[victim]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_ties_go_to_the_last_admitted(running, policy):
    views = [running(order) for order in (3, 1, 2)]
    assert policy.choose(views, 1) is views[-1]


def test_urgency_comes_before_the_price(running):
    cheap, urgent = running(0, priority=1, context_len=1000), running(1, priority=0, context_len=1)
    assert Cost().choose([cheap, urgent], 1) is cheap


def test_the_price_weighs_tokens_against_blocks_and_time(running):
    # 100 tokens to restore for half of the need and 20 tokens of time: a price of 10; 90 tokens for
    # all of it, but 8 tokens of time: a price of 11.25.
    first = running(0, context_len=100, exclusive_blocks=2, num_tokens=100, max_total_tokens=120)
    second = running(1, context_len=90, exclusive_blocks=9, num_tokens=90, max_total_tokens=98)
    assert Cost().choose([first, second], 4) is first
    # Where one block is missing both meet the need: 5 against 11.25; and where there are only the
    # rows of the batch missing.
    assert Cost().choose([first, second], 1) is first
    assert Cost().choose([first, second], 0) is first
    assert Cost().choose([first, second], 8) is second  # 20 against 11.25


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("need_blocks", [0, 1, 100])
def test_it_always_names_a_candidate(running, policy, need_blocks):
    extremes = itertools.product((0, 14), (0, 4), (15, 40))  # nothing cached, shared, at its limit
    views = [
        running(order, context_len=context, exclusive_blocks=exclusive, max_total_tokens=total)
        for order, (context, exclusive, total) in enumerate(extremes)
    ]
    assert any(policy.choose(views, need_blocks) is view for view in views)
