"""A request inside the engine: its tokens, where its cache lies, and what happened to it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from paxkv.metrics.records import FinishReason, RequestRecord
from paxkv.policies.view import QueuedRequest, RequestView
from paxkv.workload.request import Request


class Status(Enum):
    """Where a sequence is; terminal once FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The token stream of one request, as the scheduler keeps it.

    While it runs, its tokens and lengths live in its row of `Rows`; this object holds what outlasts
    a preemption.

    Attributes:
        order: Place in the order of submission.
        max_total_tokens: Prompt and output tokens at which it ends with `length`.
        tokens: int32, prompt and generated tokens; current only while it does not run.
        context_len: Tokens in the cache; current only while it does not run.
        row: Its row while running, else -1.
        num_computed: Longest context ever computed; tokens below it are recomputed when dropped.
        priority: Its tenant's where that has one, else the request's.
        most_blocks: Most blocks it can ever hold.
        host_block_ids: Where its blocks lie in host memory while SWAPPED.
        live_from: int32 [group], the first block of each group that its window has not left behind,
            while SWAPPED.
        prefix_chain: Entry of the prefix index up to which its full blocks are registered.
        num_registered: Full blocks looked at for registration so far.
        promised_blocks: Blocks it has been promised while it runs; 0 for none.
    """

    request: Request
    order: int
    priority: int
    max_total_tokens: int
    most_blocks: int
    tokens: np.ndarray
    status: Status = Status.WAITING
    context_len: int = 0
    row: int = -1
    num_computed: int = 0
    host_block_ids: np.ndarray | None = None
    live_from: np.ndarray | None = None
    prefix_chain: int | None = None
    num_registered: int = 0
    promised_blocks: int = 0
    first_scheduled_s: float | None = None
    cached_prompt_tokens: int = 0
    forked_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    recomputed_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)

    def view(
        self,
        *,
        num_tokens: int,
        context_len: int,
        num_blocks: int,
        filled_blocks: int,
        exclusive_blocks: int,
    ) -> RequestView:
        """Return what a policy may see of it."""
        request = self.request
        prompt_len = len(request.prompt_token_ids)
        return RequestView(
            request_id=request.request_id,
            order=self.order,
            tenant=request.tenant,
            priority=self.priority,
            arrival_s=request.arrival_s,
            prompt_len=prompt_len,
            output_len=num_tokens - prompt_len,
            context_len=context_len,
            num_tokens=num_tokens,
            max_total_tokens=self.max_total_tokens,
            num_blocks=num_blocks,
            filled_blocks=filled_blocks,
            exclusive_blocks=exclusive_blocks,
            num_preemptions=self.num_preemptions,
        )

    def queued(self) -> QueuedRequest:
        """Return what a policy may see of it while it waits."""
        request = self.request
        return QueuedRequest(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=self.priority,
            arrival_s=request.arrival_s,
            prompt_len=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
        )

    def record(
        self, reason: FinishReason | None, finish_s: float | None, message: str = ""
    ) -> RequestRecord:
        """Return its record as of `tokens`; the output text is left to whoever has a tokenizer."""
        request = self.request
        output = tuple(self.tokens[len(request.prompt_token_ids) :].tolist())
        return RequestRecord(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=self.priority,
            arrival_s=request.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.token_times_s[0] if self.token_times_s else None,
            finish_s=finish_s,
            prompt_tokens=len(request.prompt_token_ids),
            cached_prompt_tokens=self.cached_prompt_tokens,
            forked_prompt_tokens=self.forked_prompt_tokens,
            output_tokens=len(output),
            output_token_ids=output,
            token_times_s=tuple(self.token_times_s),
            finish_reason=reason,
            message=message,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            recomputed_tokens=self.recomputed_tokens,
            prompt_text=request.prompt_text,
        )
