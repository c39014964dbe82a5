"""What a run runs on: enough to read a number years later, or to run it again."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("paxkv", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "gguf")


def environment(**more: Any) -> dict[str, Any]:
    """Return the interpreter, machine, package versions, commit and command line.

    Args:
        **more: What the caller knows besides, such as the JAX devices; not asked for here, since
            asking would start a device.
    """
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "cpu_count_usable": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if (changes := _git("status", "--porcelain")) is None else bool(changes),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **more,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _git(*arguments: str) -> str | None:
    """Return what git says about the checkout this package lies in; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
