"""Runs a task under Hydra, and turns what goes wrong into one readable paragraph and an exit status."""

import logging
import os
import sys
from collections.abc import Callable

from hydra import main as hydra_main
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from paxkv.entry.conf import conf_dir
from paxkv.entry.messages import explain
from paxkv.errors import PaxkvError

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended

_FULL_ERROR = "HYDRA_FULL_ERROR"


def run_app(task: Callable[[DictConfig], float | None]) -> int:
    """Compose the command line's configuration and run the task, once or as a sweep.

    Args:
        task: Called with the composed configuration; returns the objective for a sweeper.

    Returns:
        The exit status: 0; 1 after an expected failure, explained on stderr; 130 after Ctrl-C.
    """
    wants_traceback = os.environ.get(_FULL_ERROR) == "1"
    # Hydra would print errors itself and exit; asked for full errors it hands them to us.
    os.environ[_FULL_ERROR] = "1"
    jobs = _Jobs(task)
    try:
        hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(jobs.run)()
    except KeyboardInterrupt:
        print("paxkv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (HydraException, OmegaConfBaseException, PaxkvError, NotImplementedError) as error:
        if wants_traceback:
            raise
        if error not in jobs.failures:
            _print(explain(error, sys.argv[1:]))
        elif jobs.count > 1:
            _print(f"{len(jobs.failures)} of {jobs.count} jobs failed; see above.")
        return 1
    return 0


class _Jobs:
    """The task, wrapped so that each job of a sweep reports its own failure when it happens."""

    def __init__(self, task: Callable[[DictConfig], float | None]):
        self._task = task
        self.count = 0
        self.failures: list[BaseException] = []

    def run(self, config: DictConfig) -> float | None:
        self.count += 1
        try:
            return self._task(config)
        except (HydraException, OmegaConfBaseException, PaxkvError, NotImplementedError) as error:
            self.failures.append(error)
            logging.getLogger("paxkv").info("the run failed", exc_info=True)  # to the log file
            _print(explain(error, sys.argv[1:]))
            raise


def _print(message: str) -> None:
    print(f"paxkv: {message}", file=sys.stderr, flush=True)
