"""Policies that cannot work together are refused before weights load, with the way out."""

import pytest

from paxkv.entry.plan import plan_run
from paxkv.errors import ConfigError

REFUSED = [
    (["allocator=contiguous_max"], "prefix=off"),
    (["allocator=contiguous_pow2", "prefix=off", "window=sliding"], "allocator=paged"),
    (["allocator=contiguous_oracle", "prefix=off", "+model.layer_windows=[8,null]"], "paged"),
    (["preempt=none"], "admit=guaranteed"),
    (
        [
            "preempt=none",
            "admit=guaranteed",
            "schedule.policy=priority",
            "schedule.preempt_to_admit=true",
        ],
        "schedule.preempt_to_admit=false",
    ),
    (
        ["admit=guaranteed", "schedule.policy=priority", "schedule.preempt_to_admit=true"],
        "schedule.preempt_to_admit=false, or admit=full_prompt",
    ),
]
ALLOWED = [
    ["allocator=contiguous_max", "prefix=off"],
    ["allocator=contiguous_oracle", "prefix=off", "preempt=none"],
    ["preempt=none", "admit=guaranteed"],
    ["admit=expected", "schedule.policy=priority", "schedule.preempt_to_admit=true"],
    ["window=sinks", "+model.layer_windows=[8,null]"],
]


@pytest.mark.parametrize(("overrides", "fix"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_together_is_refused(overrides, fix, composed, cpu) -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(composed(*overrides), cpu)
    (problem,) = error.value.problems
    assert fix in problem


@pytest.mark.parametrize("overrides", ALLOWED, ids=str)
def test_what_can_is_not(overrides, composed, cpu) -> None:
    plan_run(composed(*overrides), cpu)


def test_lent_blocks_cannot_come_back_without_preemption(composed, cpu, tmp_path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("chat: {reservation: 50%}\n")
    tenants = ["tenants=file", f"tenants.path={file}"]
    plan = plan_run(composed(*tenants, "cache.num_blocks=64"), cpu)
    assert plan.scheduler.tenants.terms("chat").reservation_blocks == 32
    contiguous = ["allocator=contiguous_max", "prefix=off", "preempt=none"]
    with pytest.raises(ConfigError, match="taken back by preemption"):
        plan_run(composed(*tenants, *contiguous), cpu)
    plan_run(composed(*tenants, *contiguous, "admit=guaranteed"), cpu)


def test_a_tenants_file_is_checked_before_weights_load(composed, cpu, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"tenants\.path=nowhere\.yaml"):
        plan_run(composed("tenants=file", "tenants.path=nowhere.yaml"), cpu)
    file = tmp_path / "tenants.yaml"
    file.write_text("a: {reservation: 60%}\nb: {reservation: 50%}\n")
    with pytest.raises(ConfigError, match="reservations"):
        plan_run(composed("tenants=file", f"tenants.path={file}"), cpu)


def test_windows_make_groups_and_bound_what_a_request_holds(composed, cpu) -> None:
    plan = plan_run(composed("window=sliding", "window.size=64"), cpu)
    (group,) = plan.groups
    assert group.span.window == 64
    assert plan.scheduler.most_blocks(100, 512) == 32  # a chunk of 512 tokens takes its blocks
    small = plan_run(
        composed("window=sliding", "window.size=64", "engine.max_num_batched_tokens=32"), cpu
    )
    assert small.scheduler.most_blocks(100, 512) == 7
    mixed = plan_run(composed("+model.layer_windows=[64,null]"), cpu)
    assert [group.layers for group in mixed.groups] == [(0,), (1,)]
    assert mixed.layout.num_layers == 1
