"""Tables for READMEs."""

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def percent(share: float | None) -> str:
    """Return a share for people; a dash where there is none."""
    return "–" if share is None else f"{100 * share:.1f} %"
