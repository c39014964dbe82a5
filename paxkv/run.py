"""Serve a workload with a model: `python -m paxkv.run [group=option] [key=value]`."""

import sys
from typing import Any

from paxkv.entry.app import run_app

HELP = """\
paxkv serves language-model requests through a paged KV cache; every memory policy is one word.

  python -m paxkv.run                            SmolLM2-135M, 16 chat requests, any laptop
  python -m paxkv.run kv=fp8 preempt=swap        one policy changed per word
  python -m paxkv.run -m kv=auto,fp8 seed=0,1    a sweep: one folder, one job each
  python -m paxkv.run workload=prompts workload.path=F.jsonl
  python -m paxkv.run hydra.run.dir=DIR          choose the folder of the run
"""


def run(config: Any) -> float | None:
    """Run one configuration; returns output tokens a second, the objective of a sweeper."""
    from paxkv.entry.serve import serve  # JAX and the rest: `--help` does without

    return serve(config)


def main() -> int:
    """Run the command line; returns the exit status."""
    return run_app(run, HELP, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
