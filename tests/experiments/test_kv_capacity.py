import pytest

from experiments.kv_capacity import run
from paxkv.cache.quantize import KVFormat


def test_the_script_checks_every_format(capsys):
    run.main(["--check-blocks=1"])
    out = capsys.readouterr().out
    assert f"for {3 * len(run.FORMATS)} of {3 * len(run.FORMATS)} pools" in out
    smollm2 = [line.split("|")[2] for line in out.splitlines() if "token_head" in line]
    assert ["below 1.9" in cell for cell in smollm2] == [True, True, False]


def test_a_difference_fails(monkeypatch):
    monkeypatch.setattr(run, "allocated_bytes", lambda blocks, layout: 1)
    with pytest.raises(SystemExit, match="SmolLM2-135M bf16"):
        run.main(["--check-blocks=1"])


@pytest.mark.parametrize("shape", run.SHAPES, ids=lambda shape: shape.name)
def test_eight_bits_hold_twice_the_tokens_less_the_scales(shape):
    plain, scaled, static = (
        run.tokens_in(2**30, shape, kv)
        for kv in (KVFormat("bf16"), KVFormat("int8"), KVFormat("int8", granularity="head"))
    )
    assert static / plain == pytest.approx(2.0, abs=0.01)
    # A float32 scale beside the head_dim bytes of a token's head.
    assert scaled / plain == pytest.approx(2 * shape.head_dim / (shape.head_dim + 4), abs=0.01)
