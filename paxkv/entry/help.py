"""What `--help` prints: groups with their options, settings with their meaning.

Read from `conf/` as text, comments included. Hydra's own help composes the configuration and walks
every group several times, which takes seconds, and drops the comments.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from paxkv.entry.conf import conf_dir

_FOOTER = """\
More: --cfg job shows the composed configuration and runs nothing; -m sweeps over comma lists;
--hydra-help lists Hydra's flags. The keys of an option are explained in conf/GROUP/OPTION.yaml.
A policy of your own: a dataclass, and a YAML in a folder of yours: --config-dir DIR (README.md)."""


def wants_help(arguments: Sequence[str]) -> bool:
    """Return whether the command line asks for help, and not for Hydra's."""
    return any(argument in ("--help", "-h") for argument in arguments)


def help_text(header: str, arguments: Sequence[str]) -> str:
    """Return the help of an entry point.

    Args:
        header: What it does and how it is called.
        arguments: The command line; a `--config-dir` in it adds the options it holds.
    """
    folders = [conf_dir(), *_config_dirs(arguments)]
    text = (folders[0] / "config.yaml").read_text()
    defaults = _defaults(text)
    options: dict[str, list[str]] = {group: [] for group in defaults}
    for folder in folders:
        for path in sorted(folder.glob("*/*.yaml")):
            options.setdefault(path.parent.name, []).append(path.stem)
    width = max(map(len, options))
    rows = [
        f"  {group:{width}}  {', '.join(_marked(names, defaults.get(group)))}"
        for group, names in options.items()
        if group not in ("hydra", "local") and names
    ]
    settings = text[text.index("\nengine:") :].strip()
    return "\n".join(
        [
            header.strip(),
            "\nGroups: choose with group=option; * is the default",
            *rows,
            "\nSettings: change with key.subkey=value",
            *(f"  {line}" for line in settings.splitlines()),
            "",
            _FOOTER,
        ]
    )


def _defaults(text: str) -> dict[str, str | None]:
    """Return the option that each group has by default, in the order of the defaults list."""
    chosen: dict[str, str | None] = {}
    for entry in yaml.safe_load(text)["defaults"]:
        if isinstance(entry, dict):
            chosen.update({group: option for group, option in entry.items() if " " not in group})
    return chosen


def _marked(options: Sequence[str], default: str | None) -> list[str]:
    return [f"{option}*" if option == default else option for option in options]


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Return the folders that `--config-dir DIR`, `--config-dir=DIR` or `-cd DIR` name."""
    found = []
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            found += [value] if equals else list(arguments[index + 1 : index + 2])
    return [Path(value) for value in found]
