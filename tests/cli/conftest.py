import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from absl import logging as absl_logging
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from jax.experimental.compilation_cache import compilation_cache

from paxkv.run import main

# Few and short requests on few rows: three shapes to compile, a second or two.
SMALL = (
    "model=tiny",
    "workload=random",
    "workload.num_requests=3",
    "workload.arrivals.rate_per_s=1000",
    "workload.prompt_len.high=16",
    "workload.output_len.median=4",
    "workload.output_len.high=6",
    "engine.max_num_seqs=2",
    "engine.max_model_len=64",
    "engine.clock=virtual",
    "device=cpu",
)


class Outcome(NamedTuple):
    status: int
    out: str
    err: str
    folder: Path


@pytest.fixture
def small() -> tuple[str, ...]:
    return SMALL


@pytest.fixture
def paxkv_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Run the entry point in this process, in an empty folder; JAX is imported only once so."""
    monkeypatch.chdir(tmp_path)
    # Hydra closes every handler there is; absl's, which flax brings, would close pytest's capture.
    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__
    level, handlers = logging.root.level, logging.root.handlers[:]

    def run(*arguments: str) -> Outcome:
        if "-m" in arguments:
            folder, chosen = tmp_path / "sweep", "hydra.sweep.dir=sweep"
        else:
            folder, chosen = tmp_path / "run", "hydra.run.dir=run"
        given = [a for a in arguments if a.startswith("hydra.run.dir=")]
        if given:
            folder, chosen = Path(given[0].partition("=")[2]), given[0]
        rest = [a for a in arguments if a not in given]
        monkeypatch.setattr(sys, "argv", ["paxkv.run", *rest, chosen])
        try:
            status = main()
        except SystemExit as end:
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err, tmp_path / folder)

    yield run
    # Hydra sets up logging for a process, JAX its cache of compiled code.
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
