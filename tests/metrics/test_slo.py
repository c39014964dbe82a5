import pytest

from paxkv.errors import ConfigError
from paxkv.metrics import Slo


@pytest.mark.parametrize(
    ("bounds", "met"),
    [
        ({}, True),
        ({"ttft_s": 1.0}, True),
        ({"ttft_s": 0.9}, False),
        ({"tpot_s": 2.0}, True),
        ({"tpot_s": 1.9}, False),
        ({"itl_s": 3.0}, True),
        ({"itl_s": 2.9}, False),  # TPOT is 2, the largest gap is 3
        ({"e2e_s": 5.0}, True),
        ({"e2e_s": 4.9}, False),
        ({"ttft_s": 1.0, "tpot_s": 2.0, "itl_s": 3.0, "e2e_s": 4.0}, False),
    ],
)
def test_every_bound_counts(request_record, bounds, met):
    assert Slo(**bounds).meets(request_record([1.0, 2.0, 5.0])) is met


def test_one_token_meets_the_bounds_between_tokens(request_record):
    record = request_record([0.5])
    assert Slo(tpot_s=1e-9, itl_s=1e-9).meets(record)
    assert not Slo(tpot_s=1e-9, ttft_s=0.1).meets(record)


def test_what_did_not_complete_meets_nothing(request_record):
    for reason in ("rejected", "failed", None):
        assert not Slo(ttft_s=10.0).meets(request_record([1.0, 2.0], finish_reason=reason))


def test_a_missing_stamp_does_not_meet_a_bound(request_record):
    record = request_record([1.0, 2.0], first_token_s=None)
    assert not Slo(ttft_s=10.0).meets(record)
    assert Slo(e2e_s=10.0).meets(record)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "fast"])
def test_bad_bounds_are_refused_together(bad):
    with pytest.raises(ConfigError) as caught:
        Slo(ttft_s=bad, e2e_s=bad)
    assert len(caught.value.problems) == 2
    assert "slo.e2e_s" in str(caught.value)
    assert "slo.ttft_s=null" in str(caught.value)


def test_is_set():
    assert not Slo().is_set
    assert Slo(itl_s=1.0).is_set
