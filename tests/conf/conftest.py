import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import cast

import jax
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from paxkv.config import RunConfig, register_schema, typed
from paxkv.entry.conf import conf_dir
from paxkv.entry.machine import Machine

Compose = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def composed() -> Compose:
    """Compose overrides on top of the defaults, with the small model unless another is named.

    Composing takes a third of a second, so a choice of options is composed once, and single values
    are set in a copy of it.
    """
    register_schema()

    @cache
    def options(*overrides: str) -> RunConfig:
        # Opened here and not around the fixture: Hydra has one of these at a time.
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            return typed(compose("config", overrides=list(overrides)))

    def run(*overrides: str) -> RunConfig:
        values = [o for o in overrides if "." in o.partition("=")[0] or o.startswith("seed=")]
        chosen = [o for o in overrides if o not in values]
        named = {override.partition("=")[0] for override in chosen}
        model = [] if named & {"model", "experiment"} else ["model=tiny"]
        config = copy.deepcopy(options(*model, *chosen))
        for override in OverridesParser.create().parse_overrides(values):
            OmegaConf.update(
                config,  # type: ignore[arg-type]
                override.key_or_group,
                override.value(),
                force_add=override.is_add(),
            )
        return config

    return run


@pytest.fixture
def cpu() -> Machine:
    """A CPU with 8 GiB of free memory."""
    device = SimpleNamespace(platform="cpu", device_kind="cpu")
    return Machine(device=cast(jax.Device, device), memory_bytes=8 << 30)
