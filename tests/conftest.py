"""What every test shares: where compiled code is kept, what is skipped, records with defaults."""

import copy
import functools
import os
import tempfile
import types
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
            "forked_prompt_tokens": 0,
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
            "blocks_peak": 0,
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


@pytest.fixture(scope="session")
def composed():
    """Compose overrides on top of the defaults, with the small model unless another is named.

    Composing takes a third of a second, so a choice of options is composed once, and single values
    are set in a copy of it.
    """
    # Imported here: most tests need none of it.
    from hydra import compose, initialize_config_dir
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from paxkv.config import register_schema, typed
    from paxkv.entry.conf import conf_dir

    register_schema()

    @functools.cache
    def options(*overrides: str):
        # Opened here and not around the fixture: Hydra has one of these at a time.
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            return typed(compose("config", overrides=list(overrides)))

    def run(*overrides: str):
        values = [o for o in overrides if "." in o.partition("=")[0] or o.startswith("seed=")]
        chosen = [o for o in overrides if o not in values]
        named = {override.partition("=")[0] for override in chosen}
        model = [] if named & {"model", "experiment"} else ["model=tiny"]
        config = copy.deepcopy(options(*model, *chosen))
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(
                config, override.key_or_group, override.value(), force_add=override.is_add()
            )
        return config

    return run


@pytest.fixture
def cpu():
    """A CPU with 8 GiB of free memory."""
    from paxkv.entry.machine import Machine

    device = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    return Machine(device=device, memory_bytes=8 << 30)
