"""Every option with every option of every other axis, at a pool that forces preemption.

Greedy output depends on the window and on nothing else; the scripted model tells when a plan read
or wrote a wrong block.
"""

from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace

import pytest

from paxkv.cache.groups import LayerGroup, Span
from paxkv.entry.combinations import why_not_together
from paxkv.policies import eviction, victim
from paxkv.policies.admission import Expected, FirstChunk, FullPrompt, Guaranteed
from paxkv.policies.allocator import ContiguousMax, ContiguousOracle, ContiguousPow2, Paged
from paxkv.policies.preemption import Auto, Never, Recompute, Swap
from paxkv.policies.schedule import Continuous, Static
from paxkv.policies.tenancy import NO_TENANTS, TenantTable, TenantTerms


def two_tenants(num_blocks: int) -> TenantTable:
    """One with a reservation and a salt, one with a limit."""
    return TenantTable(
        named={
            "a": TenantTerms(reservation_blocks=num_blocks // 6, priority=0, salt=True),
            "b": TenantTerms(limit_blocks=num_blocks * 5 // 6, weight=2.0),
        },
        accounts=True,
    )


AXES = {
    "allocator": {
        "paged": Paged(),
        "max": ContiguousMax(),
        "pow2": ContiguousPow2(),
        "oracle": ContiguousOracle(),
    },
    "admission": {
        "full_prompt": FullPrompt(),
        "first_chunk": FirstChunk(),
        "guaranteed": Guaranteed(),
        "expected": Expected(watermark=0.0, prior_share=0.1),
    },
    "preemption": {
        "recompute": Recompute(),
        "swap": Swap(),
        "auto": Auto(host_blocks=8),
        "none": Never(),
    },
    "victim": {
        "lifo": victim.Lifo(),
        "priority": victim.Priority(),
        "lcf": victim.Lcf(),
        "fewest_output": victim.FewestOutput(),
        "cost": victim.Cost(),
    },
    "schedule": {
        "fcfs": Continuous(),
        "priority": Continuous(policy="priority"),
        "sjf": Continuous(policy="sjf"),
        "vtc": Continuous(policy="vtc"),
        "displacing": Continuous(policy="priority", preempt_to_admit=True),
        "static": Static(),
        "static_priority": Static(policy="priority"),
    },
    "eviction": {"lru": eviction.Lru(), "lfu": eviction.Lfu(), "priority": eviction.Priority()},
    "prefix_caching": {"on": True, "off": False},
    "groups": {
        "full": (LayerGroup((0,)),),
        "sliding": (LayerGroup((0,), Span(9)),),
        "sinks": (LayerGroup((0,), Span(9, 3)),),
        "mixed": (LayerGroup((0,)), LayerGroup((1,), Span(6))),
    },
    "tenants": {"none": lambda num_blocks: NO_TENANTS, "file": two_tenants},
    "block_size": {"1": 1, "4": 4, "7": 7},
    "max_num_batched_tokens": {"4": 4, "8": 8, "64": 64},
    "samples": {"1": 1, "3": 3},
}
DEFAULT = {axis: next(iter(options)) for axis, options in AXES.items()} | {
    "block_size": "4",
    "max_num_batched_tokens": "8",
}
MAX_MODEL_LEN = 48
POOLS = (
    1.5,
    2.0,
    1.3,
    2.6,
    1.7,
    2.3,
)  # requests of the longest kind that fit; six or more want to run


def settle(choice: dict[str, str]) -> dict[str, str]:
    """Change what the configuration would refuse besides, unless the pair itself says it."""
    settled = DEFAULT | choice
    if settled["allocator"] != "paged" and "prefix_caching" not in choice:
        settled["prefix_caching"] = "off"
    if settled["preemption"] == "none" and not {"admission", "allocator"} & choice.keys():
        settled["admission"] = "guaranteed"
    return settled


def why_refused(choice: dict[str, str]) -> str:
    """The pairs that a run refuses, all of them, and why; empty for those that work."""
    contiguous = choice["allocator"] != "paged"
    if contiguous and choice["prefix_caching"] == "on":
        return "a run of blocks starts empty, so nothing can be shared"
    if contiguous and choice["groups"] != "full":
        return "a run of blocks is given back as a whole, so a window frees nothing"
    if choice["preemption"] == "none" and not contiguous and choice["admission"] != "guaranteed":
        return "without a promise a request may need a block that nobody gives back"
    if choice["preemption"] == "none" and choice["schedule"] == "displacing":
        return "nobody can make way"
    if choice["admission"] == "guaranteed" and choice["schedule"] == "displacing":
        return "whoever was promised its blocks does not make way"
    return ""


PAIRS = [
    {first: one, second: other}
    for first, second in combinations(AXES, 2)
    for one, other in product(AXES[first], AXES[second])
]
WORKING = [pair for pair in PAIRS if not why_refused(settle(pair))]


def requests_for(choice, make_request):
    samples = AXES["samples"][choice["samples"]]
    requests = []
    for number in range(5):
        lead = make_request(
            f"r{number}",
            prompt_len=5 + number,
            max_tokens=9,
            first=11 * (number // 2),  # two and two start alike
            arrival_s=0.4 * number,
            priority=(4 - number) // 2,
            tenant="ab"[number % 2],
        )
        requests += [
            replace(lead, request_id=f"r{number}.{i}", fork_of=f"r{number}" if i else None)
            for i in range(samples)
        ]
        requests[-samples] = lead
    return requests


def may_preempt(choice):
    """Whether running requests can be short of blocks, or have to make way."""
    if choice["preemption"] == "none" or choice["admission"] == "guaranteed":
        return False
    return choice["allocator"] == "paged"


def run(make_config, make_harness, make_request, expect, choice, num_requests_that_fit):
    """Run a busy workload, check its outputs; returns the number of preemptions."""
    changes = {axis: AXES[axis][option] for axis, option in choice.items() if axis != "samples"}
    changes |= {"max_model_len": MAX_MODEL_LEN, "bytes_per_block": 1000}
    most = make_config(**changes | {"tenants": NO_TENANTS}).most_blocks(9, 18)
    num_blocks = int(num_requests_that_fit * most) + 1
    changes |= {"num_blocks": num_blocks, "tenants": changes["tenants"](num_blocks)}
    harness = make_harness(**changes)
    requests = requests_for(choice, make_request)
    records = harness.run(requests)
    for request in requests:
        record = records[request.request_id]
        assert record.output_token_ids == expect(request, MAX_MODEL_LEN, changes["groups"]), choice
    return sum(step.preemptions for step in harness.log.steps)


@pytest.mark.parametrize("axes", list(combinations(AXES, 2)), ids="-".join)
def test_no_pair_of_options_changes_an_output(
    make_config, make_harness, make_request, expect, axes
):
    for pair in WORKING:
        if set(pair) != set(axes):
            continue
        choice = settle(pair)
        preemptions = 0
        for size in POOLS:
            preemptions += run(make_config, make_harness, make_request, expect, choice, size)
            if preemptions or not may_preempt(choice):
                break
        assert preemptions > 0 or not may_preempt(choice), pair
        assert preemptions == 0 or may_preempt(choice) or choice["schedule"] == "displacing", pair


def test_the_refused_pairs_are_these():
    refused = [pair for pair in PAIRS if why_refused(settle(pair))]
    assert len(WORKING) + len(refused) == len(PAIRS) == 836
    # Three runs of blocks with the prefix cache and with three windows; no preemption with three
    # admissions that promise nothing, with blocks one at a time, and with displacement, which
    # promises rule out too.
    assert len(refused) == 3 * 1 + 3 * 3 + 3 + 1 + 1 + 1


def test_a_run_refuses_the_same_pairs():
    for choice in map(settle, PAIRS):
        assert is_refused(choice) == bool(why_refused(choice)), choice


def is_refused(choice):
    options = {axis: AXES[axis][option] for axis, option in choice.items()}
    parts = SimpleNamespace(
        allocator=options["allocator"],
        admit=options["admission"],
        preempt=options["preemption"],
        schedule=options["schedule"],
        tenants=SimpleNamespace(lends=choice["tenants"] == "file"),
    )
    caching = options["prefix_caching"]
    return bool(why_not_together(parts, options["groups"], prefix_caching=caching))


@pytest.mark.parametrize("window", ["sliding", "sinks", "mixed"])
@pytest.mark.parametrize("chunk", ["4", "8", "64"])
@pytest.mark.parametrize("block_size", ["1", "4", "7"])
def test_windows_bound_the_blocks_of_a_request(
    make_harness, make_request, expect, window, chunk, block_size
):
    pair = {"groups": window, "max_num_batched_tokens": chunk, "block_size": block_size}
    choice = DEFAULT | pair
    groups, size = AXES["groups"][window], AXES["block_size"][block_size]
    harness = make_harness(
        num_blocks=200, groups=groups, block_size=size, max_num_batched_tokens=int(chunk)
    )
    most_held = 0

    def watch(plan):
        nonlocal most_held
        state = harness.state
        for sequence in state.running:
            held = len(state.rows.blocks(sequence.row))
            assert held <= sequence.most_blocks, choice
            most_held = max(most_held, held)

    harness.executor.on_plan = watch
    request = make_request("long", prompt_len=20, max_tokens=28)
    assert harness.run([request])["long"].output_token_ids == expect(request, 48, groups)
    unbounded = len(groups) * -(-48 // size)
    if chunk == "4":
        assert most_held < unbounded
