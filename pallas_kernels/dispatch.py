"""Which implementation serves an op: chosen once by device, or named and then never replaced."""

import difflib
import functools
import logging
from collections.abc import Iterable
from typing import NamedTuple

import jax

logger = logging.getLogger(__name__)

_NAMES = ("reference", "xla")


class Choice(NamedTuple):
    """An implementation and why it was chosen."""

    name: str
    reason: str


def available_implementations() -> tuple[str, ...]:
    """Names that `implementation=` accepts."""
    return _NAMES


def choose_implementation(platform: str | None = None) -> Choice:
    """Pick the implementation for a device; what `implementation=None` uses.

    Args:
        platform: `cpu`, `gpu`, `tpu`; None asks JAX for its default backend.

    Returns:
        The name, and the reason in a few words fit for a header line.
    """
    platform = platform or jax.default_backend()
    if platform == "cpu":
        return Choice("xla", "cpu device")
    return Choice("xla", f"{platform} device, the only fast implementation for it")


def resolve(implementation: str | None, *, names: Iterable[str] = _NAMES) -> str:
    """Turn an `implementation=` argument into a name, logging an automatic choice once.

    Raises:
        ValueError: a name that does not exist.
    """
    if implementation is None:
        choice = choose_implementation()
        _log_once(choice)
        return choice.name
    names = tuple(names)
    if implementation not in names:
        near = difflib.get_close_matches(implementation, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"implementation={implementation!r}: choose one of {', '.join(names)}, or None to "
            f"pick by device.{hint}"
        )
    return implementation


@functools.cache
def _log_once(choice: Choice) -> None:
    logger.info("kernel %s: %s", choice.name, choice.reason)
