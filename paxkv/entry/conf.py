"""Where the configuration lies, and every name in it."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paxkv.errors import PaxkvError


def conf_dir() -> Path:
    """Return the folder of the configuration: inside the package (wheel) or beside it (checkout).

    Raises:
        PaxkvError: Neither exists: a broken installation.
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise PaxkvError(
        f"no conf/config.yaml inside {package} or beside it: the installation is broken. "
        "Install the package again."
    )


def groups() -> list[str]:
    """Return the names of the configuration groups."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def known_keys(overrides: Sequence[str] = ()) -> list[str]:
    """Return every dotted key of the configuration, inner nodes and groups included.

    Args:
        overrides: Chosen options, which bring their own keys; those of the defaults are returned
            where these cannot be composed.
    """
    from hydra import compose, initialize_config_dir  # here: `--help` needs the folder only
    from hydra.errors import HydraException

    for attempt in (list(overrides), []):
        try:
            with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
                config = compose("config", overrides=attempt)
        except (HydraException, OmegaConfBaseException):
            continue
        return sorted({*_flatten(config), *groups()})
    return groups()


def _flatten(config: DictConfig, prefix: str = "") -> list[str]:
    names = []
    for key in config:
        names.append(f"{prefix}{key}")
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, str(key)):
            continue
        if isinstance(config[key], DictConfig):
            names += _flatten(config[key], f"{prefix}{key}.")
    return names
