"""What every test shares: where compiled code is kept, what is skipped, records with defaults."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from paxkv.metrics import Event, RequestRecord, StepRecord

# Entry points keep compiled code here: warm between test runs, apart from the user's own.
os.environ.setdefault("PAXKV_CACHE", str(Path(tempfile.gettempdir()) / "paxkv-tests-cache"))

# Timings of a loaded machine say nothing about the code.
settings.register_profile("paxkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paxkv")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def request_record():
    def make(token_times_s=(), /, **fields):
        times = tuple(token_times_s)
        defaults = {
            "request_id": "r",
            "tenant": "default",
            "priority": 0,
            "arrival_s": 0.0,
            "first_scheduled_s": 0.0,
            "first_token_s": times[0] if times else None,
            "finish_s": times[-1] if times else None,
            "prompt_tokens": 10,
            "cached_prompt_tokens": 0,
            "output_tokens": len(times),
            "output_token_ids": tuple(range(len(times))),
            "token_times_s": times,
            "finish_reason": "length",
            "message": "",
            "num_preemptions": 0,
            "num_swaps": 0,
            "recomputed_tokens": 0,
        }
        return RequestRecord(**(defaults | fields))

    return make


@pytest.fixture
def step_record():
    def make(**fields):
        defaults = {
            "step": 0,
            "start_s": 0.0,
            "duration_s": 1.0,
            "host_s": 0.001,
            "compile_s": 0.0,
            "num_compiles": 0,
            "prefill_tokens": 0,
            "decode_rows": 0,
            "recomputed_tokens": 0,
            "running": 0,
            "waiting": 0,
            "swapped": 0,
            "blocks_free": 10,
            "blocks_live": 0,
            "blocks_cached": 0,
            "largest_free_run_blocks": 0,
            "tokens_held": 0,
            "tenant_blocks": {},
            "cached_tokens": 0,
            "preemptions": 0,
            "swap_out_blocks": 0,
            "swap_in_blocks": 0,
            "swap_bytes": 0,
        }
        return StepRecord(**(defaults | fields))

    return make


@pytest.fixture
def event_record():
    def make(kind="preempt", **fields):
        return Event(**({"time_s": 0.0, "step": 0, "kind": kind} | fields))

    return make
