"""Speeds of this engine, measured while it runs: what swapping and recomputing really cost."""

from dataclasses import dataclass


@dataclass(slots=True)
class Rates:
    """Totals over all steps so far; plain data that pickles.

    Attributes:
        prefill_tokens: Tokens computed in prefill chunks.
        prefill_s: The time they took: of a step with decodes too, their share by tokens.
        copy_bytes: Bytes copied to and from host memory.
        copy_s: The time that took.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    copy_bytes: int = 0
    copy_s: float = 0.0

    def add_step(
        self,
        *,
        duration_s: float,
        prefill_tokens: int,
        decode_tokens: int,
        copy_bytes: int,
        copy_s: float,
    ) -> None:
        """Count a step."""
        if prefill_tokens:
            share = prefill_tokens / (prefill_tokens + decode_tokens)
            self.prefill_tokens += prefill_tokens
            self.prefill_s += (duration_s - copy_s) * share
        self.copy_bytes += copy_bytes
        self.copy_s += copy_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens a second; None before the first."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else None

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Bytes a second; None before the first."""
        return self.copy_bytes / self.copy_s if self.copy_s > 0 else None
