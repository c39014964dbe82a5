"""The file that names tenants and their terms, every entry checked."""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from paxkv.policies.checks import is_number

_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


class Amount(NamedTuple):
    """A part of the pool as the file gives it.

    Attributes:
        blocks: How many, unless it is a share.
        share: Exact share of the pool, 0 to 1; None where it is a number of blocks.
    """

    blocks: int = 0
    share: Fraction | None = None

    def __str__(self) -> str:
        return str(self.blocks) if self.share is None else f"{float(self.share * 100):g}%"


_NOTHING = Amount()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The terms of one tenant as the file gives them; see `TenantTerms`."""

    reservation: Amount = _NOTHING
    limit: Amount | None = None
    weight: float = 1.0
    priority: int | None = None
    salt: bool = False


class _Key(NamedTuple):
    """How a key of an entry is read.

    Attributes:
        parse: Returns the value; raises ValueError where it breaks the rule.
        rule: What a value must be.
        example: A value that is fine.
    """

    parse: Callable[[Any], Any]
    rule: str
    example: str


def read_entries(path: str) -> tuple[list[str], dict[str, Entry]]:
    """Read a file of tenants.

    Returns:
        What is wrong with it, and the entries that are right, in the order of the file.
    """
    try:
        content = yaml.load(Path(path).read_bytes(), Loader=_UniqueKeys)  # a SafeLoader
    except OSError as error:
        return [
            f"{error.strerror or error}. Try tenants.path=FILE.yaml with a file that exists."
        ], {}
    except (yaml.YAMLError, ValueError) as error:
        return [f"not YAML: {_one_line(error)}. Try a line such as 'chat: {{limit: 60%}}'."], {}
    if not isinstance(content, dict) or not content:
        return [
            "must map tenants to their terms, and there are none in it. Try tenants=none, or a "
            "line such as 'chat: {limit: 60%}'."
        ], {}
    problems: list[str] = []
    entries: dict[str, Entry] = {}
    for name, given in content.items():
        found, entry = _read_entry(name, given)
        problems += [f"tenant {name!r}: {problem}" for problem in found]
        if entry is not None:
            entries[name] = entry
    return problems, entries


def _read_entry(name: Any, given: Any) -> tuple[list[str], Entry | None]:
    if not isinstance(name, str) or not name:
        return [f"a name is text. Try '{name}' in quotes."], None
    given = {} if given is None else given
    if not isinstance(given, dict):
        return [f"must map {', '.join(_KEYS)} to values. Try {name}: {{limit: 60%}}."], None
    problems, values = [], {}
    for key, value in given.items():
        if key not in _KEYS:
            problems.append(_unknown(key))
            continue
        try:
            values[key] = _KEYS[key].parse(value)
        except ValueError:
            rule, example = _KEYS[key].rule, _KEYS[key].example
            problems.append(f"{key}={value}: must be {rule}. Try {key}: {example}.")
    return problems, None if problems else Entry(**values)


def _unknown(key: Any) -> str:
    near = difflib.get_close_matches(str(key), _KEYS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{key}: there is no such term. Choose from {', '.join(_KEYS)}.{hint}"


def _amount(value: Any) -> Amount:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Amount(blocks=value)
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None or (share := Fraction(match[1]) / 100) > 1:
        raise ValueError
    return Amount(share=share)


def _limit(value: Any) -> Amount | None:
    limit = None if value is None else _amount(value)
    if limit is not None and not (limit.blocks or limit.share):
        raise ValueError
    return limit


def _weight(value: Any) -> float:
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError
    return float(value)


def _priority(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError
    return value


def _salt(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


_KEYS: dict[str, _Key] = {
    "reservation": _Key(
        _amount, "a whole number of blocks, 0 or more, or a share of the pool up to 100%", "30%"
    ),
    "limit": _Key(
        _limit, "a whole number of blocks, 1 or more, a share above 0%, or null for none", "60%"
    ),
    "weight": _Key(_weight, "a finite number above 0", "1.0"),
    "priority": _Key(_priority, "a whole number, or null for each request's own", "0"),
    "salt": _Key(_salt, "true or false", "true"),
}


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key that is given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _one_line(error: Exception) -> str:
    """Return a parser's message with the line it is about."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0]
