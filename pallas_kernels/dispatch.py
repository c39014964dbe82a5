"""Which implementation serves an op: chosen once by device, or named and then never replaced."""

import difflib
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pallas_kernels.device import DeviceKind, device_kind
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.limits import AttentionSizes, why_not_mosaic_for, why_not_mosaic_on

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "xla", "mosaic")
"""Names that `implementation=` accepts."""


class Choice(NamedTuple):
    """An implementation and why it was chosen."""

    name: str
    reason: str


class Implementation(NamedTuple):
    """One way to run an op.

    Attributes:
        run: the function; keyword arguments as the public op's, all resolved.
        unsupported: given the same arguments, says why this implementation cannot serve them,
            or None when it can. None in its place: it can serve whatever passes the op's checks.
    """

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] | None = None


def available_implementations(device: DeviceKind | None = None) -> tuple[str, ...]:
    """Names of those that run on a device; None is JAX's default device."""
    device = device_kind() if device is None else device
    mosaic_runs = why_not_mosaic_on(device) is None
    return tuple(name for name in IMPLEMENTATIONS if name != "mosaic" or mosaic_runs)


def choose_implementation(
    device: DeviceKind | None = None, sizes: AttentionSizes | None = None
) -> Choice:
    """Pick the implementation for a device; what `implementation=None` uses.

    Args:
        device: None is JAX's default device.
        sizes: of the model and its pool, where known: what mosaic cannot serve, xla does.

    Returns:
        The name, and the reason in a few words, fit for a header line.
    """
    device = device_kind() if device is None else device
    if why_not_mosaic_on(device) is not None:
        return Choice("xla", str(device))
    reason = None if sizes is None else why_not_mosaic_for(sizes)
    if reason is not None:
        return Choice("xla", f"mosaic cannot serve this: {reason}")
    return Choice("mosaic", "Hopper GPU")


def later(module: str, function: str) -> Callable[..., Any]:
    """A function that is imported when first called: Mosaic takes half a second to import."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)

    return call


def run_op(
    op: str,
    implementations: Mapping[str, Implementation],
    implementation: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an op with the implementation asked for, or the one chosen for the device.

    Raises:
        ValueError: a name that does not exist.
        UnsupportedError: a named implementation that cannot serve these arguments.
    """
    name = implementation
    if name is None:
        choice = choose_implementation()
        reason = _why_not(implementations[choice.name], args, kwargs)
        if reason is not None:
            choice = Choice("xla", f"{choice.name} cannot do this: {reason}")
        _log_once(op, choice)
        name = choice.name
    if name not in implementations:
        near = difflib.get_close_matches(name, implementations, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"implementation={name!r}: {op} has {', '.join(implementations)}; None picks by "
            f"device.{hint}"
        )
    reason = _why_not(implementations[name], args, kwargs)
    if reason is not None:
        others = [
            other
            for other, candidate in implementations.items()
            if _why_not(candidate, args, kwargs) is None
        ]
        raise UnsupportedError(
            f"implementation={name!r}: {op} cannot do this: {reason}. What can: "
            f"{', '.join(others) or 'none'}."
        )
    return implementations[name].run(*args, **kwargs)


def _why_not(
    implementation: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    if implementation.unsupported is None:
        return None
    return implementation.unsupported(*args, **kwargs)


@functools.cache
def _log_once(op: str, choice: Choice) -> None:
    logger.info("%s: kernel %s: %s", op, choice.name, choice.reason)
