"""The records of a run: one a request, one a step, one an event.

Every summary number comes from these. Times are seconds since the start of the run, on its clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "rejected", "failed"]
EventKind = Literal["reject", "preempt", "swap_out", "swap_in", "evict", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """How one request fared.

    Attributes:
        first_scheduled_s: Start of the first step that computed a token of it; None if none did.
        first_token_s: When its first output token was there; None if there was none.
        finish_s: When its last token was there, or it was refused; None while unfinished.
        cached_prompt_tokens: Prompt tokens taken from the prefix cache when it was first admitted.
        forked_prompt_tokens: Prompt tokens taken over from the request that it is a sample of.
        output_token_ids: Each output token once, however often it was recomputed.
        token_times_s: When each output token was there.
        finish_reason: None while unfinished (an interrupted run).
        message: Why it was rejected or failed, with the numbers; empty otherwise.
        recomputed_tokens: Tokens computed again after a preemption dropped them.
    """

    request_id: str
    tenant: str
    priority: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finish_s: float | None
    prompt_tokens: int
    cached_prompt_tokens: int
    forked_prompt_tokens: int
    output_tokens: int
    output_token_ids: tuple[int, ...]
    token_times_s: tuple[float, ...]
    finish_reason: FinishReason | None
    message: str
    num_preemptions: int
    num_swaps: int
    recomputed_tokens: int
    prompt_text: str = ""
    output_text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One engine iteration; the state columns are as the step left them.

    Attributes:
        start_s: When scheduling began.
        duration_s: Scheduling to committed tokens.
        host_s: The part spent scheduling, building the batch and committing.
        compile_s: Time spent compiling shapes seen for the first time; the clock stands still
            meanwhile.
        num_compiles: How many those were.
        prefill_tokens: Prompt (or recomputed) tokens computed.
        decode_rows: Running requests that got one token each.
        recomputed_tokens: Those of the computed tokens that had been computed before.
        running: Requests that hold a row.
        waiting: Requests that wait for admission, preempted ones included.
        swapped: Requests whose blocks lie in host memory.
        blocks_free: Blocks nobody holds and nothing is cached in.
        blocks_live: Blocks held by running requests.
        blocks_cached: Evictable blocks: findable in the prefix cache, held by nobody.
        blocks_peak: Blocks held while the step ran: with those that it gave back at its end.
        largest_free_run_blocks: Most free blocks with consecutive ids.
        tokens_held: Tokens in live blocks, a shared block's once; in each group of layers.
        tenant_blocks: Blocks that each tenant pays for; empty without tenants.
        cached_tokens: Prompt tokens taken from the prefix cache in this step.
        preemptions: Requests preempted in this step.
    """

    step: int
    start_s: float
    duration_s: float
    host_s: float
    compile_s: float
    num_compiles: int
    prefill_tokens: int
    decode_rows: int
    recomputed_tokens: int
    running: int
    waiting: int
    swapped: int
    blocks_free: int
    blocks_live: int
    blocks_cached: int
    blocks_peak: int
    largest_free_run_blocks: int
    tokens_held: int
    tenant_blocks: Mapping[str, int]
    cached_tokens: int
    preemptions: int
    swap_out_blocks: int
    swap_in_blocks: int
    swap_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to a request or to the cache; `data` holds plain JSON values."""

    time_s: float
    step: int
    kind: EventKind
    request_id: str | None = None
    data: Mapping[str, object] = field(default_factory=dict)
