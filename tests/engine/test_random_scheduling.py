"""Random requests, aborts and steps under random policies: what holds in every one of them.

The scripted executor proves the tokens; after each step the harness checks the pool and accounts.
"""

import pickle
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.cache.groups import LayerGroup, Span, live_chunk_tokens, most_blocks_of
from paxkv.engine import scheduler
from paxkv.policies.admission import Expected, FirstChunk, FullPrompt, Guaranteed
from paxkv.policies.allocator import ContiguousMax, ContiguousOracle, ContiguousPow2, Paged
from paxkv.policies.eviction import Lfu, Lru
from paxkv.policies.eviction import Priority as EvictPriority
from paxkv.policies.preemption import Auto, Never, Recompute, Swap
from paxkv.policies.schedule import Continuous, Static
from paxkv.policies.tenancy import NO_TENANTS, TenantTable, TenantTerms
from paxkv.policies.victim import Cost, FewestOutput, Lcf, Lifo
from paxkv.policies.victim import Priority as VictimPriority
from paxkv.workload.request import Request

MAX_MODEL_LEN = 32
NAMES = ("a", "b", "default")
GROUPS = (
    (LayerGroup((0,)),),
    (LayerGroup((0,), Span(5)),),
    (LayerGroup((0,), Span(4, 3)),),
    (LayerGroup((0,), Span(6)), LayerGroup((1,))),
    (LayerGroup((0,)), LayerGroup((1,), Span(3)), LayerGroup((2,), Span(7, 2))),
)
ADMISSIONS = (
    FullPrompt(watermark=0.0),
    FullPrompt(watermark=0.1),
    FirstChunk(watermark=0.0),
    Expected(watermark=0.0, prior_tokens=16),
    Guaranteed(),
)
SCHEDULES = (
    Continuous(),
    Continuous(policy="priority", ageing_s=20.0),
    Continuous(policy="priority", preempt_to_admit=True),
    Continuous(policy="sjf"),
    Continuous(policy="vtc"),
    Static(),
    Static(policy="priority"),
)
PREEMPTIONS = (Recompute(), Swap(), Swap(host_blocks=2), Auto(host_blocks=6))
PROMPTS = tuple(
    tuple((start * 17 + i * (start + 1)) % 100 for i in range(24)) for start in range(3)
)


def tenant_table(rng: Random, num_blocks: int) -> TenantTable:
    if rng.random() < 0.35:
        return NO_TENANTS
    left, named = num_blocks, {}
    for name in ("a", "b"):
        reserved = rng.randint(0, left // 3)
        left -= reserved
        named[name] = TenantTerms(
            reservation_blocks=reserved,
            limit_blocks=rng.choice(
                [None, rng.randint(max(reserved, num_blocks // 2), num_blocks)]
            ),
            weight=rng.choice([0.5, 1.0, 4.0]),
            priority=rng.choice([None, 0, 2]),
            salt=rng.random() < 0.5,
        )
    unnamed = TenantTerms(limit_blocks=rng.choice([None, num_blocks // 2]))
    return TenantTable(named=named, unnamed=unnamed, accounts=True)


def configuration(rng: Random) -> dict:
    """Changes to the fixture's configuration: every policy of every axis, small pools."""
    contiguous = rng.random() < 0.2
    block_size = rng.randint(1, 5)
    groups = GROUPS[0] if contiguous else rng.choice(GROUPS)
    chunk = rng.choice([1, 3, 8, 24, 32])
    in_row = rng.random() < 0.3
    live = live_chunk_tokens(chunk, block_size, open_block_in_row=in_row)
    longest = most_blocks_of(groups, MAX_MODEL_LEN, block_size, live)
    num_blocks = rng.randint(longest * 3 // 4 + 1, longest * 3 // 2 + 1)
    allocators = (
        (ContiguousMax(), ContiguousPow2(), ContiguousOracle()) if contiguous else (Paged(),)
    )
    admission = rng.choice(ADMISSIONS)
    never = (Never(),) if contiguous or isinstance(admission, Guaranteed) else ()
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": rng.choice([1, 3, 5, 6, 8]),
        "max_num_batched_tokens": chunk,
        "max_model_len": MAX_MODEL_LEN,
        "groups": groups,
        "bytes_per_block": 1000,
        "open_block_in_row": in_row,
        "prefix_caching": not contiguous and rng.random() < 0.6,
        "max_preemptions": rng.randint(1, 3),
        "eos_token_ids": rng.choice([(), (20, 21, 22, 23, 24)]),
        "allocator": rng.choice(allocators),
        "admission": admission,
        "schedule": rng.choice(SCHEDULES),
        "preemption": rng.choice((*PREEMPTIONS, *never)),
        "victim": rng.choice([Lifo(), VictimPriority(), Lcf(), FewestOutput(), Cost()]),
        "eviction": rng.choice([Lru(), Lfu(), EvictPriority()]),
        "tenants": tenant_table(rng, num_blocks),
    }


def script(rng: Random) -> list[tuple]:
    """Bursts of requests, samples and steps; an abort now and then."""
    actions = []
    for _ in range(rng.randint(8, 30)):
        kind = rng.choices(["submit", "step", "abort"], [6, 4, 1])[0]
        if kind == "submit":
            fields = {
                "prompt_token_ids": rng.choice(PROMPTS)[: rng.randint(1, 18)],
                "max_tokens": rng.randint(1, 20),
                "tenant": rng.choice(NAMES),
                "priority": rng.randint(0, 2),
                "ignore_eos": rng.random() < 0.5,
            }
            actions.append((kind, fields, rng.choice([0, 0, 0, 1, 3])))
        else:
            actions.append((kind, rng.randint(1, 6)))
    return actions


@dataclass
class Run:
    """Drives a harness through a script and watches each plan."""

    harness: object

    def __post_init__(self):
        self.state = self.harness.state
        self.submitted: dict[str, Request] = {}
        self.harness.executor.on_plan = self.watch

    def submit(self, fields, num_forks):
        lead = Request(
            request_id=f"r{len(self.submitted)}",
            arrival_s=self.harness.engine.clock.now(),
            **fields,
        )
        samples = [
            replace(lead, request_id=f"{lead.request_id}-{i}", fork_of=lead.request_id)
            for i in range(num_forks)
        ]
        for request in (lead, *samples):
            self.submitted[request.request_id] = request
            self.harness.submit(request)

    def abort(self, number):
        live = sorted(self.state.sequences)
        if live:
            self.harness.abort(live[number % len(live)])

    def step(self):
        if not self.state.has_work:
            return
        idle = {
            account.name: min(account.cached_blocks, account.terms.reservation_blocks)
            for account in self.state.accounts.all()
            if account.terms.salt and not account.unfinished
        }
        branch = None
        if self.state.step % 16 == 7:  # a snapshot decides the same
            branch = scheduler.schedule(pickle.loads(pickle.dumps(self.state)), 0.0)
        plan = self.harness.step()
        if branch is not None and not branch.is_empty:
            assert_same_plan(branch, plan)
        computed = len(plan.prefills.tokens) + plan.decodes.num_rows
        assert computed <= self.state.config.max_num_batched_tokens
        assert computed or self.state.step_preemptions, "no progress"
        for name, floor in idle.items():
            assert self.state.accounts.of(name).cached_blocks >= floor, "reserved cache evicted"

    def watch(self, plan):
        """Look at the state between schedule and commit."""
        state, config = self.state, self.state.config
        for sequence in state.running:
            held = len(state.rows.blocks(sequence.row))
            assert held <= sequence.most_blocks
            assert held == int(state.rows.num_held([sequence.row])[0])
        budget = config.max_num_batched_tokens - len(plan.prefills.tokens) - plan.decodes.num_rows
        admitted = state.entered or not state.step_preemptions  # else it was not reached
        if admitted and budget > 0 and state.free_rows and self.claims_are_certain:
            for waiting in state.waiting.heads():
                self.check_claim(waiting.sequence)

    @property
    def claims_are_certain(self):
        """Whether nothing but rows and budget may keep a tenant from what it has reserved."""
        config = self.state.config
        return (
            config.tenants.accounts
            and config.preemption.preempts
            and not config.allocator.contiguous
            and isinstance(config.schedule, Continuous)
            and config.admission in (FullPrompt(watermark=0.0), FirstChunk(watermark=0.0))
        )

    def check_claim(self, sequence):
        config = self.state.config
        tokens = len(sequence.tokens)
        claim = most_blocks_of(config.groups, tokens, config.block_size, config.live_chunk_tokens)
        if sequence.num_preemptions >= config.max_preemptions:
            claim = sequence.most_blocks
        account = self.state.accounts.of(sequence.request.tenant)
        assert account.claimed_blocks + claim > account.terms.reservation_blocks, (
            f"{sequence.request.request_id} waits for blocks that are reserved for its tenant"
        )

    def check_end(self, expect):
        config = self.state.config
        records = self.harness.log.requests
        assert sorted(r.request_id for r in records) == sorted(self.submitted)
        for record in records:
            request = self.submitted[record.request_id]
            tokens = list(expect(request, MAX_MODEL_LEN, config.groups))
            ends = [i for i, token in enumerate(tokens) if token in config.eos_token_ids]
            reason = "length"
            if ends and not request.ignore_eos:
                tokens, reason = tokens[: ends[0] + 1], "stop"
            assert record.num_preemptions <= config.max_preemptions
            assert record.finish_reason in (reason, "failed", "rejected")
            if record.finish_reason == reason:
                assert list(record.output_token_ids) == tokens
                assert record.cached_prompt_tokens < record.prompt_tokens
            else:
                assert list(record.output_token_ids) == tokens[: record.output_tokens]
            if record.finish_reason == "rejected":
                assert record.message and record.first_scheduled_s is None
            assert len(record.token_times_s) == record.output_tokens
            times = [record.arrival_s, record.first_scheduled_s, *record.token_times_s]
            times = [time for time in (*times, record.finish_s) if time is not None]
            assert times == sorted(times)
            assert list(record.token_times_s) == sorted(set(record.token_times_s))


def assert_same_plan(one, other):
    for rows, others in ((one.prefills, other.prefills), (one.decodes, other.decodes)):
        np.testing.assert_array_equal(rows.tokens, others.tokens)
        np.testing.assert_array_equal(rows.block_tables, others.block_tables)
    for moves, others in ((one.swap_outs, other.swap_outs), (one.swap_ins, other.swap_ins)):
        assert [move.block_ids.tolist() for move in moves] == [
            move.block_ids.tolist() for move in others
        ]


def drive(make_harness, expect, seed):
    rng = Random(seed)
    harness = make_harness(**configuration(rng))
    run = Run(harness)
    for action, *arguments in script(rng):
        if action == "step":
            for _ in range(arguments[0]):
                run.step()
        else:
            getattr(run, action)(*arguments)
    # Each step computes a token or preempts, and both are bounded.
    lives = 1 + harness.config.max_preemptions
    bound = len(run.submitted) * lives * (MAX_MODEL_LEN + 1)
    while harness.state.has_work:
        run.step()
        bound -= 1
        assert bound >= 0, "livelock"
    harness.finish()
    run.check_end(expect)
    return harness


# Everything is drawn from the seed: Hypothesis' own draws repeat too much to fill a pool.
SEEDS = st.integers(0, 2**63 - 1)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(seed=SEEDS)
def test_any_script_under_any_policies(make_harness, expect, seed):
    drive(make_harness, expect, seed)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(seed=SEEDS)
def test_many_scripts_under_any_policies(make_harness, expect, seed):
    drive(make_harness, expect, seed)
