"""Runs a task under Hydra; what goes wrong becomes a readable paragraph and an exit status."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from paxkv.entry.conf import conf_dir
from paxkv.entry.help import help_text, wants_help
from paxkv.errors import PaxkvError

logger = logging.getLogger("paxkv")

INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended
TERMINATED = 143  # and for one that was asked to end, as by `timeout` or a batch system

_FULL_ERROR = "HYDRA_FULL_ERROR"


def run_app(task: Callable[..., float | None], header: str, arguments: Sequence[str]) -> int:
    """Compose the command line's configuration and run the task, once or as a sweep.

    Args:
        task: Called with the composed `DictConfig`; returns the objective for a sweeper.
        header: The head of `--help`.
        arguments: The command line, `sys.argv[1:]`.

    Returns:
        The exit status: 0; 1 after an expected failure, explained on stderr; 130 after Ctrl-C,
        143 after SIGTERM.
    """
    if wants_help(arguments):
        print(help_text(header, arguments))
        return 0
    from hydra import main as hydra_main  # here: `--help` does without
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from paxkv.config import register_schema
    from paxkv.entry.messages import explain

    expected = (PaxkvError, NotImplementedError, HydraException, OmegaConfBaseException)
    asked = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"  # hands errors to us, where Hydra would print them and exit
    register_schema()
    num_jobs, failures = 0, []

    def job(config: object) -> float | None:
        # In a sweep the other jobs still run, so each failure is told when it happens.
        nonlocal num_jobs
        num_jobs += 1
        try:
            return task(config)
        except expected as error:
            failures.append(error)
            logger.info("the run failed", exc_info=True)  # the log file has the traceback
            _tell(explain(error, arguments))
            if asked == "1" or HydraConfig.get().mode is not RunMode.RUN:
                raise
            return None  # raised in a single run, Hydra would add a line of its own

    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(job)()
    except _Terminated:
        _tell("terminated")
        return TERMINATED
    except KeyboardInterrupt:
        _tell("interrupted")
        return INTERRUPTED
    except expected as error:
        if asked == "1":
            raise
        if not failures:
            _tell(explain(error, arguments))
        elif num_jobs > 1:
            _tell(f"{len(failures)} of {num_jobs} jobs failed, see above; the others are complete.")
        return 1
    else:
        return 1 if failures else 0
    finally:
        signal.signal(signal.SIGTERM, before)
        if asked is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = asked


class _Terminated(KeyboardInterrupt):
    """SIGTERM: handled as Ctrl-C is, so that the records are complete."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _tell(message: str) -> None:
    sys.stdout.flush()
    print(f"paxkv: {message}", file=sys.stderr, flush=True)
