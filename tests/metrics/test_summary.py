"""Every number against one worked out by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.metrics import RequestRecord, Slo, StepRecord, summarize

VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
} | {
    f"{stat}_{name}_ms"
    for stat in ("mean", "median", "std", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
}


def approx_ms(value):
    return pytest.approx(value, abs=1e-6)


def test_two_requests_by_hand(request_record):
    requests = [
        # TTFT 1, E2EL 3, TPOT 1, gaps 1 1
        request_record([1.0, 2.0, 3.0], prompt_tokens=7),
        # TTFT 2, E2EL 6, TPOT 4, gap 4
        request_record([4.0, 8.0], arrival_s=2.0, prompt_tokens=5, finish_reason="stop"),
    ]
    found = summarize(requests, [], [], 10.0, block_size=16)
    assert set(found) >= VLLM_KEYS
    assert found["completed"] == 2
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (12, 5)
    assert found["request_throughput"] == 0.2
    assert found["output_throughput"] == 0.5
    assert found["total_token_throughput"] == 1.7
    assert found["request_goodput"] is None
    assert found["mean_ttft_ms"] == approx_ms(1500)
    assert found["median_ttft_ms"] == approx_ms(1500)
    assert found["std_ttft_ms"] == approx_ms(500)
    assert found["p99_ttft_ms"] == approx_ms(1990)  # 1 + 0.99 * (2 - 1)
    assert found["mean_tpot_ms"] == approx_ms(2500)
    assert found["mean_itl_ms"] == approx_ms(2000)  # (1 + 1 + 4) / 3
    assert found["median_itl_ms"] == approx_ms(1000)
    assert found["std_itl_ms"] == approx_ms(1000 * math.sqrt(2))
    assert found["mean_e2el_ms"] == approx_ms(4500)
    assert found["requests"]["stop"] == 1
    assert found["requests"]["length"] == 1


def test_itl_weights_tokens_and_tpot_weights_requests(request_record):
    # vllm-project/vllm#6531: 2 tokens a second apart, 100 tokens 10 ms apart.
    slow = request_record([1.0, 2.0])
    fast = request_record([1.0 + 0.01 * i for i in range(100)])
    found = summarize([slow, fast], [], [], 10.0, block_size=16)
    assert found["mean_tpot_ms"] == approx_ms((1000 + 10) / 2)
    assert found["mean_itl_ms"] == approx_ms((1000 + 99 * 10) / 100)


def test_a_missing_first_token_is_counted_not_zero(request_record):
    # vllm-project/vllm#6064
    requests = [
        request_record([1.0, 2.0]),
        request_record([3.0, 4.0]),
        request_record([5.0, 6.0], first_token_s=None, token_times_s=()),
    ]
    found = summarize(requests, [], [], 10.0, block_size=16)
    assert found["mean_ttft_ms"] == approx_ms(2000)
    assert found["median_ttft_ms"] == approx_ms(2000)
    assert found["missing"] == {"ttft": 1, "tpot": 1, "itl": 1, "e2el": 0}


def test_one_token_outputs_have_no_gaps(request_record):
    # LMCache/LMBenchmark#27
    found = summarize([request_record([1.0]), request_record([2.0])], [], [], 4.0, block_size=16)
    for name in ("tpot", "itl"):
        assert {found[f"{stat}_{name}_ms"] for stat in ("mean", "median", "std", "p99")} == {None}
    assert found["mean_ttft_ms"] == approx_ms(1500)
    assert found["output_throughput"] == 0.5
    assert found["requests"]["one_token_outputs"] == 2
    assert found["missing"]["tpot"] == 2


def test_a_clock_that_goes_back_is_left_out_and_counted(request_record):
    # inference-sim/inference-sim#996
    record = request_record([1.0, 1.1, 1.098, 1.2])
    found = summarize([record], [], [], 2.0, block_size=16)
    assert found["negative"] == {"ttft": 0, "tpot": 0, "itl": 1, "e2el": 0}
    assert found["mean_itl_ms"] == approx_ms((100 + 102) / 2)
    early = request_record([1.0, 0.5], arrival_s=2.0)
    found = summarize([early], [], [], 2.0, block_size=16)
    assert found["negative"] == {"ttft": 1, "tpot": 1, "itl": 1, "e2el": 1}
    assert found["mean_ttft_ms"] is None


def test_only_completed_requests_have_latencies(request_record):
    requests = [
        request_record([1.0, 2.0]),
        request_record(finish_reason="rejected", finish_s=0.0, first_scheduled_s=None),
        request_record([50.0, 90.0], finish_reason="failed"),
        request_record([60.0, 61.0], finish_reason=None, finish_s=None),
    ]
    found = summarize(requests, [], [], 100.0, Slo(ttft_s=1.0), block_size=16)
    assert (found["completed"], found["failed"]) == (1, 2)
    assert found["mean_ttft_ms"] == approx_ms(1000)
    assert found["total_output_tokens"] == 2
    assert found["requests"]["unfinished"] == 1
    assert found["requests"]["unfinished_output_tokens"] == 4
    assert found["request_goodput"] == 0.01
    assert found["slo_attainment"] == pytest.approx(1 / 3)


def test_regenerated_tokens_count_once(request_record, step_record):
    # inference-sim/inference-sim#1091: the work is in the steps, the output is not inflated.
    requests = [
        request_record([1.0, 2.0, 3.0, 4.0]),
        request_record([1.0, 2.0, 5.0, 6.0], num_preemptions=1, recomputed_tokens=12),
    ]
    steps = [
        step_record(prefill_tokens=20, preemptions=1),
        step_record(prefill_tokens=12, decode_rows=8, recomputed_tokens=12),
    ]
    found = summarize(requests, steps, [], 10.0, block_size=16)
    assert found["total_output_tokens"] == 8
    assert found["preempt"]["computed_tokens"] == 40
    assert found["preempt"]["recompute_tax"] == pytest.approx(0.3)
    assert found["preempt"]["requests_preempted"] == 1
    assert found["preempt"]["num_preemptions"] == 1


def test_tenants_are_told_apart(request_record, step_record):
    requests = [
        request_record([1.0, 2.0], tenant="a"),
        request_record([4.0, 5.0], tenant="b", num_preemptions=2),
        request_record([6.0, 8.0], tenant="b"),
    ]
    steps = [
        step_record(duration_s=1.0, tenant_blocks={"a": 4, "b": 0}),
        step_record(duration_s=3.0, tenant_blocks={"a": 0, "b": 8}),
    ]
    found = summarize(requests, steps, [], 8.0, block_size=16)["tenants"]
    assert list(found) == ["a", "b"]
    assert (found["a"]["blocks_mean"], found["a"]["blocks_peak"]) == (1.0, 4)
    assert (found["b"]["blocks_mean"], found["b"]["preemptions"]) == (6.0, 2)
    assert found["a"]["median_ttft_ms"] == 1000.0
    assert found["b"]["median_ttft_ms"] == 5000.0
    unaccounted = summarize(requests, [step_record()], [], 8.0, block_size=16)["tenants"]
    assert unaccounted["b"]["blocks_mean"] is None
    assert summarize(requests[:1], [step_record()], [], 8.0, block_size=16)["tenants"] == {}


def test_preemptions_have_a_rate(step_record):
    found = summarize([], [step_record(preemptions=3)], [], 90.0, block_size=16)
    assert found["preempt"]["preemptions_per_min"] == 2.0


def test_preemption_thrash_is_visible(request_record):
    # vllm-project/vllm#42827
    requests = [request_record([1.0, 2.0], num_preemptions=5, recomputed_tokens=50)]
    found = summarize(requests, [], [], 10.0, block_size=16)["preempt"]
    assert (found["max_per_request"], found["requests_preempted"]) == (5, 1)


def test_cache_means_weight_steps_by_duration(request_record, step_record, event_record):
    steps = [
        step_record(
            duration_s=1.0,
            blocks_free=6,
            blocks_live=4,
            blocks_peak=9,
            largest_free_run_blocks=3,
            tokens_held=40,
            swap_out_blocks=2,
        ),
        step_record(
            duration_s=3.0,
            blocks_free=0,
            blocks_live=8,
            blocks_peak=8,
            blocks_cached=2,
            tokens_held=64,
        ),
        step_record(
            duration_s=4.0,
            blocks_free=10,
            largest_free_run_blocks=10,
            swap_in_blocks=1,
            swap_bytes=300,
        ),
    ]
    requests = [
        request_record([1.0], prompt_tokens=30, cached_prompt_tokens=16),
        request_record([1.0], prompt_tokens=50),
        request_record(
            finish_reason="rejected", prompt_tokens=9_999, first_scheduled_s=None, finish_s=0.0
        ),
    ]
    events = [
        event_record("evict", data={"blocks": 3}),
        event_record("evict"),
        event_record("swap_out"),
        event_record("reject"),
    ]
    found = summarize(requests, steps, events, 8.0, block_size=16)
    cache = found["cache"]
    assert cache["num_blocks"] == 10
    assert cache["usage_mean"] == pytest.approx((0.4 * 1 + 0.8 * 3) / 8)
    assert cache["usage_peak"] == 0.9  # while the first step ran
    # 40/64 for one second, 64/128 for three; the empty step holds nothing to fill
    assert cache["occupancy_mean"] == pytest.approx((0.625 + 3 * 0.5) / 4)
    assert cache["internal_fragmentation_mean"] == pytest.approx(1 - cache["occupancy_mean"])
    # Half of the free blocks lie apart for one second, none for four; three have none free.
    assert cache["external_fragmentation_mean"] == pytest.approx(0.5 / 5)
    means = [cache[f"blocks_{state}_mean"] for state in ("free", "live", "cached")]
    assert means == [pytest.approx(x / 8) for x in (6 + 40, 4 + 24, 6)]
    assert sum(means) == pytest.approx(10)
    assert cache["prefix_hit_tokens"] == 16
    assert cache["prefix_hit_rate"] == pytest.approx(0.2)
    assert cache["evicted_blocks"] == 4
    assert found["preempt"]["num_swaps"] == 1
    assert found["preempt"]["swap_out_blocks"] == 2
    assert found["preempt"]["swap_in_blocks"] == 1
    assert found["preempt"]["swap_bytes"] == 300


def test_step_times_and_compiles(step_record):
    steps = [
        step_record(host_s=0.001, compile_s=2.0, num_compiles=2, decode_rows=3, running=5),
        step_record(host_s=0.003, decode_rows=1, running=2),
        step_record(host_s=0.002),
    ]
    found = summarize([], steps, [], 3.0, block_size=16)["steps"]
    assert found["num_steps"] == 3
    assert found["host_median_s"] == 0.002
    assert (found["num_compiles"], found["compile_s"]) == (2, 2.0)
    assert found["decode_rows_mean"] == 2.0
    assert found["running_peak"] == 5


def test_nothing_at_all_is_null_and_valid_json():
    found = summarize([], [], [], 0.0, Slo(e2e_s=1.0), block_size=16)
    json.dumps(found, allow_nan=False)
    assert found["request_throughput"] is None
    assert found["mean_ttft_ms"] is None
    assert found["cache"]["usage_mean"] is None


stamp = st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf])
times = stamp | st.none()


@given(
    duration_s=st.floats(0, 1e9),
    stamps=st.lists(
        st.tuples(
            times,
            times,
            st.lists(stamp, max_size=3),
            st.sampled_from(["stop", "length", "rejected", "failed", None]),
        ),
        max_size=4,
    ),
    step_s=st.lists(st.sampled_from([0.0, 1e-9, 2.0]), max_size=3),
)
def test_no_number_is_ever_nan_or_infinite(duration_s, stamps, step_s):
    requests = [
        RequestRecord(
            request_id=str(i),
            tenant="default",
            priority=0,
            arrival_s=0.0,
            first_scheduled_s=None,
            first_token_s=first,
            finish_s=finish,
            prompt_tokens=3,
            cached_prompt_tokens=0,
            forked_prompt_tokens=0,
            output_tokens=len(tokens),
            output_token_ids=(),
            token_times_s=tuple(tokens),
            finish_reason=reason,
            message="",
            num_preemptions=0,
            num_swaps=0,
            recomputed_tokens=0,
        )
        for i, (first, finish, tokens, reason) in enumerate(stamps)
    ]
    zero = dict.fromkeys(StepRecord.__dataclass_fields__, 0)
    zero["tenant_blocks"] = {}
    steps = [StepRecord(**(zero | {"duration_s": s})) for s in step_s]
    json.dumps(summarize(requests, steps, [], duration_s, Slo(), block_size=16), allow_nan=False)
