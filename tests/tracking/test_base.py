import pytest

from paxkv.errors import ConfigError, PaxkvError
from paxkv.tracking import RunInfo, Trackers

CALLS = ("start", "step", "request", "event", "finish")


class Spy:
    def __init__(self, *, required=False, fails_in=None, error=None):
        self.required = required
        self.seen = []
        self._fails_in = fails_in
        self._error = error or RuntimeError("the server is gone")

    def _call(self, name, *arguments):
        self.seen.append((name, *arguments))
        if name == self._fails_in:
            raise self._error

    def start(self, info):
        self._call("start")

    def step(self, record):
        self._call("step")

    def request(self, record):
        self._call("request")

    def event(self, event):
        self._call("event")

    def finish(self, status, summary=None, error=""):
        self._call("finish", status, error)


def run_through(trackers, tmp_path):
    trackers.start(RunInfo(run_dir=tmp_path))
    for name in CALLS[1:-1]:
        getattr(trackers, name)(None)
    trackers.finish("completed", {})


def names(spy):
    return [name for name, *_ in spy.seen]


@pytest.mark.parametrize("fails_in", CALLS)
def test_a_failing_tracker_takes_nothing_from_the_others(tmp_path, fails_in, caplog):
    broken, files, other = Spy(fails_in=fails_in), Spy(required=True), Spy()
    run_through(Trackers([broken, files, other]), tmp_path)
    assert names(files) == names(other) == list(CALLS)
    assert names(broken) == list(CALLS[: CALLS.index(fails_in) + 1])
    assert len(caplog.records) == 1
    assert "the server is gone" in caplog.text


def test_a_required_tracker_is_asked_first_and_stops_the_start(tmp_path):
    other = Spy()
    files = Spy(required=True, fails_in="start", error=ConfigError("used"))
    trackers = Trackers([other, files])
    with pytest.raises(ConfigError, match="used"):
        trackers.start(RunInfo(run_dir=tmp_path))
    trackers.finish("failed")
    assert names(files) == ["start"]
    assert other.seen == []


def test_a_required_tracker_that_fails_at_the_end_still_lets_the_others_finish(tmp_path):
    files = Spy(required=True, fails_in="finish", error=PaxkvError("no space"))
    other = Spy()
    with pytest.raises(PaxkvError, match="no space"):
        run_through(Trackers([files, other]), tmp_path)
    assert other.seen[-1] == ("finish", "failed", "no space")


def test_a_required_tracker_that_fails_in_between_is_not_dropped(tmp_path):
    files = Spy(required=True, fails_in="step", error=PaxkvError("no space"))
    trackers = Trackers([files])
    trackers.start(RunInfo(run_dir=tmp_path))
    with pytest.raises(PaxkvError):
        trackers.step(None)
    trackers.finish("failed", None, "no space")
    assert files.seen[-1] == ("finish", "failed", "no space")
