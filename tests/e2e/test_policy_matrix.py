"""No policy changes the greedy output: runs as configured, on a real pool that forces preemption.

Options are the words of the command line. For a storage format, heads and windows, the run with an
ample pool and all defaults says what the output is; every other run of that format must say the
same, token for token. The whole matrix, all pairs of options of any two groups, takes long:
`pytest -m slow tests/e2e/test_policy_matrix.py`. A part in which every option occurs runs always.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from paxkv.engine.clock import VirtualClock
from paxkv.engine.device import DeviceExecutor
from paxkv.engine.engine import Engine
from paxkv.engine.state import init_state
from paxkv.entry.plan import plan_run
from paxkv.errors import ConfigError
from paxkv.quality.calibrate import static_scales
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.base import with_samples
from paxkv.workload.request import Request

# What changes the output, and so the reference.
FORMATS = {
    "kv": (
        ("kv=auto",),
        ("kv=bf16",),
        ("kv=fp8",),
        ("kv=fp8_e5m2",),
        ("kv=int8",),
        ("kv=int4",),
        ("kv=int8", "kv.granularity=head"),
        ("kv=fp8", "kv.granularity=tensor"),
        ("kv=int8", "kv.skip_layers=[0]"),
        ("kv=int8", "kv.granularity=channel"),
    ),
    "heads": (("heads=native",), ("heads=mha",), ("heads=pooled",)),
    "window": (
        ("window=full",),
        ("window=sliding", "window.size=12"),
        ("window=sinks", "window.size=12", "window.num_sink_tokens=3"),
        ("window=full", "+model.layer_windows=[10,null]"),
    ),
}
# What must not.
POLICIES = {
    "allocator": (
        ("allocator=paged",),
        ("allocator=contiguous_oracle", "prefix=off"),
        ("allocator=contiguous_pow2", "prefix=off"),
        ("allocator=contiguous_max", "prefix=off"),
    ),
    "admit": (
        ("admit=full_prompt",),
        ("admit=first_chunk",),
        ("admit=guaranteed",),
        ("admit=expected",),
    ),
    "preempt": (
        ("preempt=recompute",),
        ("preempt=swap",),
        ("preempt=auto",),
        ("preempt=none", "admit=guaranteed"),
        ("preempt=swap", "preempt.host_blocks=3"),
    ),
    "victim": tuple((f"victim={n}",) for n in ("lifo", "priority", "lcf", "fewest_output", "cost")),
    "schedule": (
        ("schedule=continuous",),
        ("schedule=continuous", "schedule.policy=priority", "schedule.preempt_to_admit=true"),
        ("schedule=continuous", "schedule.policy=sjf"),
        ("schedule=continuous", "schedule.policy=vtc"),
        ("schedule=static",),
    ),
    "evict": (("evict=lru",), ("evict=lfu",), ("evict=priority",)),
    "prefix": (("prefix=on",), ("prefix=off",)),
    "tenants": (("tenants=none",), ("tenants=file",)),
    "block_size": (("cache.block_size=4",), ("cache.block_size=8",)),
    "chunk": (("engine.max_num_batched_tokens=16",), ("engine.max_num_batched_tokens=24",)),
    "max_preemptions": (("engine.max_preemptions=8",), ("engine.max_preemptions=1",)),
}
GROUPS = FORMATS | POLICIES
POOL_TOKENS = 56  # hardly more than one request at its end; four may start
QUICK_FORMATS = (
    FORMATS["kv"][8],  # some layers plain
    FORMATS["kv"][9],  # keys per channel
    FORMATS["window"][3],  # two groups of layers
)
"""Each takes seconds to compile: enough for one test of each kind of cache."""
TENANTS = """
a: {reservation: 1, priority: 0}
b: {limit: 92%, salt: true}
"""


def combined(chosen: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the words of one option a group; None where two name one group differently."""
    words: dict[str, str] = {}
    for options in chosen.values():
        for word in options:
            key, _, value = word.partition("=")
            if words.setdefault(key, value) != value:
                return None
    return tuple(f"{key}={value}" for key, value in words.items())


def pairs():
    """All pairs of options of any two groups, the other groups as by default."""
    for first, second in itertools.combinations(GROUPS, 2):
        for one, other in itertools.product(GROUPS[first], GROUPS[second]):
            words = combined({first: one, second: other})
            if words is not None:
                yield words


def covering():
    """Few runs in which every policy occurs, with changing company, and every kind of cache."""
    longest = max(len(options) for options in POLICIES.values())
    for number in range(longest):
        chosen = {
            group: options[(number + place) % len(options)]
            for place, (group, options) in enumerate(POLICIES.items())
        }
        if chosen["allocator"] != POLICIES["allocator"][0]:
            del chosen["prefix"]  # the allocator's option says prefix=off
        if chosen["preempt"][-1].startswith("admit="):
            del chosen["admit"]
        words = combined(chosen)
        assert words is not None
        yield words
    for number, option in enumerate(QUICK_FORMATS):
        (group,) = (group for group in FORMATS if option in FORMATS[group])
        company = [POLICIES["preempt"][number % 2 + 1], POLICIES["victim"][number % 5]]
        words = combined({group: option, "preempt": company[0], "victim": company[1]})
        assert words is not None
        yield words


def requests(vocab_size):
    """Requests of two tenants and three priorities, some with a common start, one sampled twice."""
    rng = np.random.default_rng(3)
    common = rng.integers(vocab_size, size=17).tolist()
    made = []
    for number in range(12):
        own = rng.integers(vocab_size, size=int(rng.integers(3, 22))).tolist()
        prompt = [*common, *own[:4]] if number % 3 == 0 else own
        made += with_samples(
            [
                Request(
                    request_id=str(number),
                    prompt_token_ids=tuple(prompt),
                    max_tokens=int(rng.integers(10, 25)),
                    arrival_s=0.001 * number,
                    tenant="ab"[number % 2],
                    priority=number % 3,
                    ignore_eos=True,
                )
            ],
            2 if number == 5 else 1,
        )
    return made


class Lab:
    """Serves requests as words say; executors and references are kept."""

    def __init__(self, composed, cpu, folder):
        self._composed, self._cpu = composed, cpu
        self._executors, self._references, self._models = {}, {}, {}
        self._tenants = folder / "tenants.yaml"
        self._tenants.write_text(TENANTS)

    def plan(self, words, pool_tokens):
        words = dict(word.split("=", 1) for word in words)
        words.setdefault("cache.block_size", "4")
        words.setdefault("engine.max_num_batched_tokens", "16")
        if words.get("tenants") == "file":
            words["tenants.path"] = str(self._tenants)
        words |= {
            "engine.max_num_seqs": "4",
            "engine.max_model_len": "48",
            "admit.watermark": "0.0",
            "engine.dtype": "float32",
        }
        if words.get("admit") == "guaranteed":
            del words["admit.watermark"]
        # A block holds the layers of one group: with two groups a token takes two blocks.
        num_groups = 2 if "+model.layer_windows" in words else 1
        blocks = pool_tokens * num_groups // int(words["cache.block_size"])
        words["cache.num_blocks"] = str(blocks)
        return plan_run(self._composed(*(f"{k}={v}" for k, v in words.items())), self._cpu)

    def serve(self, plan):
        """Return the output of each request, and how often one was preempted."""
        log = MemoryTracker()
        model, executor = self._executor(plan)
        engine = Engine(
            state=init_state(plan.scheduler),
            executor=executor,
            clock=VirtualClock(),
            observer=log,
        )
        engine.run(requests(model.config.vocab_size))
        assert {record.finish_reason for record in log.requests} == {"length"}
        assert all(r.num_preemptions <= plan.scheduler.max_preemptions for r in log.requests)
        outputs = {record.request_id: record.output_token_ids for record in log.requests}
        return outputs, sum(step.preemptions for step in log.steps)

    def reference(self, words):
        """Return the outputs of the same format with an ample pool and all defaults."""
        changing = {w for group in FORMATS.values() for option in group for w in option}
        if "kv.granularity=channel" in words:  # a block's keys share their scales
            changing |= {word for option in POLICIES["block_size"] for word in option}
        kept = tuple(word for word in words if word in changing)
        if kept not in self._references:
            outputs, preempted = self.serve(self.plan(kept, 12 * 48))
            assert not preempted
            self._references[kept] = outputs
        return self._references[kept]

    def _executor(self, plan):
        parts = plan.parts
        model_key = (repr(parts.model), repr(parts.heads))
        if model_key not in self._models:
            self._models[model_key] = parts.model.load(plan.dtype, heads=parts.heads)
        model = self._models[model_key]
        key = (*model_key, parts.kv, plan.layout, plan.groups, plan.scheduler.max_blocks)
        if key not in self._executors:
            self._executors[key] = DeviceExecutor(
                model,
                plan.layout,
                plan.groups,
                num_blocks=300,  # of every pool: plans use the first ones
                host_blocks=300,
                max_blocks=plan.scheduler.max_blocks,
                num_rows=plan.scheduler.max_num_seqs,
                kv_scales=static_scales(model, replace(parts.kv)),
            )
        return model, self._executors[key]


@pytest.fixture(scope="module")
def lab(composed, tmp_path_factory):
    from types import SimpleNamespace

    from paxkv.entry.machine import Machine

    cpu = Machine(device=SimpleNamespace(platform="cpu", device_kind="cpu"), memory_bytes=8 << 30)
    return Lab(composed, cpu, tmp_path_factory.mktemp("matrix"))


def check(lab, words):
    try:
        plan = lab.plan(words, POOL_TOKENS)
    except ConfigError as error:
        pytest.skip(f"refused: {error}")
    outputs, preempted = lab.serve(plan)
    assert outputs == lab.reference(words)
    # Promises and reservations keep memory for whoever started.
    if not any(word.startswith(("admit=guaranteed", "allocator=contiguous")) for word in words):
        assert preempted or "window.size=12" in words


def name(words):
    return ",".join(words)


@pytest.mark.parametrize("words", list(dict.fromkeys(covering())), ids=name)
def test_every_option_leaves_the_output_alone(lab, words):
    check(lab, words)


@pytest.mark.slow
@pytest.mark.parametrize("words", list(dict.fromkeys(pairs())), ids=name)
def test_every_pair_of_options_leaves_the_output_alone(lab, words):
    check(lab, words)
