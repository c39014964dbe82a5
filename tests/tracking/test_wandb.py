"""W&B for real, offline: what was logged is read back from its own file."""

import json
import logging
import struct

import pytest

from paxkv.errors import ConfigError
from paxkv.tracking import RunInfo
from paxkv.tracking.wandb import WandbTracker


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No login, no settings of the user's, nothing outside of the test's folder."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def read_records(run_dir):
    """Yield the records of the one offline run of a folder.

    The file is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB that hold chunks of
    checksum, length and kind (1 whole, 2 first, 3 middle, 4 last).
    """
    from wandb.proto import wandb_internal_pb2

    [path] = run_dir.glob("wandb/offline-run-*/*.wandb")
    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        left = 32_768 - offset % 32_768
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(run_dir):
    rows = []
    for record in read_records(run_dir):
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def summary(run_dir):
    found = {}
    for record in read_records(run_dir):
        if record.HasField("summary"):
            for item in record.summary.update:
                found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def test_two_runs_in_one_process_keep_all_their_steps(tmp_path, step_record, request_record):
    # wandb/wandb#2812
    for point in range(2):
        tracker = WandbTracker(max_table_rows=2)
        tracker.start(
            RunInfo(
                run_dir=tmp_path / str(point),
                name=f"kv={point}",
                config={"kv": {"point": point}},
                choices={"kv": "fp8"},
            )
        )
        for step in range(1, 10):
            tracker.step(step_record(step=step, running=100 * point + step))
        for index in range(3):
            tracker.request(request_record([1.0], request_id=str(index)))
        tracker.finish("completed", {"completed": 3, "cache": {"usage_mean": 0.5, "x": None}})
    for point in range(2):
        run_dir = tmp_path / str(point)
        rows = [row for row in history(run_dir) if "queue/running" in row]
        assert [row["step"] for row in rows] == list(range(1, 10))
        assert [row["queue/running"] for row in rows] == [100 * point + s for s in range(1, 10)]
        internal = [row["_step"] for row in rows]
        assert internal == sorted(set(internal))
        end = summary(run_dir)
        assert (end["completed"], end["cache/usage_mean"]) == (3, 0.5)
        assert (end["status"], end["requests_not_in_table"]) == ("completed", 1)
        [run] = [record.run for record in read_records(run_dir) if record.HasField("run")][:1]
        assert list(run.tags) == ["kv=fp8"]
        assert run.display_name == f"kv={point}"
        [table] = run_dir.glob("wandb/offline-run-*/files/media/table/requests*.json")
        content = json.loads(table.read_text())
        assert content["columns"][0] == "request_id"
        assert [row[0] for row in content["data"]] == ["0", "1"]


def test_a_step_that_goes_back_is_not_lost(tmp_path, step_record):
    # wandb/wandb#9449
    tracker = WandbTracker()
    tracker.start(RunInfo(run_dir=tmp_path))
    for step in (4, 3, 5):
        tracker.step(step_record(step=step))
    tracker.finish("interrupted")
    assert [row["step"] for row in history(tmp_path) if "queue/running" in row] == [4, 3, 5]
    assert summary(tmp_path)["status"] == "interrupted"


def test_no_server_means_offline_with_one_warning(tmp_path, monkeypatch, caplog, step_record):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = WandbTracker(init_timeout_s=1.0)
    with caplog.at_level(logging.WARNING, "paxkv"):
        tracker.start(RunInfo(run_dir=tmp_path))
    tracker.step(step_record(step=1))
    tracker.finish("completed", {})
    ours = [record for record in caplog.records if record.name.startswith("paxkv")]
    assert len(ours) == 1
    assert "recorded offline" in ours[0].getMessage()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


@pytest.fixture
def init_modes(monkeypatch):
    """The modes a run was opened in, without opening one."""
    modes = []

    class Run:
        def define_metric(self, *names, **options):
            pass

    def init(self, info, mode):
        modes.append(mode)
        return Run()

    monkeypatch.setattr(WandbTracker, "_init", init)
    return modes


def test_offline_unless_logged_in_or_told(tmp_path, monkeypatch, init_modes):
    info = RunInfo(run_dir=tmp_path)
    WandbTracker().start(info)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    WandbTracker().start(info)
    WandbTracker(mode="online").start(info)
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    WandbTracker().start(info)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    WandbTracker().start(info)
    assert init_modes == ["offline", "disabled", "online", "online", "offline"]


@pytest.mark.parametrize("place", ["argument", "environment"])
def test_an_unknown_mode_is_refused(monkeypatch, place):
    if place == "environment":
        monkeypatch.setenv("WANDB_MODE", "oflin")
        with pytest.raises(ConfigError, match="WANDB_MODE=oflin: must be one of online"):
            WandbTracker()
    else:
        with pytest.raises(ConfigError, match=r"track\.mode=oflin"):
            WandbTracker(mode="oflin")
