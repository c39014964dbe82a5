"""Weights & Biases: offline unless the user is logged in or asks for more, never in the way."""

import logging
import netrc
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from paxkv.errors import ConfigError
from paxkv.metrics.records import Event, RequestRecord, StepRecord
from paxkv.tracking.base import RunInfo, Status
from paxkv.tracking.jsonable import to_jsonable

if TYPE_CHECKING:
    import wandb

MODES = ("online", "offline", "disabled")
_COLUMNS = (
    "request_id",
    "tenant",
    "priority",
    "arrival_s",
    "first_scheduled_s",
    "first_token_s",
    "finish_s",
    "prompt_tokens",
    "cached_prompt_tokens",
    "output_tokens",
    "finish_reason",
    "num_preemptions",
    "recomputed_tokens",
    "output_text",
)
_TAG_CHARS = 64  # the most W&B takes
_NAME_CHARS = 128

_log = logging.getLogger(__name__)


class WandbTracker:
    """One W&B run a run; its files lie in the run's folder under `wandb/`.

    Every step is a row of its own under W&B's internal counter, and the x axis is the engine's
    `step`. So no row can be dropped for coming with a step that is not above the last one.
    Events stay in `events.jsonl`; their counts are in the summary.
    """

    required: ClassVar[bool] = False

    def __init__(
        self,
        *,
        project: str = "paxkv",
        mode: str | None = None,
        group: str | None = None,
        job_type: str = "serve",
        init_timeout_s: float = 15.0,
        finish_timeout_s: float = 60.0,
        max_table_rows: int = 1_000,
    ):
        """Make a tracker.

        Args:
            project: W&B project.
            mode: online, offline or disabled; None takes WANDB_MODE, and without that is online
                where the user is logged in and offline elsewhere.
            group: W&B group, such as a sweep's name.
            job_type: W&B job type.
            init_timeout_s: Seconds to wait for the server before the run goes on offline.
            finish_timeout_s: Seconds to wait for the upload at the end; what is left stays in the
                folder, for `wandb sync`.
            max_table_rows: Requests shown in the table at most.

        Raises:
            ConfigError: The mode is unknown.
        """
        chosen = mode or os.environ.get("WANDB_MODE") or None
        if chosen is not None and chosen not in MODES:
            source = "track.mode" if mode else "WANDB_MODE"
            raise ConfigError(f"{source}={chosen}: must be one of {', '.join(MODES)}.")
        self._mode = chosen
        self._project = project
        self._group = group
        self._job_type = job_type
        self._init_timeout_s = init_timeout_s
        self._finish_timeout_s = finish_timeout_s
        self._max_table_rows = max_table_rows

    def start(self, info: RunInfo) -> None:
        """Open a W&B run; goes offline, with one warning, where the server does not answer."""
        import wandb

        self._rows: list[list[Any]] = []
        self._num_requests = 0
        mode = self._mode or ("online" if _is_logged_in() else "offline")
        try:
            self._run = self._init(info, mode)
        except (wandb.Error, TimeoutError, OSError) as error:
            if mode != "online":
                raise
            _log.warning(
                "W&B does not answer, the run is recorded offline: %s. Upload later with "
                "`wandb sync`; track.mode=offline does not try.",
                " ".join(str(error).split()),
            )
            self._run = self._init(info, "offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _init(self, info: RunInfo, mode: str) -> "wandb.Run":
        import wandb

        return wandb.init(
            project=self._project,
            group=self._group,
            job_type=self._job_type,
            name=info.name[:_NAME_CHARS] or None,
            tags=[f"{group}={option}"[:_TAG_CHARS] for group, option in info.choices.items()],
            config=to_jsonable(info.config),
            dir=str(info.run_dir),
            mode=mode,  # type: ignore[arg-type]
            reinit="finish_previous",  # several runs in one process stay several runs
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=self._init_timeout_s,
                finish_timeout=self._finish_timeout_s,
            ),
        )

    def step(self, record: StepRecord) -> None:
        """Log a step as one row."""
        num_blocks = record.blocks_free + record.blocks_live + record.blocks_cached
        self._run.log(
            {
                "step": record.step,
                "time_s": record.start_s + record.duration_s,
                "step/duration_s": record.duration_s,
                "step/host_s": record.host_s,
                "step/compile_s": record.compile_s,
                "step/prefill_tokens": record.prefill_tokens,
                "step/decode_rows": record.decode_rows,
                "queue/running": record.running,
                "queue/waiting": record.waiting,
                "queue/swapped": record.swapped,
                "cache/usage": record.blocks_live / num_blocks if num_blocks else 0.0,
                "cache/blocks_free": record.blocks_free,
                "cache/blocks_live": record.blocks_live,
                "cache/blocks_cached": record.blocks_cached,
                "cache/largest_free_run_blocks": record.largest_free_run_blocks,
                "cache/held_tokens": record.tokens_held,
                **{f"tenant_blocks/{name}": n for name, n in record.tenant_blocks.items()},
                "cache/hit_tokens": record.cached_tokens,
                "preempt/num_preemptions": record.preemptions,
                "preempt/recomputed_tokens": record.recomputed_tokens,
                "preempt/swap_out_blocks": record.swap_out_blocks,
                "preempt/swap_in_blocks": record.swap_in_blocks,
                "preempt/swap_bytes": record.swap_bytes,
            }
        )

    def request(self, record: RequestRecord) -> None:
        """Keep a row of the table of requests."""
        self._num_requests += 1
        if len(self._rows) < self._max_table_rows:
            self._rows.append([getattr(record, column) for column in _COLUMNS])

    def event(self, event: Event) -> None:
        """Leave the event to `events.jsonl`."""

    def finish(
        self, status: Status, summary: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        """Write summary and table, and close the W&B run."""
        import wandb

        try:
            self._run.log({"requests": wandb.Table(columns=list(_COLUMNS), data=self._rows)})
            self._run.summary.update(
                {
                    **_flatten(to_jsonable(summary or {})),
                    "status": status,
                    "error": error,
                    "requests_not_in_table": self._num_requests - len(self._rows),
                }
            )
        finally:
            self._run.finish(exit_code=0 if status == "completed" else 1)


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"cache": {"usage_mean": 0.5}}` as `{"cache/usage_mean": 0.5}`, without nulls."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}/")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def _is_logged_in() -> bool:
    """Say whether W&B would find an API key, without asking W&B or any server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
