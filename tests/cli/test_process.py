"""What needs a process of its own: start-up, Ctrl-C, the wheel."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT), **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_help_names_groups_and_settings_and_imports_nothing_slow(tmp_path) -> None:
    (tmp_path / "mine" / "victim").mkdir(parents=True)
    (tmp_path / "mine" / "victim" / "eldest.yaml").touch()
    slow = ["jax", "flax", "hydra", "transformers", "wandb", "numpy", "pyarrow", "matplotlib"]
    code = (
        "import sys; sys.argv[1:] = ['--help', '--config-dir', 'mine']\n"
        "from paxkv.run import main\n"
        f"assert main() == 0; print('SLOW', *(set({slow}) & set(sys.modules)))"
    )
    process = python("-c", code, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "SLOW"
    for word in ("preempt ", "recompute*, swap", "kv=fp8", "max_num_batched_tokens", "eldest"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(("sent", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_run_keeps_what_was_there(sent, code, tmp_path, small) -> None:
    endless = (
        "engine.clock=wall",
        "engine.max_model_len=512",
        "workload.num_requests=2",
        "workload.prompt_len.low=8",
        "workload.output_len.low=500",
        "workload.output_len.high=500",
        "executor._target_=slow_executor.Slow",
        "hydra.run.dir=run",
    )
    (tmp_path / "slow_executor.py").write_text(
        "import time\n"
        "from paxkv.engine.device import DeviceExecutor\n"
        "class Slow(DeviceExecutor):\n"
        "    def execute(self, plan):\n"
        "        time.sleep(0.05)\n"
        "        return super().execute(plan)\n"
    )
    path = f"{tmp_path}{os.pathsep}{REPO_ROOT}"
    process = python("-m", "paxkv.run", *small, *endless, cwd=tmp_path, PYTHONPATH=path)
    steps = tmp_path / "run" / "steps.parquet"
    deadline = time.monotonic() + 120
    while not (steps.exists() and pq.read_metadata(steps).num_rows > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.Signals[sent])
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    folder = tmp_path / "run"
    assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"
    requests = pq.read_table(folder / "requests.parquet")
    assert requests.num_rows == 2
    assert requests["finish_reason"].null_count == 2
    assert all(requests["output_token_ids"].to_pylist())
    assert json.loads((folder / "summary.json").read_text())["requests"]


def test_a_wheel_runs_from_an_empty_folder(tmp_path, small) -> None:
    wheels, site, empty = tmp_path / "dist", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    done = subprocess.run(build, cwd=REPO_ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("paxkv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)  # pure Python: a wheel is the tree that an installer lays down
    code = (
        "import paxkv, pathlib, runpy; print('FROM', pathlib.Path(paxkv.__file__).parent)\n"
        "runpy.run_module('paxkv.run', run_name='__main__', alter_sys=True)"
    )
    arguments = (*small, "workload.num_requests=1", "hydra.run.dir=run")
    process = python("-c", code, *arguments, cwd=empty, PYTHONPATH=str(site))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"FROM {site / 'paxkv'}" in out
    assert json.loads((empty / "run" / "status.json").read_text())["status"] == "completed"
