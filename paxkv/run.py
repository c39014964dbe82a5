"""Serve a workload with a model: `python -m paxkv.run [group=option] [key=value]`."""

import sys

from omegaconf import DictConfig

from paxkv.config import register_schema
from paxkv.entry.app import run_app


def serve(config: DictConfig) -> float | None:
    """Run one configuration; returns output tokens a second, the objective of a sweeper."""
    from paxkv.entry.serve import serve  # JAX and the rest: `--help` does without

    return serve(config)


def main() -> int:
    """Run the command line; returns the exit status."""
    register_schema()
    return run_app(serve)


if __name__ == "__main__":
    sys.exit(main())
