"""The Azure LLM inference trace of 2023, conversations: lengths and arrivals."""

import csv
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

EXCERPT = Path(__file__).parents[1] / "kv_waste" / "azure_conv_excerpt.csv"


class TraceRow(NamedTuple):
    """A request of the trace.

    Attributes:
        arrival_s: Seconds after the first request.
        prompt_tokens: The trace's ContextTokens.
        output_tokens: Its GeneratedTokens.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path = EXCERPT) -> list[TraceRow]:
    """Read the excerpt, or a file as Microsoft publishes it.

    Args:
        path: CSV with ContextTokens, GeneratedTokens, and ARRIVAL_S or TIMESTAMP.

    Raises:
        SystemExit: The file is missing, empty, or has other columns.
    """
    if not path.is_file():
        raise SystemExit(f"--trace={path}: there is no such file. Leave it out for the excerpt.")
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            rows = [(_seconds(row), row) for row in csv.DictReader(file)]
            start = rows[0][0]
            return [
                TraceRow(time - start, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for time, row in rows
            ]
        except (KeyError, IndexError) as error:
            raise SystemExit(
                f"--trace={path}: no {error}; the columns are ContextTokens, GeneratedTokens, and "
                "ARRIVAL_S or TIMESTAMP. Leave it out for the excerpt."
            ) from None


def prompt(row: TraceRow) -> tuple[int, ...]:
    """Return a prompt of the right length; the trace has no text, so no two share a prefix cache.

    Prompts are alike here: run with the prefix cache off.
    """
    return (5,) * row.prompt_tokens


def _seconds(row: dict[str, str]) -> float:
    if "ARRIVAL_S" in row:
        return float(row["ARRIVAL_S"])
    # Seven fractional digits, of which fromisoformat reads six.
    return datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
