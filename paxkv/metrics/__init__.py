"""Numbers about a run, each computed from its records.

Symbols, for one request (seconds on the run's clock)::

    a        arrival_s                        when it came in
    t1..tn   token_times_s                    when each of its n output tokens was there
    f        finish_s                         when its last token was there (tn)

and what is made of them, as in `vllm bench serve`::

    TTFT     t1 - a                           time to first token
    E2EL     f - a                            end-to-end latency
    TPOT     (E2EL - TTFT) / (n - 1)          time per output token; none for n = 1
    ITL      t2 - t1, t3 - t2, ..             inter-token latency, one value a gap

TPOT has one value a request, so its mean weights each request alike; ITL pools the gaps of all
requests, so its mean weights each token alike and long outputs dominate it. The two means differ,
and neither bounds the other. Latencies are taken over completed requests (finish reason `stop` or
`length`). A value that cannot be had (no stamp, a single token) is left out, never 0, and counted
under `missing`; a negative one (a clock that went back) is left out and counted under `negative`.

Symbols, for one step::

    d        duration_s
    B        blocks_free + blocks_live + blocks_cached     the pool
    L, h     blocks_live, tokens_held
    F, R     blocks_free, largest_free_run_blocks

    usage           L / B                     blocks in use; evictable ones are free
    peak watermark  max of blocks_peak / B over the run: while a step runs, not only after it
    occupancy       h / (L * block_size)      over steps with L > 0
    internal fragmentation = 1 - occupancy
    external fragmentation = 1 - R / F        over steps with F > 0; only an allocator that needs
                                              blocks side by side suffers from it
    recompute tax   recomputed / all computed tokens

A tenant's blocks are those it pays for: each once, however many of its requests hold it, and a
block of two tenants for both. Means over steps weight each step by d, so a long prefill counts for
as long as it lasted.
"""

from paxkv.metrics.records import Event, EventKind, FinishReason, RequestRecord, StepRecord
from paxkv.metrics.slo import Slo
from paxkv.metrics.summary import summarize

__all__ = [
    "Event",
    "EventKind",
    "FinishReason",
    "RequestRecord",
    "Slo",
    "StepRecord",
    "summarize",
]
