"""On a GPU: every implementation there against the oracle, the sweep of the benchmark."""

import jax
import pytest

from pallas_kernels import available_implementations
from pallas_kernels.bench.cases import sweep_cases
from pallas_kernels.bench.sweep import FAILED, run_sweep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


def test_every_implementation_agrees_with_the_oracle():
    outcomes = list(run_sweep(sweep_cases(), available_implementations()))
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    assert outcomes
    assert not failed
