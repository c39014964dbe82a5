"""Runs from the command line to the last record, in one process."""

import json
import shlex
import sys
from pathlib import Path

import pyarrow.parquet as pq
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from paxkv.config import register_schema
from paxkv.entry import serve
from paxkv.entry.conf import conf_dir


def tokens(folder: Path) -> dict[str, list[int]]:
    table = pq.read_table(folder / "requests.parquet")
    rows = zip(table["request_id"].to_pylist(), table["output_token_ids"].to_pylist(), strict=True)
    return dict(rows)


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_a_run_leaves_its_records_and_can_be_run_again(paxkv_run, small, monkeypatch) -> None:
    returned = []
    original = serve.serve
    monkeypatch.setattr(serve, "serve", lambda c: returned.append(original(c)) or returned[-1])
    first = paxkv_run(*small, "workload.temperature=1.0", "debug=invariants")
    assert first.status == 0, first.err
    assert status(first.folder)["status"] == "completed"
    names = {path.name for path in first.folder.iterdir()}
    assert {
        ".hydra",
        "env.json",
        "events.jsonl",
        "paxkv.log",
        "reproduce.sh",
        "requests.parquet",
        "status.json",
        "steps.parquet",
        "summary.json",
    } <= names
    summary = json.loads((first.folder / "summary.json").read_text())
    assert summary["completed"] == 3
    assert returned == [summary["output_throughput"]]  # the objective of a sweeper
    env = json.loads((first.folder / "env.json").read_text())
    assert env["choices"]["workload"] == "random"
    assert env["config"]["engine"]["max_num_seqs"] == 2
    for label in ("model", "kv cache", "capacity", "kernel", "pool"):
        assert f"{label}: " in first.out

    script = (first.folder / "reproduce.sh").read_text().splitlines()[-1]
    words = shlex.split(script)
    assert words[words.index("-m") + 1] == "paxkv.run"
    arguments = words[words.index("paxkv.run") + 1 : -1]  # the last word is "$@"
    again = paxkv_run(*arguments, "hydra.run.dir=again")
    assert again.status == 0, again.err
    assert tokens(again.folder) == tokens(first.folder)
    assert all(tokens(first.folder).values())
    assert (again.folder / "paxkv.log").is_file()  # under the same settings of Hydra's
    for word in ("allocator Paged", "preempt Recompute", "tenants NoTenants", "prefix on"):
        assert word in again.out
    assert "already holds a run" in paxkv_run(*arguments, "hydra.run.dir=again").err


def test_a_folder_that_holds_a_run_stays_as_it_is(paxkv_run, small) -> None:
    assert paxkv_run(*small, "workload.num_requests=1").status == 0
    folder = Path("run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = paxkv_run(*small, "seed=1")
    assert outcome.status == 1
    assert "already holds a run" in outcome.err
    assert "hydra.run.dir" in outcome.err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_gives_each_job_its_folder_and_goes_on_after_a_failure(paxkv_run, small) -> None:
    outcome = paxkv_run("-m", *small, "workload.num_requests=1", "seed=0,-1,2")
    assert outcome.status == 1
    assert "seed=-1: must be 0 or more" in outcome.err
    assert "1 of 3 jobs failed" in outcome.err
    jobs = [outcome.folder / str(number) for number in range(3)]
    assert [status(jobs[number])["status"] for number in (0, 2)] == ["completed"] * 2
    assert not (jobs[1] / "status.json").exists()
    assert tokens(jobs[0]) != tokens(jobs[2])

    again = paxkv_run("-m", *small, "workload.num_requests=1", "seed=0,2")
    assert again.status == 1
    assert "hydra.sweep.dir" in again.err


def test_runs_that_start_together_get_folders_of_their_own() -> None:
    register_schema()
    folders = set()
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        for _ in range(4):
            config = compose("config", return_hydra_config=True)
            folders.add(OmegaConf.select(config, "hydra.run.dir"))
            folders.add(OmegaConf.select(config, "hydra.sweep.dir"))
    assert len(folders) == 8


def test_bad_lines_are_named_and_the_run_is_marked_failed(paxkv_run, small, tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 1}\n{"prompt": ""}\n{"prompt": "b"\n')
    rest = [override for override in small if not override.startswith("workload")]
    outcome = paxkv_run(*rest, "workload=prompts", f"workload.path={path}")
    assert outcome.status == 1
    assert f"{path}:2: " in outcome.err
    assert f"{path}:3: " in outcome.err
    assert "Traceback" not in outcome.err
    assert status(outcome.folder)["status"] == "failed"


POLICY = """
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Oldest:
    honest: bool

    def choose(self, candidates, need_blocks):
        return candidates[0] if self.honest else replace(candidates[0], request_id="nobody")
"""

CROWDED = (
    "workload.num_requests=2",
    "workload.prompt_len.low=16",
    "workload.output_len.low=40",
    "workload.output_len.median=40",
    "workload.output_len.high=40",
    "cache.num_blocks=4",
)


def test_a_policy_of_the_users_needs_a_class_and_a_yaml(
    paxkv_run, small, tmp_path, monkeypatch
) -> None:
    (tmp_path / "my_policies.py").write_text(POLICY)
    (tmp_path / "mine" / "victim").mkdir(parents=True)
    (tmp_path / "mine" / "victim" / "oldest.yaml").write_text(
        "_target_: my_policies.Oldest\nhonest: true\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    arguments = ("--config-dir", str(tmp_path / "mine"), *small, *CROWDED, "victim=oldest")
    outcome = paxkv_run(*arguments)
    assert outcome.status == 0, outcome.err
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["preempt"]["num_preemptions"] > 0

    nonsense = paxkv_run(*arguments, "victim.honest=false", "hydra.run.dir=nonsense")
    assert nonsense.status == 1
    assert "nobody" in nonsense.err
    assert "Traceback" not in nonsense.err
    assert status(nonsense.folder)["status"] == "failed"
    assert len(tokens(nonsense.folder)) == 2  # what was in flight is recorded
