"""What passes between the scheduler and an executor: the plan of one step and its result.

`scheduler.schedule(state, now) -> StepPlan -> executor.execute(plan) -> StepResult ->
scheduler.commit(state, plan, result)`. A plan is self-contained: an executor needs no view of the
scheduler's state, and an executor that models time can ignore the token ids.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token of each row is drawn.

    Attributes:
        temperature: float32 `[row]`; 0 is greedy.
        top_p: float32 `[row]`.
        seed: uint32 `[row]`, the request's own stream.
        output_index: int32 `[row]`, tokens drawn before; picks the draw of the stream.
        all_greedy: Whether every row is greedy.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    seed: np.ndarray
    output_index: np.ndarray
    all_greedy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Rows that compute tokens in this step: the decodes (one token each) or the prefill chunks.

    Attributes:
        rows: int32 `[row]`, the places in the scheduler's batch; an executor can ignore them.
        tokens: int32, all rows' token ids one after the other, `query_lens` of each.
        query_lens: int32 `[row]`, tokens to compute.
        context_lens: int32 `[row]`, tokens in the cache once these are written.
        block_tables: int32 `[row, group, blocks]`, logical to physical block ids; past the end and
            where a window has left blocks behind, anything.
        samples: bool `[row]`, whether the row's last token yields a new one.
        sampling: How it is drawn.
    """

    rows: np.ndarray
    tokens: np.ndarray
    query_lens: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    samples: np.ndarray
    sampling: Sampling

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return len(self.rows)


def no_rows() -> RowBatch:
    """Return a batch without rows."""
    ids, flags, floats = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
    return RowBatch(
        rows=ids,
        tokens=ids,
        query_lens=ids,
        context_lens=ids,
        block_tables=np.zeros((0, 0, 0), np.int32),
        samples=flags,
        sampling=Sampling(
            temperature=floats,
            top_p=floats,
            seed=np.zeros(0, np.uint32),
            output_index=ids,
            all_greedy=True,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMove:
    """Blocks of one request to copy between the device pool and host memory."""

    request_id: str
    block_ids: np.ndarray
    host_block_ids: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCopy:
    """Blocks to copy within the device pool, for a request that forks from another."""

    request_id: str
    src: np.ndarray
    dst: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One engine step, to be carried out in the order of the fields.

    Blocks freed by a swap-out may be taken again within the step, so the order matters.
    """

    step: int
    swap_outs: tuple[BlockMove, ...]
    swap_ins: tuple[BlockMove, ...]
    copies: tuple[BlockCopy, ...]
    prefills: RowBatch
    decodes: RowBatch

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (
            self.swap_outs
            or self.swap_ins
            or self.copies
            or self.prefills.num_rows
            or self.decodes.num_rows
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an executor brings back.

    Attributes:
        prefill_tokens: int32 `[row of plan.prefills]`; meaningless where the row does not sample.
        decode_tokens: int32 `[row of plan.decodes]`.
        duration_s: Time the step took on the device, compilation left out.
        compile_s: Time spent compiling shapes seen for the first time.
        num_compiles: How many those were.
        host_s: The part of `duration_s` spent building batches on the host.
        swap_bytes: Bytes copied to and from host memory.
        swap_s: The part of `duration_s` that took.
    """

    prefill_tokens: np.ndarray
    decode_tokens: np.ndarray
    duration_s: float
    compile_s: float = 0.0
    num_compiles: int = 0
    host_s: float = 0.0
    swap_bytes: int = 0
    swap_s: float = 0.0


class Executor(Protocol):
    """Carries out plans; the only part that knows how long a step takes."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan; returns when its tokens are known."""
        ...
