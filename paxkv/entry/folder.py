"""The folder of a run holds one run."""

import sys
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


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
    if (folder / "status.json").exists():
        print(
            f"paxkv: {folder} already holds a run, which would be overwritten. Choose another "
            f"folder with {key}=DIR, or remove this one.",
            file=sys.stderr,
        )
        raise SystemExit(1)
