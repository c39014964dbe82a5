import pytest

from paxkv.models.source import TinyRandom


@pytest.fixture
def tiny_instead(monkeypatch):
    """Let an experiment load a small random model; returns what replaces its `load`."""

    def replace(run):
        monkeypatch.setattr(run, "load", lambda path, *heads: TinyRandom().load("float32", *heads))

    return replace
