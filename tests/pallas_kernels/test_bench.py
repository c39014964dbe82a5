"""The benchmark runs, and its records say what they should."""

import json

import numpy as np
import pytest

from pallas_kernels import available_implementations, bench
from pallas_kernels.paged_attention.specs import SPECS, AttentionSpec

TINY = {"rows": 2, "heads": 4, "kv_heads": 2, "dim": 8, "layers": 2, "tokens": (20, 40)}


@pytest.mark.parametrize("chunk", [None, 4])
def test_records_of_a_tiny_shape(monkeypatch, tmp_path, capsys, chunk):
    monkeypatch.setitem(SPECS, "tiny", AttentionSpec(name="tiny", chunk=chunk, **TINY))
    monkeypatch.setitem(SPECS, "huge", AttentionSpec(name="huge", min_memory_bytes=2**60, **TINY))
    path = tmp_path / "bench.json"
    bench.main(["--spec", "tiny", "huge", "--dtype", "int8", "--seconds", "0", "--json", str(path)])
    records = json.loads(path.read_text())["records"]
    assert [r["implementation"] for r in records] == list(available_implementations())
    tokens = int(SPECS["tiny"].context_lens().sum())
    for r in records:
        assert r["live_bytes"] == 2 * tokens * 2 * 2 * (
            8 + 4
        )  # layers, K and V, heads, dim + scale
        assert r["repeats"] == 3 and 0 < r["fastest_s"] <= r["step_s"]
        assert r["max_abs_difference"] < 1e-5
    assert "huge" in capsys.readouterr().out


def test_windows_bound_what_a_spec_must_read():
    spec = SPECS["smollm2-decode-4x2k-window"]
    assert spec.live_tokens() == 4 * 256
    lens = SPECS["smollm2-decode-mixed"].context_lens()
    assert lens.dtype == np.int32 and lens.min() >= 40 and lens.max() <= 544
