"""Checks that workload parts share: each returns its problems, so that all are reported at once."""

import math
from collections.abc import Iterable


def number_problem(
    key: str, value: object, *, low: float = 0.0, high: float = math.inf, open_low: bool = False
) -> list[str]:
    """Return a problem unless `value` is a finite number in the range (an int or a float)."""
    bound = f"> {low:g}" if open_low else f">= {low:g}"
    rule = f"a finite number {bound}" + (f" and <= {high:g}" if high < math.inf else "")
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if ok and (value > low if open_low else value >= low) and value <= high:  # type: ignore[operator]
        return []
    return [f"{key}={value}: must be {rule}."]


def count_problem(key: str, value: object, *, low: int = 1, high: int | None = None) -> list[str]:
    """Return a problem unless `value` is a whole number in the range."""
    rule = f"a whole number >= {low}" + (f" and <= {high}" if high is not None else "")
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and value >= low
        and (high is None or value <= high)
    ):
        return []
    return [f"{key}={value}: must be {rule}."]


def join(problems: Iterable[list[str]]) -> list[str]:
    """Return the problems of several checks as one list."""
    return [problem for group in problems for problem in group]
