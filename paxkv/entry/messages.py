"""Hydra's and OmegaConf's errors as one paragraph, with the nearest name where one was mistyped."""

import difflib
import re
from collections.abc import Iterable, Sequence

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from paxkv.entry.conf import known_keys

_CUTOFF = 0.6  # of difflib's ratio: below it names are not alike


def explain(error: BaseException, arguments: Sequence[str]) -> str:
    """Return what went wrong in a paragraph fit for a terminal.

    Args:
        error: What was raised while the configuration was composed or the task ran.
        arguments: The command line, to name the override at fault.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_option(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not an override: {_lines(str(error))[0]}. Write key=value."
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _composition(error, arguments)
    return str(error)


def _unknown_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = sorted(error.options or ())
    return (
        f"{group}={option}: group {group} has no such option. Choose one of "
        f"{', '.join(options)}.{_hint(option, options, prefix=f'{group}=')}"
    )


def _composition(error: HydraException | OmegaConfBaseException, arguments: Sequence[str]) -> str:
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    found = re.search(r"Could not override '([^'@]+)", text)
    if found and any(_name(argument) == found.group(1) for argument in arguments):
        return _unknown_key(found.group(1), arguments)
    if found := re.search(r"Ambiguous value for argument '(.+)'", text):
        given = found.group(1)
        return f"{given}: a comma list is a sweep, which needs -m; one value with commas, quotes."
    if found := re.search(r"Error merging override (.+)", text):
        given = found.group(1).strip()
        unknown = re.search(r"Key '[^']+' (?:is )?not in", text)
        if unknown:
            return _unknown_key(_name(given), arguments)
        rule = next((t for t in _lines(text) if "Error merging" not in t), "not allowed")
        return f"{given}: {rule}."
    return ". ".join(_lines(str(error))) + "."


def _unknown_key(key: str, arguments: Sequence[str]) -> str:
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    given = next((a for a in overrides if _name(a) == key), key)
    keys = known_keys([a for a in overrides if a != given])
    parent = key.rpartition(".")[0]
    siblings = [k.removeprefix(f"{parent}.") for k in keys if k.rpartition(".")[0] == parent]
    near = _nearest(key, keys)
    hint = ""
    if near:
        value = given.partition("=")[2]
        hint = f" Did you mean {near}={value}?" if value else f" Did you mean {near}?"
    elif siblings:
        hint = f" {parent or 'The configuration'} has: {', '.join(siblings)}."
    return f"{given}: there is no {key} to set.{hint}"


def _nearest(key: str, keys: Sequence[str]) -> str | None:
    """Return the key that is most alike, first by its last part: sections are easily mixed up."""
    *_, leaf = key.split(".")

    def likeness(candidate: str) -> tuple[float, float]:
        by_leaf = difflib.SequenceMatcher(None, leaf, candidate.rpartition(".")[2]).ratio()
        return by_leaf, difflib.SequenceMatcher(None, key, candidate).ratio()

    best = max(keys, key=likeness, default=None)
    return best if best is not None and likeness(best)[0] >= _CUTOFF else None


def _name(override: str) -> str:
    """Return the key of an override: `++a.b@c=1` sets `a.b`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _lines(text: str) -> list[str]:
    return [line.strip().rstrip(".") for line in text.splitlines() if line.strip()]


def _hint(name: str, names: Iterable[str], *, prefix: str = "", suffix: str = "") -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=_CUTOFF)
    return f" Did you mean {prefix}{near[0]}{suffix}?" if near else ""
