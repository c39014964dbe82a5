"""Whole decode and prefill steps compile for an H200 with kernel=mosaic, the pool in place."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.aot import find_compiler

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 240  # of one process; a step takes about 10 s

STEPS = {
    "smollm2_135m/decode/bfloat16": ("write_kv", "paged_decode", "combine_decode"),
    "smollm2_135m/prefill/int8": ("write_kv", "paged_prefill"),
    "llama31_8b/decode/int8": ("write_kv", "paged_decode", "combine_decode"),
    "llama31_8b/prefill/bfloat16": ("write_kv", "paged_prefill"),
}


@pytest.fixture(scope="module")
def records():
    if find_compiler() is None:
        pytest.skip("jax's CUDA plugin is absent: `make test` installs it into .gpu-compiler")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, str(HERE / "compile_steps.py"), *STEPS],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    return {record["step"]: record for record in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("step", STEPS)
def test_a_whole_step_compiles_and_leaves_the_pool_in_place(records, step):
    record = records[step]
    kernels = {kernel["name"].removesuffix("_mosaic_gpu_kernel") for kernel in record["kernels"]}
    assert kernels == set(STEPS[step])
    assert all(kernel["spill_bytes"] == 0 for kernel in record["kernels"])
    assert record["copied_bytes"] == 0
    assert record["temp_bytes"] < record["pool_bytes"] / 16  # no copy of a leaf among them
