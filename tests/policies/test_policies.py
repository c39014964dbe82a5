"""Each policy on its own, on views made by hand."""

import math

import pytest

from paxkv.blocks.evictable import CachedBlock
from paxkv.errors import ConfigError
from paxkv.policies.admission import AdmissionNeed, FullPrompt
from paxkv.policies.eviction import Lru
from paxkv.policies.preemption import Recompute, Swap
from paxkv.policies.schedule import Continuous
from paxkv.policies.victim import Lifo
from paxkv.policies.view import PoolView, RequestView
from paxkv.workload.request import Request


def pool_view(available, running=1):
    return PoolView(num_blocks=100, available_blocks=available, num_running=running, block_size=16)


def need(new, revived=0):
    return AdmissionNeed(context_tokens=16 * new, new_blocks=new, revived_blocks=revived)


def request_view(order, num_blocks=4):
    return RequestView(
        request_id=str(order),
        order=order,
        tenant="default",
        priority=0,
        arrival_s=float(order),
        prompt_len=10,
        output_len=5,
        context_len=14,
        num_tokens=15,
        max_total_tokens=40,
        num_blocks=num_blocks,
        exclusive_blocks=num_blocks,
        num_preemptions=0,
    )


@pytest.mark.parametrize(
    ("available", "wanted", "revived", "running", "admitted"),
    [
        (15, 5, 0, 1, True),
        (14, 5, 0, 1, False),
        (14, 5, 0, 0, True),  # an idle engine has nothing to protect
        (4, 5, 0, 0, False),
        (15, 3, 3, 1, False),  # blocks that a hit takes out of the evictable ones count too
    ],
)
def test_full_prompt_keeps_the_watermark_free(available, wanted, revived, running, admitted):
    policy = FullPrompt(watermark=0.1)
    assert policy.choose(pool_view(available, running), need(wanted, revived)) is admitted


@pytest.mark.parametrize("watermark", [-0.1, 1.0, math.nan, math.inf])
def test_a_watermark_is_a_share(watermark):
    with pytest.raises(ConfigError, match=r"admit\.watermark=.*Try admit\.watermark=0\.02"):
        FullPrompt(watermark=watermark)


def test_lifo_takes_the_last_admitted():
    views = [request_view(3), request_view(1), request_view(2)]
    assert Lifo().choose(views, 1) is views[-1]


def test_recompute_sets_no_host_memory_aside():
    assert Recompute().host_capacity(100) == 0
    assert Recompute().choose(request_view(0), 100) == "recompute"


def test_swap_falls_back_where_host_memory_is_full():
    assert Swap().host_capacity(100) == 100
    assert Swap(host_blocks=7).host_capacity(100) == 7
    assert Swap().choose(request_view(0, num_blocks=4), 4) == "swap"
    assert Swap().choose(request_view(0, num_blocks=5), 4) == "recompute"
    with pytest.raises(ConfigError, match=r"preempt\.host_blocks=-1"):
        Swap(host_blocks=-1)


def test_lru_takes_the_first_of_the_oldest():
    cached = [CachedBlock(block_id, 0.0, 0, 0) for block_id in (9, 4, 7)]
    assert list(Lru().choose(iter(cached), 2)) == [9, 4]


def test_orders_of_the_queue():
    early = Request(request_id="e", prompt_token_ids=(1,), max_tokens=1, arrival_s=1.0, priority=5)
    urgent = Request(request_id="u", prompt_token_ids=(1,), max_tokens=1, arrival_s=2.0, priority=0)
    fcfs, priority = Continuous(), Continuous(policy="priority")
    assert fcfs.key(early) < fcfs.key(urgent)
    assert priority.key(urgent) < priority.key(early)
    with pytest.raises(ConfigError, match=r"schedule\.policy=sjf.*fcfs, priority"):
        Continuous(policy="sjf")
