import pytest

from paxkv.errors import ConfigError, InvariantError
from paxkv.policies.preemption import Auto, Never, Recompute, Swap


@pytest.mark.parametrize(
    ("policy", "blocks", "preempts"),
    [
        (Recompute(), 0, True),
        (Swap(), 100, True),
        (Swap(host_blocks=7), 7, True),
        (Swap(host_blocks=0), 0, True),
        (Auto(), 100, True),
        (Auto(host_blocks=7), 7, True),
        (Never(), 0, False),
    ],
)
def test_host_memory_set_aside(policy, blocks, preempts):
    assert policy.host_capacity(100) == blocks
    assert policy.preempts is preempts


def test_recompute_estimates_nothing(running, host):
    assert Recompute().choose(running(), host(copy=1.0, prefill=1.0)) == ("recompute", None, None)


@pytest.mark.parametrize("policy", [Swap(), Auto()])
@pytest.mark.parametrize(
    ("filled_blocks", "mode"),
    [(4, "swap"), (5, "recompute"), (0, "recompute")],  # 4 host blocks are free
)
def test_swap_needs_room_and_something_to_keep(running, host, policy, filled_blocks, mode):
    assert policy.choose(running(filled_blocks=filled_blocks), host()).mode == mode


@pytest.mark.parametrize(
    ("copy", "prefill", "others", "blocks_engine", "expected"),
    [
        # 4 blocks of 100 bytes out and in: 800 bytes; 20 tokens to prefill
        (100.0, 2.0, 0, True, ("swap", 10.0, 8.0)),
        (100.0, 4.0, 0, True, ("recompute", 5.0, 8.0)),
        (100.0, 2.5, 0, True, ("recompute", 8.0, 8.0)),  # a tie: host memory stays free
        # both delay the other three: nothing changes but the seconds
        (100.0, 2.0, 3, True, ("swap", 40.0, 32.0)),
        (100.0, 4.0, 3, True, ("recompute", 20.0, 32.0)),
        # copies that run beside the engine delay nobody else
        (100.0, 4.0, 3, False, ("swap", 20.0, 8.0)),
        # a speed that is not known is measured by using it, copies first
        (None, 4.0, 0, True, ("swap", 5.0, None)),
        (None, None, 0, True, ("swap", None, None)),
        (100.0, None, 0, True, ("recompute", None, 8.0)),
    ],
)
def test_auto_takes_what_costs_all_requests_less(
    running, host, copy, prefill, others, blocks_engine, expected
):
    view = host(copy, prefill, num_others=others, copies_block_engine=blocks_engine)
    assert Auto().choose(running(context_len=20), view) == pytest.approx(expected)


def test_auto_tells_both_estimates_where_host_memory_is_full(running, host):
    view = host(copy=1e9, prefill=2.0, free_blocks=3)
    assert Auto().choose(running(context_len=20), view) == ("recompute", 10.0, 8e-7)


def test_never_refuses_to_name_a_mode(running, host):
    with pytest.raises(InvariantError, match=r"preempt=none: request 3 .*admit=guaranteed"):
        Never().choose(running(3), host())


@pytest.mark.parametrize("policy", [Swap, Auto])
@pytest.mark.parametrize("host_blocks", [-1, 1.5, True, "many"])
def test_host_blocks_are_a_count(policy, host_blocks):
    with pytest.raises(ConfigError, match=r"preempt\.host_blocks=.*Try preempt\.host_blocks=null"):
        policy(host_blocks=host_blocks)
