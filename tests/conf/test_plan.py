"""Everything that cannot work is found before weights load, all at once, with what to change."""

import math
from types import SimpleNamespace

import pytest

from paxkv.cache.layout import pool_bytes
from paxkv.config import make_parts
from paxkv.entry import machine
from paxkv.entry.machine import Machine
from paxkv.entry.plan import plan_run
from paxkv.entry.sizing import CPU_BUDGET_BYTES, weights_bytes
from paxkv.errors import ConfigError

PROBLEMS = [
    ("engine.max_num_seqs=0", "1 or more. Try engine.max_num_seqs=64"),
    ("engine.max_num_batched_tokens=0", "1 or more. Try engine.max_num_batched_tokens=512"),
    ("engine.max_model_len=0", "Try engine.max_model_len=null"),
    ("engine.max_model_len=1.5", "Try engine.max_model_len=null"),
    ("engine.max_model_len=100000", "the model was made for at most 512 tokens"),
    ("engine.clock=sundial", "must be wall or virtual"),
    ("engine.dtype=float8", "must be one of auto, float32"),
    ("cache.block_size=24", "power of two from 1 to 256, or auto. Try cache.block_size=16"),
    ("cache.block_size=0", "power of two"),
    ("cache.block_size=true", "power of two"),
    ("cache.num_blocks=0", "1 or more"),
    ("cache.num_blocks=100000000", "below 2^31"),
    ("cache.memory_bytes=-1", "1 or more"),
    ("cache.memory_bytes=1000", "engine.max_model_len=512 needs 32 blocks"),
    ("cache.memory_utilization=1.5", "above 0 and at most 1"),
    ("cache.memory_utilization=nan", "above 0 and at most 1"),
    ("seed=-1", "0 or more"),
    ("prefix.enabled=maybe", "true or false"),
    ("admit.watermark=1.0", "Try admit.watermark=0.02"),
    ("admit.watermark=nan", "Try admit.watermark=0.02"),
    ("schedule.policy=random", "Choose one of fcfs, priority"),
    ("kernel.implementation=cuda", "Try kernel=auto"),
    ("kernel=mosaic", "Hopper GPU (compute capability 9.0) and this is a cpu device. Try kernel="),
    ("kernel.deterministic=1", "true or false"),
    ("kv.name=fp9", "auto, bf16"),
    ("slo.ttft_s=-1", "seconds above 0"),
    ("workload.num_requests=0", "whole number >= 1"),
    ("workload.arrivals.rate_per_s=inf", "finite number > 0"),
    ("model._target_=paxkv.models.Nothing", "model: "),
    ("+victim.strength=3", "victim: "),
]


def problems_of(config, machine) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_run(config, machine)
    return list(caught.value.problems)


@pytest.mark.parametrize(("override", "message"), PROBLEMS, ids=[p[0] for p in PROBLEMS])
def test_one_wrong_value_is_one_problem(override, message, composed, cpu) -> None:
    (problem,) = problems_of(composed(override), cpu)
    assert message in problem
    key, _, value = override.lstrip("+").partition("=")
    assert key.split(".")[0] in problem
    if value == "nan":
        assert "nan" in problem


def test_all_problems_come_in_one_error(composed, cpu) -> None:
    found = problems_of(
        composed(
            "preempt=swap",
            "preempt.host_blocks=-1",
            "workload=prompts",
            "workload.path=no_such_file.jsonl",
            "engine.max_num_seqs=0",
            "admit.watermark=2",
            "kernel.implementation=none_such",
        ),
        cpu,
    )
    keys = [problem.partition("=")[0] for problem in found]
    assert sorted(keys) == [
        "admit.watermark",
        "engine.max_num_seqs",
        "kernel.implementation",
        "preempt.host_blocks",
    ]
    (missing,) = problems_of(composed("workload=prompts", "workload.path=no_such_file.jsonl"), cpu)
    assert "workload.path=no_such_file.jsonl" in missing


CHANNEL = ("kv=int8", "kv.granularity=channel")


@pytest.fixture
def hopper() -> Machine:
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    return Machine(device=device, memory_bytes=140 * 2**30)


def test_hopper_serves_with_mosaic_what_mosaic_can_serve(composed, hopper) -> None:
    head = ("+model.head_dim=64", "engine.max_num_seqs=4")
    for kv in ("auto", "bf16", "int8", "fp8"):
        kernel = plan_run(composed(f"kv={kv}", *head), hopper).kernel
        assert kernel == ("mosaic", "Hopper GPU")
    for words in (["kv=int4"], ["kv=int8", "kv.granularity=head"], CHANNEL):
        assert plan_run(composed(*words, *head), hopper).kernel.name == "xla"
    kernel = plan_run(composed("kv=int8", "kv.skip_layers=[0]", *head), hopper).kernel
    assert kernel.name == "mosaic"
    mixed = ["kv=int8", "kv.skip_layers=[0]", "engine.dtype=float32"]
    assert plan_run(composed(*mixed, *head), hopper).kernel.name == "xla"
    plan = plan_run(composed("+model.head_dim=16"), hopper)
    assert plan.kernel.name == "xla"
    assert "head_dim is 16; it takes 64, 80" in plan.kernel.reason
    assert plan_run(composed("kernel=xla", *head), hopper).kernel.name == "xla"


def test_the_pool_leaves_room_for_what_a_deterministic_decode_takes(composed, hopper) -> None:
    sizes = ("+model.head_dim=64", "+model.max_model_len=100000", "engine.max_num_seqs=8000")
    blocks = [
        plan_run(composed(f"kernel.deterministic={value}", *sizes), hopper).scheduler.num_blocks
        for value in ("false", "true")
    ]
    # A row has 98 pieces of 1,024 tokens instead of 1, and 2 KV heads 8 columns of 64 float32.
    saved = (blocks[0] - blocks[1]) * 2 * 2 * 2 * 16 * 64 * 2
    assert saved == pytest.approx(8000 * 97 * 2 * 8 * (64 + 1) * 4, rel=0.02)


def test_mosaic_by_name_is_refused_with_what_it_takes(composed, hopper) -> None:
    for *words, reason in (
        ("+model.head_dim=16", "head_dim is 16"),
        ("engine.dtype=float32", "the pool is float32"),
        ("cache.block_size=8", "block_size is 8; it takes 16, 32, 64, 128"),
        (*CHANNEL, "keys have a scale a channel"),
    ):
        (problem,) = problems_of(
            composed("kernel=mosaic", "+model.head_dim=64", "engine.max_num_seqs=4", *words),
            hopper,
        )
        assert problem.startswith("kernel=mosaic: ")
        assert reason in problem


def test_the_open_blocks_of_rows_are_not_taken_from_the_pool(composed, hopper) -> None:
    sizes = (*CHANNEL, "+model.max_model_len=100000", "engine.max_num_seqs=8000")
    small = Machine(device=hopper.device, memory_bytes=2**33)
    plan = plan_run(composed(*sizes), small)
    assert plan.scheduler.open_block_in_row
    more = plan_run(composed(*sizes, "engine.max_num_seqs=16000"), small)
    lost = (plan.scheduler.num_blocks - more.scheduler.num_blocks) * plan.layout.bytes_per_block
    # 2 layers × 2 KV heads × 16 tokens × 16 numbers of 2 bytes, and 3 × 256 logits of 4.
    assert lost == pytest.approx(8000 * (2 * 2 * 16 * 16 * 2 + 3 * 256 * 4), rel=0.02)


def test_a_window_keeps_what_an_open_block_sees(composed, cpu) -> None:
    words = ("window=sliding", "window.size=40", "engine.max_num_batched_tokens=32")
    plain, channel = (
        plan_run(composed(*words, *kv), cpu).scheduler for kv in (("kv=int8",), CHANNEL)
    )
    most = [config.most_blocks(300, 400) for config in (plain, channel)]
    assert most == [1 + math.ceil((39 + 32 - 1) / 16), 1 + math.ceil((39 + 32 + 15 - 1) / 16)]


def test_a_path_that_must_be_given_is_named(composed, cpu) -> None:
    (problem,) = problems_of(composed("workload=prompts"), cpu)
    assert problem.startswith("workload.path: ")


def test_a_pool_below_one_request_says_both_numbers_and_what_fits(composed, cpu) -> None:
    (problem,) = problems_of(composed("cache.num_blocks=10"), cpu)
    assert "10 blocks of 16 tokens" in problem
    assert "512" in problem
    assert "engine.max_model_len=160" in problem
    assert "cache.num_blocks=32" in problem


def test_an_automatic_length_is_what_the_pool_holds(composed, cpu) -> None:
    plan = plan_run(composed("cache.num_blocks=10", "engine.max_model_len=auto"), cpu)
    assert plan.scheduler.max_model_len == 160
    plan = plan_run(composed("cache.num_blocks=1000", "engine.max_model_len=auto"), cpu)
    assert plan.scheduler.max_model_len == 512


def test_no_more_blocks_than_the_requests_can_hold(composed, cpu) -> None:
    plan = plan_run(composed("engine.max_num_seqs=3", "engine.max_model_len=100"), cpu)
    assert plan.scheduler.num_blocks == 3 * math.ceil(100 / 16)


def test_a_budget_in_bytes_is_kept(composed, cpu) -> None:
    plan = plan_run(composed("cache.memory_bytes=500000", "engine.max_num_seqs=1000"), cpu)
    spent = pool_bytes(plan.scheduler.num_blocks, plan.layout)
    assert 500_000 - plan.layout.bytes_per_block < spent <= 500_000


def test_a_cpu_gives_one_gib_unasked(composed, cpu) -> None:
    plan = plan_run(composed("engine.max_num_seqs=100000"), cpu)
    spent = pool_bytes(plan.scheduler.num_blocks, plan.layout)
    assert CPU_BUDGET_BYTES - plan.layout.bytes_per_block < spent <= CPU_BUDGET_BYTES


def test_a_swap_space_without_memory_is_refused_before_weights_load(
    composed, cpu, hopper, monkeypatch
) -> None:
    pool = ["cache.num_blocks=100", "preempt=swap"]
    free = cpu.memory_bytes
    plan = plan_run(composed(*pool), cpu)
    room = free - pool_bytes(100, plan.layout) - plan.weights_bytes
    fits = room // plan.layout.bytes_per_block
    plan_run(composed(*pool, f"preempt.host_blocks={fits}"), cpu)
    (problem,) = problems_of(composed(*pool, f"preempt.host_blocks={fits + 1}"), cpu)
    assert f"Try preempt.host_blocks={fits}, or preempt=recompute" in problem
    plan_run(composed("preempt=recompute", "cache.memory_bytes=100000000000"), cpu)
    # A GPU's pool and its host's memory are two things; as many blocks as the pool may not fit.
    monkeypatch.setattr(machine, "_available_bytes", lambda: 2**20)
    (problem,) = problems_of(composed("preempt=auto"), hopper)
    assert "0.00 GiB are free" in problem


def test_block_size_and_format_reach_the_layout(composed, cpu) -> None:
    plan = plan_run(composed("cache.block_size=32", "kv=fp8"), cpu)
    assert plan.layout.block_size == plan.scheduler.block_size == 32
    assert plan.layout.kv_dtype == "float8_e4m3fn"
    # 2 layers × K and V × 2 KV heads × (16 one-byte numbers and a four-byte scale)
    assert plan.layout.bytes_per_token == 2 * 2 * 2 * (16 + 4)


def test_the_planned_weights_are_the_loaded_ones(composed) -> None:
    source = make_parts(composed()).model
    for dtype in ("float32", "bfloat16"):
        assert weights_bytes(source.describe_config(), dtype) == source.load(dtype).weights_bytes
