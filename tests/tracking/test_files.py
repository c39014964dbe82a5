"""The files of a run: whole, readable at any time, never overwritten."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paxkv.errors import ConfigError, PaxkvError
from paxkv.tracking import RunInfo
from paxkv.tracking import files as files_module
from paxkv.tracking.files import FilesTracker, refuse_used_folder

FILES = {
    "status.json",
    "env.json",
    "events.jsonl",
    "steps.parquet",
    "requests.parquet",
    "summary.json",
}


def read_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def event_steps(run_dir):
    text = (run_dir / "events.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_whole_run(tmp_path, request_record, step_record, event_record):
    run_dir = tmp_path / "deep" / "run"
    tracker = FilesTracker()
    tracker.start(
        RunInfo(run_dir=run_dir, name="n", config={"kv": "fp8"}, env={"python": "3.12"}, choices={})
    )
    status = read_json(run_dir / "status.json")
    assert (status["status"], status["pid"]) == ("running", os.getpid())
    tracker.step(step_record(step=1))
    tracker.event(event_record("preempt", request_id="a", data={"cost": float("nan")}))
    tracker.request(request_record([1.0, 2.5], request_id="a", output_token_ids=(7, 8)))
    tracker.request(request_record(request_id="b", finish_reason=None))
    tracker.finish("completed", {"completed": 1, "mean": None})
    assert set(os.listdir(run_dir)) == FILES
    assert read_json(run_dir / "status.json")["status"] == "completed"
    assert read_json(run_dir / "status.json")["finished_at"] is not None
    assert read_json(run_dir / "summary.json") == {"completed": 1, "mean": None}
    env = read_json(run_dir / "env.json")
    assert (env["config"], env["python"], env["name"]) == ({"kv": "fp8"}, "3.12", "n")
    [event] = (run_dir / "events.jsonl").read_text().splitlines()
    assert json.loads(event)["data"] == {"cost": None}
    requests = pq.read_table(run_dir / "requests.parquet")
    assert requests["request_id"].to_pylist() == ["a", "b"]
    assert requests["output_token_ids"].to_pylist() == [[7, 8], []]
    assert requests["token_times_s"].to_pylist() == [[1.0, 2.5], []]
    assert requests["finish_reason"].to_pylist() == ["length", None]
    assert pq.read_table(run_dir / "steps.parquet")["step"].to_pylist() == [1]


def test_column_types(tmp_path):
    FilesTracker().start(RunInfo(run_dir=tmp_path / "run"))
    requests = pq.read_schema(tmp_path / "run" / "requests.parquet")
    assert requests.field("output_token_ids").type.value_type == pa.int32()
    assert requests.field("token_times_s").type.value_type == pa.float64()
    assert requests.field("request_id").type == pa.string()
    assert requests.field("first_token_s").type == pa.float64()
    assert requests.names[:4] == ["request_id", "tenant", "priority", "arrival_s"]
    assert {"finish_reason", "num_preemptions", "recomputed_tokens"} < set(requests.names)
    steps = pq.read_schema(tmp_path / "run" / "steps.parquet")
    assert {"step", "start_s", "duration_s", "blocks_free", "tokens_held"} < set(steps.names)


@pytest.mark.parametrize("status", ["running", "completed", "interrupted", "failed"])
def test_a_folder_that_holds_a_run_is_refused_untouched(tmp_path, status):
    (tmp_path / "status.json").write_text(json.dumps({"status": status}))
    (tmp_path / "requests.parquet").write_bytes(b"precious")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.* already holds a run"):
        FilesTracker().start(RunInfo(run_dir=tmp_path))
    with pytest.raises(ConfigError):
        refuse_used_folder(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_new_folder_is_not_refused(tmp_path):
    refuse_used_folder(tmp_path)
    refuse_used_folder(tmp_path / "none")


def test_of_runs_that_start_at_once_in_one_folder_one_goes_on(tmp_path, monkeypatch):
    # hydra-ecosystem/hydra#2925, with the first look of each too early to see the others
    monkeypatch.setattr(files_module, "refuse_used_folder", lambda run_dir: None)
    outcomes = []
    barrier = threading.Barrier(4)

    def run(index):
        barrier.wait()
        try:
            FilesTracker().start(RunInfo(run_dir=tmp_path / "run", name=str(index)))
            outcomes.append("started")
        except ConfigError:
            outcomes.append("refused")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 3 + ["started"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(PaxkvError, match=r"cannot write there.*Try hydra\.run\.dir=DIR"):
            FilesTracker().start(RunInfo(run_dir=run_dir))


KILLED = """
import sys, time, pathlib
sys.path[:0] = {path!r}
from paxkv.metrics import Event, RequestRecord, StepRecord
from paxkv.tracking import RunInfo
from paxkv.tracking.files import FilesTracker
zero = dict.fromkeys(StepRecord.__dataclass_fields__, 0) | dict(tenant_blocks={{}})
request = dict.fromkeys(RequestRecord.__dataclass_fields__, None) | dict(
    tenant="t", priority=0, arrival_s=0.0, prompt_tokens=1, cached_prompt_tokens=0,
    forked_prompt_tokens=0,
    output_tokens=1, output_token_ids=(1,), token_times_s=(1.0,), message="", num_preemptions=0,
    num_swaps=0, recomputed_tokens=0, prompt_text="", output_text="")
tracker = FilesTracker(flush_s=0.05)
tracker.start(RunInfo(run_dir=pathlib.Path({run_dir!r})))
step = 0
while True:
    step += 1
    tracker.step(StepRecord(**(zero | dict(step=step))))
    tracker.event(Event(time_s=0.0, step=step, kind="evict"))
    tracker.request(RequestRecord(**(request | dict(request_id=str(step)))))
    if step == 50:
        print("going", flush=True)
    time.sleep(0.001)
"""


def test_a_killed_run_can_be_read(tmp_path):
    run_dir = tmp_path / "run"
    code = KILLED.format(path=sys.path, run_dir=str(run_dir))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 20
        while pq.read_metadata(run_dir / "steps.parquet").num_rows < 50:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    status = read_json(run_dir / "status.json")
    assert (status["status"], status["pid"]) == ("running", process.pid)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == list(range(1, len(events) + 1))
    steps = pq.read_table(run_dir / "steps.parquet")["step"].to_pylist()
    requests = pq.read_table(run_dir / "requests.parquet")["request_id"].to_pylist()
    assert steps == list(range(1, len(steps) + 1))
    assert requests == [str(i + 1) for i in range(len(requests))]
    assert 50 <= len(steps) <= len(events) + 1  # a step comes before its event


@pytest.fixture
def full_disk(monkeypatch):
    """A switch: while on, writes of more than a few bytes fail half-way, as on a full disk."""
    state = {"full": False}
    real_open, real_write = open, os.write

    class HalfFile:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

        def write(self, data):
            self._file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fake_open(path, mode="r", *args, **kwargs):
        file = real_open(path, mode, *args, **kwargs)
        return HalfFile(file) if state["full"] and "w" in mode else file

    def fake_write(descriptor, data):
        return real_write(descriptor, data[: len(data) // 2] if state["full"] else data)

    monkeypatch.setattr("paxkv.tracking.atomic.open", fake_open, raising=False)
    monkeypatch.setattr("paxkv.tracking.eventlog.os.write", fake_write)
    return state


def test_a_disk_full_at_the_end(tmp_path, full_disk, step_record, event_record, caplog):
    run_dir = tmp_path / "run"
    tracker = FilesTracker(flush_s=0.0)
    tracker.start(RunInfo(run_dir=run_dir))
    tracker.step(step_record(step=1))
    tracker.event(event_record(step=1))
    full_disk["full"] = True
    tracker._next_flush = 0.0
    tracker.step(step_record(step=2))
    tracker.event(event_record(step=2))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    with pytest.raises(PaxkvError) as caught:
        tracker.finish("completed", {"completed": 0})
    message = str(caught.value)
    assert str(run_dir) in message
    assert "No space left" in message
    assert "summary.json" in message
    assert "hydra.run.dir=DIR" in message
    # What was whole before still is; nothing is there by half.
    assert event_steps(run_dir) == [1]
    assert pq.read_table(run_dir / "steps.parquet").num_rows <= 1
    assert set(os.listdir(run_dir)) == FILES - {"summary.json"}


def test_a_disk_full_for_a_while(tmp_path, full_disk, step_record, event_record, request_record):
    run_dir = tmp_path / "run"
    tracker = FilesTracker(flush_s=0.0)
    tracker.start(RunInfo(run_dir=run_dir))
    for step in range(6):
        full_disk["full"] = 2 <= step < 4
        tracker._next_flush = 0.0
        tracker.step(step_record(step=step))
        tracker.event(event_record(step=step))
    tracker.request(request_record([1.0]))
    tracker.finish("completed", {})
    assert pq.read_table(run_dir / "steps.parquet")["step"].to_pylist() == list(range(6))
    assert event_steps(run_dir) == list(range(6))
    assert read_json(run_dir / "status.json")["status"] == "completed"


def test_a_disk_full_at_the_start_gives_the_folder_back(tmp_path, full_disk):
    full_disk["full"] = True
    with pytest.raises(PaxkvError, match="No space left"):
        FilesTracker().start(RunInfo(run_dir=tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []
    full_disk["full"] = False
    FilesTracker().start(RunInfo(run_dir=tmp_path / "run"))


def test_what_was_saved_is_recorded_as_failed(tmp_path, monkeypatch, step_record):
    tracker = FilesTracker()
    tracker.start(RunInfo(run_dir=tmp_path / "run"))
    tracker.step(step_record())

    def broken():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tracker, "_write_requests", broken)
    with pytest.raises(PaxkvError, match=r"Saved: events\.jsonl .* steps\.parquet \(1 steps\)"):
        tracker.finish("completed", {})
    status = read_json(tmp_path / "run" / "status.json")
    assert status["status"] == "failed"
    assert "requests.parquet (0 requests)" in status["error"]


def test_an_interrupted_run(tmp_path, request_record):
    tracker = FilesTracker()
    tracker.start(RunInfo(run_dir=tmp_path / "run"))
    tracker.request(request_record([1.0], finish_reason=None, finish_s=None))
    tracker.finish("interrupted", {"completed": 0}, "stopped by the user")
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["status"], status["error"]) == ("interrupted", "stopped by the user")
    assert pq.read_table(tmp_path / "run" / "requests.parquet").num_rows == 1


def test_tables_are_rewritten_at_a_bounded_cost(tmp_path, step_record, monkeypatch):
    now = {"s": 0.0}
    monkeypatch.setattr(files_module.time, "monotonic", lambda: now["s"])
    tracker = FilesTracker(flush_s=1.0)
    tracker.start(RunInfo(run_dir=tmp_path / "run"))
    writes = []

    def write():
        writes.append(now["s"])
        now["s"] += 0.5

    monkeypatch.setattr(tracker, "_write_tables", write)
    for _ in range(2_000):
        now["s"] += 0.05
        tracker.step(step_record())
    assert len(writes) * 0.5 < 0.06 * now["s"] + 0.5
    assert writes
