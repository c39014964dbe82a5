"""What every test shares: where compiled code is kept, and what is skipped."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
