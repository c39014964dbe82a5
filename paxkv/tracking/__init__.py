"""Where the records of a run go: files always, the console, and W&B on demand.

    base.py          what a tracker is, and `Trackers`, which hands each record to several
    files.py         the files in the run's folder: the record of the run
    console.py       header, progress, result table (results.py: its rows)
    memory.py        keeps every record, for the summary
    wandb.py         Weights & Biases, offline unless told otherwise
    environment.py   what the run ran on
    atomic.py, tables.py, eventlog.py, jsonable.py   how the files are written

Nothing here knows the engine: trackers see records (`paxkv.metrics.records`) and a summary.
"""

from paxkv.tracking.base import RunInfo, Status, Tracker, Trackers

__all__ = ["RunInfo", "Status", "Tracker", "Trackers"]
