import pytest

from paxkv.policies.allocator import ContiguousMax, ContiguousOracle, ContiguousPow2, Paged


@pytest.mark.parametrize(
    ("policy", "contiguous", "tokens"),
    [
        (Paged(), False, None),
        (ContiguousMax(), True, 2048),
        (ContiguousPow2(), True, 100 + 32),
        (ContiguousOracle(), True, 125),
    ],
)
def test_what_a_request_reserves(policy, contiguous, tokens):
    """A prompt of 100 tokens with an output of 25, the example of the PagedAttention paper."""
    assert policy.contiguous is contiguous
    assert policy.reserve_tokens(100, 125, 2048) == tokens


@pytest.mark.parametrize(
    ("total", "reserved"),
    [(10, 10), (11, 11), (12, 12), (13, 14), (14, 14), (15, 18), (42, 42), (43, 64), (74, 64)],
)
def test_the_output_is_rounded_up_to_a_power_of_two(total, reserved):
    assert ContiguousPow2().reserve_tokens(10, min(total, 64), 64) == reserved


@pytest.mark.parametrize("policy", [ContiguousMax(), ContiguousPow2(), ContiguousOracle()])
def test_the_reserve_holds_the_request_and_no_more_than_the_longest(policy):
    for prompt in (1, 7, 16, 63):
        for total in range(prompt, 65):
            assert total <= policy.reserve_tokens(prompt, total, 64) <= 64
