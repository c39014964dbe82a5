import math

import pytest

from paxkv.errors import ConfigError
from paxkv.policies.admission import Expected, FirstChunk, FullPrompt, Guaranteed


@pytest.mark.parametrize(
    ("available", "blocks", "revived", "num_running", "admitted"),
    [
        (15, 5, 0, 1, True),
        (14, 5, 0, 1, False),
        (14, 5, 0, 0, True),  # an idle engine has nothing to protect
        (5, 5, 0, 0, True),
        (4, 5, 0, 0, False),
        (16, 3, 3, 1, True),
        (15, 3, 3, 1, False),  # blocks that a hit takes out of the evictable ones count too
    ],
)
@pytest.mark.parametrize(
    ("policy", "field", "decision"),
    [
        (FullPrompt(watermark=0.1), "context_blocks", "context"),
        (FirstChunk(watermark=0.1), "chunk_blocks", "chunk"),
        (Expected(watermark=0.1), "context_blocks", "context"),  # nothing is left to generate
    ],
    ids=["full_prompt", "first_chunk", "expected"],
)
def test_the_watermark_stays_free(
    pool, need, policy, field, decision, available, blocks, revived, num_running, admitted
):
    given = need(**{field: blocks}, revived_blocks=revived)
    chosen = policy.choose(pool(available, num_running=num_running), given)
    assert chosen == (decision if admitted else "wait")


def test_a_claim_to_what_is_reserved_needs_no_watermark(pool, need):
    for policy in (FullPrompt(watermark=0.5), Expected(watermark=0.5)):
        assert policy.choose(pool(5), need(context_blocks=5)) == "wait"
        assert policy.choose(pool(5, is_due=True), need(context_blocks=5)) == "context"
        assert policy.choose(pool(4, is_due=True), need(context_blocks=5)) == "wait"


def test_the_watermark_rounds_up(pool, need):
    assert FullPrompt(watermark=0.001).choose(pool(5), need(context_blocks=5)) == "wait"
    assert FullPrompt(watermark=0.0).choose(pool(5), need(context_blocks=5)) == "context"


def test_a_prompt_longer_than_what_is_free_starts_by_its_first_chunk(pool, need):
    given = need(chunk_blocks=2, context_blocks=50)
    assert FirstChunk().choose(pool(10), given) == "chunk"
    assert FullPrompt().choose(pool(10), given) == "wait"


@pytest.mark.parametrize(
    ("available", "promisable", "context", "most", "admitted"),
    [
        (10, 30, 10, 30, True),
        (10, 29, 10, 30, False),  # its longest output could not be promised
        (9, 30, 10, 30, False),  # blocks are promised that are not free yet
        (100, 100, 0, 0, True),
    ],
)
def test_a_guarantee_covers_all_it_can_ever_hold(
    pool, need, available, promisable, context, most, admitted
):
    chosen = Guaranteed().choose(
        pool(available, promisable_blocks=promisable),
        need(context_blocks=context, max_blocks=most),
    )
    assert chosen == ("guarantee" if admitted else "wait")


def test_a_guarantee_counts_revived_blocks(pool, need):
    given = need(context_blocks=5, revived_blocks=5, max_blocks=10)
    assert Guaranteed().choose(pool(10), given) == "guarantee"
    assert Guaranteed().choose(pool(9, promisable_blocks=10), given) == "wait"


@pytest.mark.parametrize(
    ("output", "limit", "share"),
    [
        (0, 0, 0.5),  # nothing has ended: the prior
        (100, 100, 0.75),  # worth as much as the prior: half way between 0.5 and 1
        (0, 100, 0.25),
        (30_000, 100_000, 0.3),  # the prior hardly counts any more
    ],
)
def test_the_expected_share_is_learnt(pool, output, limit, share):
    view = pool(ended_output_tokens=output, ended_limit_tokens=limit)
    policy = Expected(prior_share=0.5, prior_tokens=100)
    assert policy.expected_share(view) == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize(
    ("changes", "num_groups", "available", "admitted"),
    [
        # 5 blocks of context; half of 320 open tokens of 16 a block: 10 blocks
        ({}, 1, 15, True),
        ({}, 1, 14, False),
        ({}, 2, 25, True),  # each group of layers has its own blocks
        ({}, 2, 24, False),
        ({"num_running": 0}, 1, 5, True),  # an idle engine admits what fits
        ({"num_running": 0}, 1, 4, False),
        # all that ended used all of their limit: 20 blocks, to within the prior
        ({"ended_output_tokens": 10**9, "ended_limit_tokens": 10**9}, 1, 25, True),
        ({"ended_output_tokens": 10**9, "ended_limit_tokens": 10**9}, 1, 24, False),
    ],
)
def test_expected_growth_of_all_must_fit(pool, need, changes, num_groups, available, admitted):
    view = pool(available, num_groups=num_groups, running_open_tokens=200, **changes)
    chosen = Expected(watermark=0.0).choose(view, need(context_blocks=5, open_tokens=120))
    assert chosen == ("context" if admitted else "wait")


def test_the_watermark_is_a_margin_on_top_of_the_growth(pool, need):
    given = need(context_blocks=5, open_tokens=320)
    assert Expected(watermark=0.02).choose(pool(17), given) == "context"
    assert Expected(watermark=0.02).choose(pool(16), given) == "wait"


@pytest.mark.parametrize("policy", [FullPrompt, FirstChunk, Expected])
@pytest.mark.parametrize("watermark", [-0.1, 1.0, math.nan, math.inf, True, "much"])
def test_a_watermark_is_a_share(policy, watermark):
    with pytest.raises(ConfigError, match=r"admit\.watermark=.*Try admit\.watermark=0\.02"):
        policy(watermark=watermark)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        Expected(watermark=2.0, prior_share=1.5, prior_tokens=0)
    assert [problem.partition("=")[0] for problem in error.value.problems] == [
        "admit.watermark",
        "admit.prior_share",
        "admit.prior_tokens",
    ]
    assert all("Try admit." in problem for problem in error.value.problems)
