"""The schema of a run's configuration, and the only place where parts are made from it.

The options live in `conf/`, one YAML an option. Sections are typed here, without defaults: those
stand in `conf/config.yaml`, with their units. Groups are open (`Any`): their `_target_` names a
frozen dataclass that checks its own fields, so that a policy of a user's needs one Python file and
one YAML, and nothing registers it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from paxkv.errors import ConfigError, PaxkvError

if TYPE_CHECKING:
    from paxkv.cache.quantize import KVFormat
    from paxkv.metrics.slo import Slo
    from paxkv.models.heads import Heads
    from paxkv.models.source import Checkpoint, TinyRandom
    from paxkv.policies.admission import AdmissionPolicy
    from paxkv.policies.allocator import AllocatorPolicy
    from paxkv.policies.eviction import EvictionPolicy
    from paxkv.policies.preemption import PreemptionPolicy
    from paxkv.policies.schedule import SchedulePolicy
    from paxkv.policies.tenancy import TenancyPolicy
    from paxkv.policies.victim import VictimPolicy
    from paxkv.policies.window import WindowPolicy
    from paxkv.tracking import Tracker
    from paxkv.workload.base import Workload


@dataclass
class EngineConfig:
    """Sizes of the engine; see `conf/config.yaml`."""

    max_num_seqs: int = MISSING
    max_num_batched_tokens: int = MISSING
    max_model_len: Any = MISSING
    max_preemptions: int = MISSING
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
    heads: Any = MISSING
    window: Any = MISSING
    allocator: Any = MISSING
    prefix: Any = MISSING
    admit: Any = MISSING
    schedule: Any = MISSING
    preempt: Any = MISSING
    victim: Any = MISSING
    evict: Any = MISSING
    tenants: Any = MISSING
    workload: Any = MISSING
    slo: Any = MISSING
    device: Any = MISSING
    executor: Any = MISSING
    track: Any = MISSING


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the groups of a configuration name, made."""

    model: "Checkpoint | TinyRandom"
    kv: "KVFormat"
    heads: "Heads"
    window: "WindowPolicy"
    allocator: "AllocatorPolicy"
    admit: "AdmissionPolicy"
    schedule: "SchedulePolicy"
    preempt: "PreemptionPolicy"
    victim: "VictimPolicy"
    evict: "EvictionPolicy"
    tenants: "TenancyPolicy"
    workload: "Workload"
    slo: "Slo"
    executor: Any
    track: "Tracker"


def register_schema() -> None:
    """Make the schema known to Hydra as `run_schema`; before the configuration is composed."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def typed(config: DictConfig) -> RunConfig:
    """Return a composed configuration with the schema's types, a replayed one included.

    Raises:
        ConfigError: A key that the schema lacks, or a value of another type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {_first_line(error)}") from error
    return cast(RunConfig, merged)


def make_parts(config: RunConfig) -> Parts:
    """Make every part that the configuration names.

    Raises:
        ConfigError: All problems of all parts.
    """
    problems: list[str] = []
    made = {}
    for group in Parts.__dataclass_fields__:
        with collecting(problems):
            made[group] = _make(group, getattr(config, group))
    if problems:
        raise ConfigError(problems)
    return Parts(**made)


@contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Add the problems of a ConfigError raised inside to a list, and go on."""
    try:
        yield
    except ConfigError as error:
        problems.extend(error.problems)


def _make(group: str, node: Any) -> Any:
    try:
        return instantiate(node, _convert_="all")
    except MissingMandatoryValue as error:
        key = f"{group}.{str(error.full_key).removeprefix(f'{group}.')}"
        raise ConfigError(f"{key}: there is no default for it. Try {key}=VALUE.") from error
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, PaxkvError):
            cause = cause.__cause__
        if isinstance(cause, ConfigError):
            raise ConfigError(cause.problems) from error
        raise ConfigError(f"{group}: {cause or _first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
