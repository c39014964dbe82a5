"""The benchmark: its oracle catches wrong kernels, its records say what they should."""

import dataclasses
import functools
import importlib
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import available_implementations, paged_decode, paged_prefill, write_kv
from pallas_kernels.bench import (
    cli,
    contenders,
    oracle,
    sweep,
    table,
    timing,
    verdicts,
    workload,
    writes,
)
from pallas_kernels.bench.cases import Case, sweep_cases
from pallas_kernels.paged_attention.specs import GPU_SPECS, SPECS, STEP_SPECS, AttentionSpec

TINY = {"rows": 2, "heads": 4, "kv_heads": 2, "dim": 8, "layers": 2, "tokens": (20, 40)}
SMALL = {"heads": 4, "dim": 16, "lens": (0, 1, 17, 33)}
DECODE = Case(name="small", op="decode", dtype="int8", **SMALL)
WRITE = Case(name="small", op="write", dtype="int8", **{**SMALL, "lens": (20,)})


def run_on(device, monkeypatch):
    """Make the benchmark believe it runs on some device."""
    monkeypatch.setattr(jax, "default_backend", lambda: device)


# --- the oracle and the sweep ---------------------------------------------------------------------


def test_oracle_by_hand():
    keys = np.array([[[0.0]], [[1.0]], [[2.0]]])
    values = np.array([[[1.0]], [[2.0]], [[4.0]]])
    q = np.ones((1, 1, 1))
    attend = lambda **options: oracle.attend(
        q, keys, values, np.array([2]), scale=np.log(2), **options
    )
    assert attend()[0, 0, 0] == pytest.approx((1 * 1 + 2 * 2 + 4 * 4) / 7)
    assert attend(window=1)[0, 0, 0] == pytest.approx(4)
    assert attend(window=1, num_sink_tokens=1)[0, 0, 0] == pytest.approx((1 * 1 + 4 * 4) / 5)
    capped = 2 ** (np.tanh(np.log(2) * np.arange(3)) / np.log(2))
    assert attend(soft_cap=1.0)[0, 0, 0] == pytest.approx(capped @ [1, 2, 4] / capped.sum())


def test_every_op_dtype_and_flag_is_swept():
    cases = sweep_cases()
    for op in ("decode", "prefill", "write"):
        mine = [case for case in cases if case.op == op]
        assert {case.dtype for case in mine} >= {"bfloat16", "float16", "int8", "float8_e4m3fn"}
        if op != "write":
            assert {case.dim for case in mine} >= {64, 80, 96, 128, 256}
            assert {case.heads // case.kv_heads for case in mine} >= {1, 3, 4, 8, 16}
            assert any(case.window and case.num_sink_tokens for case in mine)
            assert any(case.soft_cap for case in mine)
        assert any(case.deterministic for case in mine) == (op == "decode")
    assert len({(case.op, case.dtype, case.name) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(DECODE, window=10, num_sink_tokens=3, soft_cap=2.0),
        dataclasses.replace(DECODE, dtype="bfloat16", deterministic=True),
        dataclasses.replace(DECODE, op="prefill", chunk=20, dtype="float8_e4m3fn"),
        dataclasses.replace(DECODE, dtype="float32", q_dtype="float32"),
        WRITE,
        dataclasses.replace(WRITE, dtype="float8_e5m2", q_dtype="float32"),
    ],
    ids=lambda case: f"{case.op}-{case.dtype}",
)
def test_sweep_passes_what_is_right(case):
    (outcome,) = sweep.run_sweep([case], ["xla"])
    assert outcome.status == sweep.OK, outcome.reason
    assert outcome.ratio is not None and outcome.ratio.of_bound <= 1


def ignore_window(**args):
    return paged_decode(**{**args, "window": None})


def drop_v_scale(pages, **args):
    ones = jnp.where(jnp.isnan(pages.v_scale), jnp.nan, 1.0)
    return paged_decode(pages=dataclasses.replace(pages, v_scale=ones), **args)


def miss_the_last_token(context_lens, **args):
    return paged_decode(context_lens=jnp.maximum(context_lens - 1, 0), **args)


def read_another_layer(layer, **args):
    return paged_decode(layer=layer - 1, **args)


def leave_padding_unset(**args):
    return paged_prefill(**args) + 1e-3


@pytest.mark.parametrize(
    ("op", "wrong", "reason"),
    [
        ("decode", ignore_window, "row 3 of 33 tokens"),
        ("decode", drop_v_scale, "of its bound"),
        ("decode", miss_the_last_token, "of its bound"),
        ("decode", read_another_layer, "of its bound"),
        ("prefill", leave_padding_unset, "inf of its bound, row 0"),
    ],
)
def test_sweep_catches_wrong_attention(monkeypatch, op, wrong, reason):
    monkeypatch.setattr(sweep, f"paged_{op}", wrong)
    case = dataclasses.replace(DECODE, op=op, window=10, chunk=20)
    (outcome,) = sweep.run_sweep([case], ["reference"])
    assert outcome.status == sweep.FAILED
    assert reason in outcome.reason
    assert outcome.variant == ("reference", op, "int8")


def write_what_must_be_skipped(slot_mapping, **args):
    return write_kv(slot_mapping=jnp.where(slot_mapping < 0, 3, slot_mapping), **args)


def forget_v(v, **args):
    return write_kv(v=v * 0.98, **args)


def write_all_layers(layer, pages, **args):
    return write_kv(layer=0, pages=write_kv(layer=layer, pages=pages, **args), **args)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (write_what_must_be_skipped, "not to be written"),
        (write_all_layers, "not to be written"),
        (forget_v, "v_scale"),
    ],
)
def test_sweep_catches_wrong_writes(monkeypatch, wrong, reason):
    monkeypatch.setattr(sweep, "write_kv", wrong)
    (outcome,) = sweep.run_sweep([WRITE], ["xla"])
    assert outcome.status == sweep.FAILED and reason in outcome.reason


def test_sweep_names_what_cannot_be_served_and_survives_a_crash(monkeypatch):
    (outcome,) = sweep.run_sweep([DECODE], ["mosaic"])
    assert outcome.status == sweep.UNSUPPORTED and "Hopper" in outcome.reason

    def crash(**args):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(sweep, "paged_decode", crash)
    (outcome,) = sweep.run_sweep([DECODE], ["xla"])
    assert (outcome.status, outcome.reason) == (sweep.FAILED, "RuntimeError: no such")


# --- timing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("static_layer", [False, True])
def test_program_takes_layers_in_turn(static_layer):
    def call(operands, arguments, layer):
        return arguments["q"] + operands[layer]

    program = timing.build_program(call, layers=3, calls=6, static_layer=static_layer)
    out = jax.jit(program)(jnp.array([10.0, 20.0, 30.0]), {"q": jnp.ones(())})
    assert out == 31.0  # the sixth call reads the last layer


def test_pools_outlast_the_cache_and_programs_take_whole_turns():
    assert timing.cold_layers(2**30) == 2
    assert timing.cold_layers(1) == 64
    assert (timing.cold_layers(50 * 2**20) - 1) * 50 * 2**20 >= timing.COLD_BYTES
    assert timing.num_calls(250e-6, 2, None) == 32
    assert timing.num_calls(1e-6, 7, None) % 7 == 0
    assert timing.num_calls(1.0, 5, None) == 5
    assert timing.num_calls(1e-6, 5, 1) == 1


def test_copy_bandwidth_counts_read_and_written_bytes():
    assert timing.copy_bandwidth(2**20, repeats=2) > 0


def time_tiny(spec, names, **settings):
    settings = table.Settings(copy_rate=1e9, seconds=0, layers=2, **settings)
    records = table.time_shape(spec, "int8", names, settings, table.Clock(100))
    return {record.contender: record for record in records}


def test_table_times_what_is_right_and_names_the_rest():
    spec = AttentionSpec(name="tiny", window=15, **TINY)
    names = ("xla", "reference", "mosaic", "jax-triton", "jax-cudnn")
    records = time_tiny(spec, names, failed={("reference", "decode", "int8")})
    assert tuple(records) == names
    xla = records["xla"]
    assert xla.status == table.OK and xla.calls == 1 and xla.runs >= 3
    assert xla.bytes == 2 * 15 * 2 * 2 * (8 + 4) + 2 * 2 * 4 * 8 * 2  # K, V, scales; q, output
    assert xla.bytes_per_s == pytest.approx(xla.bytes / xla.call_s)
    assert xla.copy_share == pytest.approx(xla.bytes_per_s / 1e9)
    assert xla.of_bound is not None and xla.of_bound <= 1
    assert records["reference"].status == sweep.FAILED
    assert "failed the correctness sweep" in records["reference"].reason
    assert "Hopper" in records["mosaic"].reason
    assert records["jax-triton"].reason == "has no window"
    assert records["jax-cudnn"].reason == "has no int8 KV"
    assert all(r.call_s is None and r.reason for r in records.values() if r is not xla)


@pytest.mark.parametrize("chunk", [None, 4])
def test_no_time_is_claimed_for_a_wrong_output(monkeypatch, chunk):
    op = "paged_decode" if chunk is None else "paged_prefill"
    right = getattr(contenders, op)
    monkeypatch.setattr(contenders, op, lambda **args: right(**args) * jnp.bfloat16(1.1))
    record = time_tiny(AttentionSpec(name="tiny", chunk=chunk, **TINY), ["xla"])["xla"]
    assert record.status == sweep.FAILED and record.reason.startswith("wrong: error")
    assert record.call_s is None and record.bytes_per_s is None


def test_writes_are_timed_in_place(monkeypatch):
    monkeypatch.setattr(writes, "_CALLS", 3)
    settings = table.Settings(copy_rate=1e9, seconds=0, failed={("reference", "write", "int8")})
    names = ("xla", "reference", "mosaic")
    xla, failed, mosaic = writes.time_writes(5, "int8", names, settings, table.Clock(100))
    assert xla.status == table.OK and xla.call_s is not None
    assert xla.bytes == 5 * 2 * 8 * (128 * 2 + 128 + 4)  # K and V: read in 16 bits, codes, scales
    assert failed.status == sweep.FAILED and failed.call_s is None
    assert mosaic.status == sweep.UNSUPPORTED and "Hopper" in mosaic.reason


def test_shapes_that_do_not_fit_are_left_out_with_the_reason():
    huge = AttentionSpec(name="huge", **{**TINY, "tokens": 10**9})
    settings = table.Settings(copy_rate=1e9)
    (record,) = table.time_shape(huge, "int8", ["xla"], settings, table.Clock(100))
    assert record.status == table.LEFT_OUT and record.reason.startswith("needs ")
    (record,) = table.time_shape(huge, "int8", ["xla"], settings, table.Clock(0))
    assert record.reason == "the time budget is spent"


def baseline_module(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(cli._BASELINE_MODULES[name])


def test_jax_triton_gets_the_layout_it_wants(monkeypatch):
    """Run by Pallas's interpreter, it agrees with the oracle."""
    module = baseline_module("jax-triton")
    interpreted = functools.partial(module.paged_attention, interpret=True)
    monkeypatch.setattr(module, "paged_attention", interpreted)
    spec = AttentionSpec(name="tiny", soft_cap=5.0, **{**TINY, "dim": 16})
    load = workload.build_workload(spec, "int8", layers=2, q_dtype="bfloat16")
    contender = contenders.make_contender("jax-triton", load)
    out = jax.jit(contender.call)(contender.operands, contenders.arguments_of(load), 1)
    assert workload.Checker(load).check(out, 1).of_bound <= 1
    assert workload.Checker(load).check(out, 0).of_bound > 1


def test_jax_cudnn_gets_the_layout_it_wants(monkeypatch):
    """It accepts the call; only a GPU can run it."""
    module = baseline_module("jax-cudnn")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    spec = AttentionSpec(name="tiny", **{**TINY, "tokens": 40, "dim": 16, "soft_cap": 5.0})
    load = workload.build_workload(spec, "bfloat16", layers=2, q_dtype="bfloat16")
    with pytest.raises(contenders.UnavailableError, match="has no soft cap"):
        contenders.make_contender("jax-cudnn", load)
    plain = load._replace(spec=dataclasses.replace(spec, soft_cap=None))
    contender = contenders.make_contender("jax-cudnn", plain)
    assert [x.shape for pair in contender.operands for x in pair] == [(6, 2, 16, 16)] * 4
    arguments = contenders.arguments_of(plain)
    out = jax.eval_shape(lambda x, y: contender.call(x, y, 1), contender.operands, arguments)
    assert (out.shape, out.dtype) == (load.q.shape, load.q.dtype)
    uneven = AttentionSpec(name="tiny", **{**TINY, "zipf": True, "tokens": 40})
    load = workload.build_workload(uneven, "bfloat16", layers=1, q_dtype="bfloat16")
    with pytest.raises(contenders.UnavailableError, match="wants rows × table width"):
        contenders.make_contender("jax-cudnn", load)


# --- verdicts -------------------------------------------------------------------------------------


def record(spec, dtype, contender, call_s, *, moved=10**9, share=0.95):
    return table.Record(
        spec=spec,
        op="decode",
        dtype=dtype,
        contender=contender,
        status=table.OK,
        call_s=call_s,
        bytes=moved,
        copy_share=share,
    )


def test_verdicts_say_met_missed_or_why_not_measured():
    large = "llama8b-decode-64x4k"
    records = [
        record(large, "bfloat16", "mosaic", 230e-6),
        record(large, "int8", "mosaic", 150e-6),
        record(large, "bfloat16", "jax-triton", 500e-6),
        record("llama8b-decode-64xzipf4k", "bfloat16", "mosaic", 460e-6),
        table.Record(
            spec=large,
            op="decode",
            dtype="bfloat16",
            contender="jax-cudnn",
            status=sweep.FAILED,
            reason="no cuDNN",
        ),
    ]
    found = {verdict.target: verdict for verdict in verdicts.judge(records)}
    assert found[f"{large} bf16 ≤ 240 µs"][1:] == ("230.0 µs", True)
    assert found[f"{large} bf16 ≥ 90 % of the copy rate"][1:] == ("95.0%", True)
    assert found[f"{large} int8 ≥ 1.6 × faster than our bf16"][1:] == ("1.53 ×", False)
    assert found["≥ 2 × jax's Triton kernel"][1:] == ("2.17 ×", True)
    assert found["Zipf lengths ≥ 70 % of the uniform rate"][1:] == ("50.0%", False)
    cudnn = found["≥ 1 × cuDNN"]
    assert cudnn.met is None and "FAILED: no cuDNN" in cudnn.measured
    assert "not in this run" in found["one row of 32k ≤ 55 µs"].measured
    assert len(found) == 10


# --- the command ----------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_lists_what_it_would_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    run_on("cpu", monkeypatch)
    monkeypatch.setitem(cli._BASELINE_MODULES, "jax-cudnn", "jax._src.no_such_package.cudnn")
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "No GPU: JAX runs on cpu here" in out
    for name in (*GPU_SPECS, *contenders.contender_names()):
        assert name in out
    assert "absent: this jax has no jax._src.no_such_package.cudnn" in out
    assert not list(tmp_path.iterdir())


def test_paper_prints_every_shape(capsys):
    assert cli.main(["--paper"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in GPU_SPECS) and "Nothing here was measured" in out
    assert cli.main(["--paper", "--spec", "llama8b-decode-64x4k", "--dtype", "int8"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("chunk", [None, 4])
def test_steps_of_a_tiny_shape(monkeypatch, tmp_path, capsys, chunk):
    monkeypatch.setitem(SPECS, "tiny", AttentionSpec(name="tiny", chunk=chunk, **TINY))
    monkeypatch.setitem(SPECS, "huge", AttentionSpec(name="huge", **{**TINY, "tokens": 10**9}))
    path = tmp_path / "bench.json"
    arguments = ["--cpu", "--spec", "tiny", "huge", "--dtype", "int8", "--seconds", "0"]
    assert cli.main([*arguments, "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [r["implementation"] for r in records] == list(available_implementations())
    tokens = int(SPECS["tiny"].context_lens().sum())
    for r in records:
        # layers, K and V, heads, dim + scale
        assert r["live_bytes"] == 2 * tokens * 2 * 2 * (8 + 4)
        assert r["repeats"] == 3 and 0 < r["fastest_s"] <= r["step_s"]
        assert r["max_abs_difference"] < 1e-5
    assert "huge" in capsys.readouterr().out
    assert cli.main(["--cpu", "--implementation", "jax-cudnn", "--spec", "tiny"]) == 2


@pytest.mark.parametrize("wrong", [False, True])
def test_a_whole_run(monkeypatch, tmp_path, capsys, wrong):
    monkeypatch.chdir(tmp_path)
    run_on("gpu", monkeypatch)
    monkeypatch.setattr(cli, "sweep_cases", lambda: [DECODE])
    monkeypatch.setattr(cli, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setitem(SPECS, "tiny", AttentionSpec(name="tiny", **TINY))
    if wrong:
        monkeypatch.setattr(sweep, "paged_decode", miss_the_last_token)
    arguments = ["--spec", "tiny", "--dtype", "int8", "--seconds", "0"]
    assert cli.main([*arguments, "--implementation", "xla", "jax-cudnn"]) == int(wrong)
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["jax"] == jax.__version__ and document["copy_bytes_per_s"] == 1e9
    (outcome,) = document["sweep"]
    assert outcome["status"] == ("FAILED" if wrong else "ok")
    xla, cudnn = document["records"]
    assert (xla["call_s"] is None) == wrong and cudnn["status"] == "unsupported"
    assert all(verdict["met"] is None for verdict in document["verdicts"])
    out = capsys.readouterr().out
    assert ("exit status 1" in out) == wrong
    assert "not measured: mosaic on llama8b-decode-64x4k bfloat16 is not in this run" in out


def test_quick_runs_the_sweep_only(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "sweep_cases", lambda: [DECODE, WRITE])
    path = tmp_path / "sweep.json"
    assert cli.main(["--quick", "--implementation", "reference", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [x["op"] for x in document["sweep"]] == ["decode", "write"]
    assert "records" not in document


def test_step_and_gpu_shapes_are_all_named():
    assert SPECS.keys() == STEP_SPECS.keys() | GPU_SPECS.keys()
    assert all(name == spec.name for name, spec in SPECS.items())
