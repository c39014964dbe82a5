"""Ahead-of-time compilation: every variant becomes sm_90a code that fits and copies no pool."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.aot import DEVICES, CompilerMissingError, KernelReport, compiler, find_compiler
from pallas_kernels.aot.dump import read_kernels
from pallas_kernels.paged_attention.mosaic.decode_layout import decode_tiling
from pallas_kernels.pages import KV_DTYPES
from pallas_kernels.variants import VARIANTS

ROOT = pathlib.Path(__file__).parents[2]
VARIANT_LIMIT_S = 90  # one takes 1 to 10 s; layout inference gone astray takes minutes

needs_compiler = pytest.mark.skipif(
    find_compiler() is None,
    reason="jax's CUDA plugin is absent: `make test` installs it into .gpu-compiler",
)


def run_aot(*args):
    """The command in a process of its own: it keeps jax from any other device."""
    # A user's path first: pytest's rootdir is not on it in a child process.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "pallas_kernels.aot", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def compile_all(names, file):
    """Compile variants in one process, a further one after each that had to be stopped."""
    records = {}
    while rest := [name for name in names if name not in records]:
        limit = ("--timeout-s", str(VARIANT_LIMIT_S))
        run = run_aot("--variant", *rest, "--json", str(file), *limit)
        lines = file.read_text().splitlines() if file.exists() else []
        records |= {record["variant"]: record for record in map(json.loads, lines)}
        stopped = [name for name in rest if name not in records]
        if stopped:
            why = f"stopped, the limit is {VARIANT_LIMIT_S} s: {run.stdout}{run.stderr}"
            records[stopped[0]] = {"variant": stopped[0], "error": why}
    return records


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Records by variant; the fast ones and the slow ones are compiled together when asked for."""
    done = {}

    def get(name):
        if name not in done:
            fast = VARIANTS[name].fast
            names = [other for other, variant in VARIANTS.items() if variant.fast == fast]
            done.update(compile_all(names, tmp_path_factory.mktemp("aot") / "records.json"))
        return done[name]

    return get


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if variant.fast else pytest.mark.slow)
        for name, variant in VARIANTS.items()
    ],
)
def test_variant_compiles_within_the_limits_of_hopper(compiled, name):
    record = compiled(name)
    assert "error" not in record, record["error"]
    assert record["copied_bytes"] == 0
    assert record["temp_bytes"] < record["donated_bytes"] / 8  # no copy of a leaf among them
    assert record["kernels"]
    for kernel in record["kernels"]:
        assert kernel["spill_bytes"] == 0, kernel
        assert kernel["smem_bytes"] <= DEVICES["h200"].smem_per_cta, kernel
        assert kernel["ctas_per_sm"] >= 1, kernel
    variant = VARIANTS[name]
    if variant.op == "write":
        return
    (attention,) = (kernel for kernel in record["kernels"] if kernel["wgmma"])
    assert attention["tma"]
    if KV_DTYPES[variant.kv_dtype].quantised:
        # 16 scales are 64 bytes: a tensor copy could not put them there.
        assert attention["bulk"]
    if variant.op != "prefill":
        tiling = decode_tiling(
            group=variant.heads // variant.kv_heads,
            head_dim=variant.head_dim,
            itemsize=KV_DTYPES[variant.kv_dtype].dtype.itemsize,
        )
        assert attention["smem_bytes"] <= tiling.smem_bytes
        assert attention["ctas_per_sm"] >= tiling.ctas_per_sm


@needs_compiler
def test_a_variant_that_takes_too_long_is_stopped(tmp_path):
    file = tmp_path / "records.json"
    run = run_aot("--variant", *list(VARIANTS)[:2], "--timeout-s", "0.01", "--json", str(file))
    assert run.returncode != 0
    assert "Timeout" in run.stderr
    assert not file.exists()


def test_names_are_unique_and_listed():
    run = run_aot("--list")
    assert run.stdout.split() == list(VARIANTS)
    assert all(name == variant.name for name, variant in VARIANTS.items())
    assert sum(variant.fast for variant in VARIANTS.values()) < 20


def test_an_unknown_variant_is_refused():
    run = run_aot("--variant", "decode-bf17")
    assert run.returncode == 2
    assert "no variant decode-bf17: --list" in run.stderr


def test_a_missing_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.COMPILER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "_DEFAULT_FOLDER", tmp_path)
    monkeypatch.setattr(compiler, "_PLUGINS", ("jax_cuda13_plugin_of_no_one",))
    with pytest.raises(CompilerMissingError, match=r"--target DIR jax-cuda13-plugin==\d.*pjrt==\d"):
        compiler.load_compiler()


def test_looks_on_the_path_then_in_the_named_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_PLUGINS", ("plugin_of_no_one",))
    for folder in ("path", "named", "default"):
        (tmp_path / folder / "plugin_of_no_one").mkdir(parents=True)
    monkeypatch.setattr(compiler, "_DEFAULT_FOLDER", tmp_path / "default")
    assert compiler.find_compiler() == tmp_path / "default" / "plugin_of_no_one"
    monkeypatch.setenv(compiler.COMPILER_VARIABLE, str(tmp_path / "named"))
    assert compiler.find_compiler() == tmp_path / "named" / "plugin_of_no_one"
    (tmp_path / "path" / "plugin_of_no_one" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    assert compiler.find_compiler() == tmp_path / "path" / "plugin_of_no_one"


PTXAS = """ptxas info    : Compiling entry function 'decode_kernel' for 'sm_90a'
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 33 bytes smem
"""
PTX = ".maxntid 256, 1, 1\nwgmma.mma_async.sync.aligned\ncp.async.bulk.tensor.4d"
MLIR = """%c8 = arith.constant 8 : i32
%c99328_i32 = arith.constant 99328 : i32
gpu.launch threads() dynamic_shared_memory_size %c99328_i32 {"""


def test_reads_the_dump_of_a_kernel():
    parts = {"ptxas": PTXAS, "ptx": PTX, "after_layout_inference.txt": MLIR}
    other = {**parts, "ptxas": PTXAS.replace("decode_kernel", "tenth_kernel")}
    files = {f"x_10.{part}": text for part, text in other.items()}
    files |= {f"x_9.{part}": text for part, text in parts.items()}
    first, second = read_kernels(files)
    assert (first.name, second.name) == ("decode_kernel", "tenth_kernel")
    assert (first.threads, first.registers, first.stack_bytes) == (256, 168, 16)
    assert first.spill_bytes == 24 + 40
    assert first.smem_bytes == 99328 + 32  # one of 33 static bytes stands for the dynamic ones
    assert first.uses_wgmma and first.uses_tma


def test_a_dump_of_another_form_is_refused():
    parts = {"ptxas": "Used 3 registers", "ptx": PTX, "after_layout_inference.txt": MLIR}
    with pytest.raises(ValueError, match=r"dump lacks .*spill stores"):
        read_kernels({f"x_0.{part}": text for part, text in parts.items()})


@pytest.mark.parametrize(
    ("threads", "registers", "smem_bytes", "ctas"),
    [
        (256, 168, 10_000, 1),  # registers: 168 * 256 = 43008 of 65536
        (256, 121, 10_000, 2),  # 121 counts as 128: 32768
        (128, 32, 115_712, 2),  # shared memory: twice 115712 + 1024 is all of it
        (128, 32, 115_713, 1),
        (384, 24, 1_024, 5),  # threads: 5 * 384 of 2048
    ],
)
def test_ctas_that_fit_an_sm(threads, registers, smem_bytes, ctas):
    kernel = KernelReport(
        name="k",
        threads=threads,
        registers=registers,
        spill_bytes=0,
        stack_bytes=0,
        smem_bytes=smem_bytes,
        ptx="",
    )
    assert kernel.ctas_per_sm(DEVICES["h200"]) == ctas
