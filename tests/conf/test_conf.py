"""Every option of every group: documented, composes, can be made."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from paxkv.config import CacheConfig, EngineConfig, Parts, RunConfig, make_parts
from paxkv.entry.conf import conf_dir, known_keys
from paxkv.entry.plan import plan_run

FILES = sorted(path.relative_to(conf_dir()) for path in conf_dir().glob("**/*.yaml"))
FILES = [path for path in FILES if path.parts[0] != "local"]  # the user's own
OPTIONS = [path for path in FILES if len(path.parts) == 2 and path.parts[0] != "hydra"]
GROUPED = [path for path in OPTIONS if path.parts[0] not in ("experiment", "debug")]
EXPERIMENTS = [path for path in OPTIONS if path.parts[0] in ("experiment", "debug")]

PARTS = {field.name for field in dataclasses.fields(Parts)}
DESIGN_GROUPS = (
    "model kernel kv prefix admit schedule preempt victim evict workload slo device executor track"
)


def as_override(path: Path) -> str:
    return f"{path.parts[0]}={path.stem}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_opens_with_its_command_and_explains_every_line(path: Path) -> None:
    lines = (conf_dir() / path).read_text().splitlines()
    head = lines[1] if lines[0].startswith("# @package") else lines[0]
    assert head.startswith("# python -m paxkv.")
    for number, line in enumerate(lines, 1):
        opens_mapping = re.fullmatch(r"\s*[\w/]+:", line)
        if line.strip() and not line.lstrip().startswith("#") and not opens_mapping:
            assert re.search(r"\S  # \S", line), f"{path}:{number} says no meaning or unit: {line}"


@pytest.mark.parametrize("path", GROUPED, ids=str)
def test_an_option_composes_and_its_parts_are_made(path, composed) -> None:
    # The n-th option of every group at once: a few configurations hold all options.
    groups: dict[str, list[Path]] = {}
    for option in GROUPED:
        groups.setdefault(option.parts[0], []).append(option)
    place = groups[path.parts[0]].index(path)
    chosen = [options[place % len(options)] for options in groups.values()]
    assert path in chosen
    files = {"prompts": "workload.path=prompts.jsonl", "file": "tenants.path=tenants.yaml"}
    needed = [files[option.stem] for option in chosen if option.stem in files]
    parts = make_parts(composed(*map(as_override, chosen), *needed))
    if path.parts[0] in PARTS:
        assert getattr(parts, path.parts[0]) is not None


@pytest.mark.parametrize("path", EXPERIMENTS, ids=str)
def test_an_experiment_passes_every_check(path, composed, cpu) -> None:
    model = [] if path.parts[0] == "experiment" else ["model=tiny"]
    plan_run(composed(as_override(path), *model), cpu)


def test_the_groups_are_those_of_the_design() -> None:
    assert set(DESIGN_GROUPS.split()) <= {path.parts[0] for path in OPTIONS}


def test_the_defaults_are_those_of_the_design(composed) -> None:
    config = composed("model=smollm2_135m")
    assert config.model.path is None
    assert config.kv.name == "auto"
    assert config.admit.watermark == 0.02
    assert config.engine.max_num_seqs == 64
    assert config.engine.max_num_batched_tokens == 512
    assert config.cache.memory_utilization == 0.9
    assert config.prefix.enabled is True
    assert config.engine.clock == "wall"
    assert config.workload.num_requests == 16


def test_schema_and_file_have_the_same_keys() -> None:
    content = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    assert set(content["engine"]) == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(content["cache"]) == {field.name for field in dataclasses.fields(CacheConfig)}
    groups = {
        group
        for entry in content["defaults"]
        if isinstance(entry, dict)
        for group in entry
        if group not in ("hydra", "experiment", "debug") and " " not in group
    }
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    assert fields == groups | {"engine", "cache", "seed"}


def test_known_keys_follow_the_chosen_options() -> None:
    assert "preempt.host_blocks" in known_keys(["preempt=swap"])
    assert "preempt.host_blocks" not in known_keys()
    assert "experiment" in known_keys(["kv=nonsense"])  # what cannot be composed: the defaults


def test_a_tenant_of_the_mix_is_given_a_priority_as_its_file_says(composed) -> None:
    parts = make_parts(composed("workload=two_tenants", "+workload.priorities.chat=-1"))
    assert parts.workload.priorities == {"chat": -1}
