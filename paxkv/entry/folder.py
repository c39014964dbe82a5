"""The folder of a run holds one run."""

import sys
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from paxkv.errors import ConfigError
from paxkv.tracking.files import refuse_used_folder


class RefuseUsedFolder(Callback):
    """Stops before anything is written into a folder that already holds a run.

    Hydra turns an exception of a callback into a warning, so this exits.
    """

    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Look at the folder of a single run."""
        _refuse(Path(config.hydra.run.dir), "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Look at the folders of a sweep's jobs."""
        sweep = Path(config.hydra.sweep.dir)
        for status in sorted(sweep.glob("*/status.json")):
            _refuse(status.parent, "hydra.sweep.dir")


def _refuse(folder: Path, key: str) -> None:
    try:
        refuse_used_folder(folder)
    except ConfigError as error:
        print(f"paxkv: {str(error).replace('hydra.run.dir', key)}", file=sys.stderr)
        raise SystemExit(1) from error
