import pytest

from experiments.shared.azure import TraceRow
from experiments.windows import run

SMALL = ["--sizes", "16", "--prompt-len=100", "--output-len=60", "--text-tokens=48"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(run, "read_trace", lambda: [TraceRow(0.0, 60, 20)] * 12)
    monkeypatch.setattr(run, "POOL_BLOCKS", 20)
    monkeypatch.setattr(run, "CHUNK_TOKENS", 32)


@pytest.mark.parametrize(
    "name", ["window=full", *(f"window={w} window.size=16" for w in ("sliding", "sinks"))]
)
def test_a_request_holds_no_more_than_its_bound(name):
    held = run.blocks_held(run.policies([16])[name], 100, 60)
    assert held.after_step <= held.in_step <= held.bound
    if name == "window=full":
        assert held == (10, 10, 10)
    else:
        assert held.after_step <= 3  # a window of 16 touches two blocks, sinks take one more


def test_the_script_prints_both_tables(tiny_instead, capsys):
    tiny_instead(run)
    run.main(SMALL)
    out = capsys.readouterr().out
    assert out.count("\n| window=sinks window.size=16 |") == 2
    at_once = [float(line.split("|")[5]) for line in out.splitlines()[4:7]]
    assert at_once[0] < min(at_once[1:])


def test_a_passed_bound_fails(monkeypatch, capsys):
    monkeypatch.setattr(run, "most_blocks_of", lambda *_: 1)
    with pytest.raises(SystemExit, match="window=full"):
        run.main([*SMALL, "--skip-quality"])
    assert "perplexity" not in capsys.readouterr().out
