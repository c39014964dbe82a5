"""Each YAML of a policy group and the dataclass that it names say the same."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_class

from paxkv.entry.conf import conf_dir

GROUPS = ("admit", "allocator", "evict", "preempt", "schedule", "tenants", "victim", "window")
FILES = sorted(path for group in GROUPS for path in (conf_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_an_option_has_the_fields_and_defaults_of_its_policy(path: Path):
    option = yaml.safe_load(path.read_text())
    policy = get_class(option.pop("_target_"))
    expected = {
        field.name: "???" if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(policy)
    }
    assert option == expected
    assert path.read_text().startswith("# python -m paxkv.run ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_a_policy_says_where_it_comes_from_and_what_it_costs(path: Path):
    text = get_class(yaml.safe_load(path.read_text())["_target_"]).__doc__ or ""
    for line in ("Source: ", "Assumes: ", "Cost: "):
        assert f"    {line}" in text
