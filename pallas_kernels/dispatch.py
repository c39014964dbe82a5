"""Which implementation serves an op: chosen once by device, or named and then never replaced."""

import difflib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from pallas_kernels.errors import UnsupportedError

logger = logging.getLogger(__name__)

_NAMES = ("reference", "xla")


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


def available_implementations() -> tuple[str, ...]:
    """Names that `implementation=` accepts."""
    return _NAMES


def choose_implementation(platform: str | None = None) -> Choice:
    """Pick the implementation for a device; what `implementation=None` uses.

    Args:
        platform: `cpu`, `gpu` or `tpu`; None asks JAX for its default backend.

    Returns:
        The name, and the reason in a few words, fit for a header line.
    """
    return Choice("xla", f"{platform or jax.default_backend()} device")


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
        _log_once(choice)
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
def _log_once(choice: Choice) -> None:
    logger.info("kernel %s: %s", choice.name, choice.reason)
