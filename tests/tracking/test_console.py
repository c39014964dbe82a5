import io
import os
import pty

import pytest

from paxkv.metrics import Slo, summarize
from paxkv.tracking import RunInfo
from paxkv.tracking.console import ConsoleTracker


@pytest.fixture
def show(request_record, step_record):
    def show(file, run_dir, status="completed", with_summary=True, error=""):
        requests = [request_record([0.1, 0.2, 0.3], request_id=str(i)) for i in range(4)]
        steps = [
            step_record(step=i, start_s=i / 10, duration_s=0.1, blocks_live=5, blocks_free=5)
            for i in range(4)
        ]
        tracker = ConsoleTracker(file)
        tracker.start(
            RunInfo(
                run_dir=run_dir,
                header={"model": "SmolLM2 [135M] :smile:", "cache": "10 blocks"},
                num_requests=4,
            )
        )
        for step, request in zip(steps, requests, strict=True):
            tracker._next_shown = 0.0
            tracker.step(step)
            tracker.request(request)
        summary = summarize(requests, steps, [], 1.0, Slo(ttft_s=1.0), block_size=16)
        tracker.finish(status, summary if with_summary else None, error)

    return show


def test_plain_lines_where_it_is_no_terminal(show, tmp_path):
    file = io.StringIO()
    run_dir = tmp_path / ("a" * 120)
    show(file, run_dir)
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert lines[0] == "model: SmolLM2 [135M] :smile:"
    assert "1/4 requests, running 0, waiting 0, 0 tok/s, cache 50%" in lines
    assert "time to first token, mean / median / p99: 100 / 100 / 100 ms" in lines
    assert "goodput: 4.00 requests/s" in lines
    assert lines[-1] == f"records: {run_dir}"  # a path is never broken: it gets copied


def test_a_run_that_failed_says_why(show, tmp_path):
    file = io.StringIO()
    show(file, tmp_path, "failed", with_summary=False, error="no [blocks] left")
    lines = file.getvalue().splitlines()
    assert lines[-2:] == ["failed: no [blocks] left", f"records: {tmp_path}"]


def on_terminal(show, tmp_path):
    """Return what a terminal of 200 columns would get."""
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with os.fdopen(follower, "w") as file:
        show(file, tmp_path)
        file.flush()
        text = os.read(leader, 1 << 20).decode()
    os.close(leader)
    return text


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_tables_and_a_bar_on_a_terminal(show, tmp_path, terminal):
    text = on_terminal(show, tmp_path)
    assert "\x1b[" in text
    assert "SmolLM2 [135M] :smile:" in text
    assert "4/4" in text
    table = text[text.rindex("4/4") :]
    for word in ("result", "value", "unit", "time to first token", "ms", "% of blocks", "records:"):
        assert word in table
    assert all(len(line) <= 110 for line in table.splitlines() if "\x1b" not in line)


def test_no_color_is_plain_on_a_terminal_too(show, tmp_path, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_terminal(show, tmp_path)
