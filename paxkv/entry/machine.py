"""The machine a run is on: which device JAX uses, its memory, and where compiled code is kept."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paxkv.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device of a run.

    Attributes:
        device: A `jax.Device`.
        memory_bytes: Memory that JAX may take on it; on a CPU what is available now.
    """

    device: Any
    memory_bytes: int

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.device.platform

    @property
    def host_memory_bytes(self) -> int:
        """Memory of the host that is available now."""
        return self.memory_bytes if self.platform == "cpu" else _available_bytes()

    @property
    def description(self) -> str:
        """The device in a few words."""
        if self.platform == "cpu":
            return f"cpu, {os.cpu_count()} cores"
        return f"{self.platform}, {self.device.device_kind}"


def open_machine(platform: str | None, memory_utilization: float) -> Machine:
    """Start JAX on a platform; the first call of a process decides, later ones must agree.

    Args:
        platform: `cpu`, `gpu`, or None for a GPU where there is one.
        memory_utilization: Share of a GPU's memory that JAX may take.

    Raises:
        ConfigError: There is no such platform here, or this process already uses another one.
    """
    if platform not in (None, "cpu", "gpu"):
        raise ConfigError(f"device.platform={platform}: must be cpu, gpu or null. Try device=auto.")
    if "jax" not in sys.modules:  # read once, on import
        if platform == "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{memory_utilization:.2f}")
    import jax

    device = jax.devices()[0]
    if platform is not None and device.platform != platform:
        raise ConfigError(
            f"device={platform}: JAX runs on {device.platform} ({device.device_kind}). "
            + (
                "Install the GPU plugin with pip install -e '.[cuda12]' where there is a GPU, or "
                "try device=cpu."
                if platform == "gpu"
                else "One process uses one platform: run each value of device on its own."
            )
        )
    _keep_compiled_code()
    return Machine(device=device, memory_bytes=_memory_bytes(device))


def _keep_compiled_code() -> None:
    """Keep compiled code between runs, under $PAXKV_CACHE or ~/.cache/paxkv."""
    import jax

    home = os.environ.get("PAXKV_CACHE") or os.path.join("~", ".cache", "paxkv")
    folder = Path(home).expanduser() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("%s: %s; compiled code is not kept between runs", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _memory_bytes(device: Any) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return _available_bytes() if stats is None else int(stats["bytes_limit"])


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
