"""Which device the kernels are traced for: the present one, or one that is only compiled for."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class DeviceKind(NamedTuple):
    """What the choice of an implementation depends on.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        compute_capability: of an NVIDIA GPU, such as `9.0`; None for others.
        interpreted: whether GPU kernels run in the interpreter, on a CPU.
    """

    platform: str
    compute_capability: str | None = None
    interpreted: bool = False

    def __str__(self) -> str:
        """The device in a few words."""
        if self.compute_capability is None:
            return f"{self.platform} device"
        return f"{self.platform} device, compute capability {self.compute_capability}"


HOPPER = DeviceKind("gpu", "9.0")
"""H100, H200, GH200, H20."""

_traced_for: contextvars.ContextVar[DeviceKind | None] = contextvars.ContextVar(
    "traced_for", default=None
)


def device_kind(device: Any = None) -> DeviceKind:
    """Kind of a `jax.Device`; None is the one that kernels called now are traced for."""
    if device is None:
        named = _traced_for.get()
        if named is not None:
            return named
        device = _default_device()
    capability = getattr(device, "compute_capability", None)
    return DeviceKind(device.platform, str(capability) if capability else None)


def _default_device() -> Any:
    named = jax.config.jax_default_device  # None, a device, or a platform
    return jax.devices(named)[0] if named is None or isinstance(named, str) else named


@contextlib.contextmanager
def traced_for(kind: DeviceKind) -> Iterator[None]:
    """Choose and trace as if this were the device: for the compiler and the interpreter.

    Jit functions that are made inside only: those traced before keep what they were traced for.
    """
    token = _traced_for.set(kind)
    try:
        yield
    finally:
        _traced_for.reset(token)
