"""The schema of a run's configuration; the options live in `conf/`, one YAML an option.

Sections are typed here, without defaults: those stand in `conf/config.yaml`, with their units. Policy
groups are open (`Any`): their `_target_` names a frozen dataclass that checks its own fields, so a
policy of a user's needs one Python file and one YAML.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class EngineConfig:
    """Sizes of the engine; see `conf/config.yaml`."""

    max_num_seqs: int = MISSING
    max_num_batched_tokens: int = MISSING
    max_model_len: Any = MISSING
    dtype: str = MISSING
    clock: str = MISSING
    check_invariants: bool = MISSING


@dataclass
class CacheConfig:
    """Size and shape of the block pool; see `conf/config.yaml`."""

    block_size: Any = MISSING
    num_blocks: int | None = MISSING
    memory_bytes: int | None = MISSING
    memory_utilization: float = MISSING


@dataclass
class RunConfig:
    """A run: sections with types, groups with a `_target_` or a name."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    seed: int = MISSING
    model: Any = MISSING
    kernel: Any = MISSING
    kv: Any = MISSING
    prefix: Any = MISSING
    admit: Any = MISSING
    schedule: Any = MISSING
    preempt: Any = MISSING
    victim: Any = MISSING
    evict: Any = MISSING
    workload: Any = MISSING
    slo: Any = MISSING
    device: Any = MISSING
    executor: Any = MISSING
    track: Any = MISSING


def register_schema() -> None:
    """Make the schema known to Hydra as `run_schema`; before the configuration is composed."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
