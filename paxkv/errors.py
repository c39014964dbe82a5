"""The errors paxkv raises: each says what was given, the rule, and the override that fixes it."""

from collections.abc import Sequence


class PaxkvError(Exception):
    """An expected failure: the entry points print its message and exit with status 1."""


class ConfigError(PaxkvError):
    """A configuration that cannot work; carries every problem found, not only the first."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class OutOfBlocks(PaxkvError):
    """The block pool cannot serve a request that the caller was told would fit."""


class InvariantError(PaxkvError):
    """A state that must never be: a broken pool, or a policy that decided something impossible."""
