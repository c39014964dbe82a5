import argparse
from dataclasses import replace

import pytest

from experiments.gqa import run
from experiments.shared.azure import TraceRow
from paxkv.models.heads import Mha, Native
from paxkv.models.source import TinyRandom

CONFIG = TinyRandom().describe_config()  # 4 heads, 2 KV heads of 16 numbers, 2 layers


@pytest.fixture
def says(monkeypatch):
    """Let the models say these tokens, by their number of KV heads."""
    monkeypatch.setattr(run, "read_trace", lambda: [TraceRow(0.0, 60, 20)] * 30)

    def replace_measure(outputs):
        def measure(heads, options):
            config = heads.config(CONFIG)
            return run.Quality(config, 2.0, (outputs[config.num_kv_heads],))

        monkeypatch.setattr(run, "measure", measure)

    return replace_measure


def test_the_table_has_bytes_and_requests_of_each(says, capsys):
    says({2: (1, 2), 4: (1, 2), 1: (1, 3)})
    run.main(["--gib=0.0005"])
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| native", "| mha", "| pooled"]
    assert [int(row[2]) for row in rows] == [256, 512, 128]
    native, mha, pooled = (float(row[4]) for row in rows)
    assert pooled > native > mha
    assert [row[6] for row in rows] == ["2 of 2 |", "2 of 2 |", "1 of 2 |"]
    assert "a cache 2 × as large" in out


def test_another_output_of_mha_fails(says):
    says({2: (1, 2), 4: (1, 3), 1: (1, 2)})
    with pytest.raises(SystemExit, match="mha"):
        run.main(["--gib=0.0005"])


def test_repeated_heads_say_the_same(tiny_instead):
    tiny_instead(run)
    options = argparse.Namespace(model_path=None, prompts=1, output_tokens=3, text_tokens=24)
    native, mha = (run.measure(heads, options) for heads in (Native(), Mha()))
    assert mha.outputs == native.outputs
    assert mha.perplexity == pytest.approx(native.perplexity, rel=1e-4)
    assert mha.config == replace(native.config, num_kv_heads=4)
