"""The example of experiments/own_policy, run as its README says."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "own_policy"
ARGUMENTS = (
    "--config-dir",
    str(FOLDER / "conf"),
    "victim=most_blocks",
    "window=every_other",
    "window.size=32",
    "experiment=smoke",
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_policies_outside_the_package_are_used(paxkv_run) -> None:
    # Rows enough to overflow the pool, so that the victim policy is asked.
    outcome = paxkv_run(*ARGUMENTS, "cache.num_blocks=28", "engine.max_num_batched_tokens=32")
    assert outcome.status == 0, outcome.err
    assert "victim most_blocks" in outcome.out
    assert "1 see the last 32 tokens, 1 see all tokens; 2 block tables a request" in outcome.out
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["completed"] == 12
    assert summary["preempt"]["num_preemptions"] > 0


def test_a_misspelt_field_is_answered_with_its_name(paxkv_run) -> None:
    outcome = paxkv_run(*ARGUMENTS, "victim.min_lef=8")
    assert outcome.status == 1
    assert "min_lef" in outcome.err
