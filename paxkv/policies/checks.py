"""What policies share to check their own fields."""

from collections.abc import Sequence

from paxkv.errors import ConfigError


def with_fix(problems: Sequence[str], fix: str) -> list[str]:
    """Return problems, each with the override that fixes it."""
    return [f"{problem} Try {fix}." for problem in problems]


def refuse(problems: Sequence[str]) -> None:
    """Refuse the configuration if there are problems.

    Raises:
        ConfigError: With all of them.
    """
    if problems:
        raise ConfigError(problems)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
