"""An executor without a model: time is linear in what a step computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paxkv.engine.step import RowBatch, StepPlan, StepResult

END_TOKEN = 2
"""What a request says in its last step, where `output_lens` knows its length."""

_ANY_TOKEN = 3


@dataclass(frozen=True, kw_only=True)
class LinearTimeExecutor:
    """Returns arbitrary tokens, and a duration that is linear in the tokens of the step.

    A stand-in for a cost model: it knows nothing of a device, and attention costs the same whatever
    the context. The defaults are of the order of an 8-billion-parameter model in bfloat16 on a
    data-centre GPU: a step reads the weights once, a prompt token costs compute, a decoding row
    reads its cache. Swapping takes no time.

    Attributes:
        step_s: Seconds of a step, however little it computes.
        prefill_token_s: Seconds more for each token of a prompt.
        decode_row_s: Seconds more for each request that generates a token.
        output_lens: Output tokens after which a request says `END_TOKEN`, by its seed, which
            nothing else uses here; without an entry it runs to its limit.
    """

    step_s: float = 8e-3
    prefill_token_s: float = 80e-6
    decode_row_s: float = 90e-6
    output_lens: Mapping[int, int] = field(default_factory=dict)

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute nothing, and say how long it would have taken."""
        return StepResult(
            prefill_tokens=self._tokens(plan.prefills),
            decode_tokens=self._tokens(plan.decodes),
            duration_s=self.step_s
            + self.prefill_token_s * len(plan.prefills.tokens)
            + self.decode_row_s * plan.decodes.num_rows,
        )

    def _tokens(self, batch: RowBatch) -> np.ndarray:
        """Return the next token of each row, int32 `[row]`."""
        if not self.output_lens:
            return np.full(batch.num_rows, _ANY_TOKEN, np.int32)
        seeds = batch.sampling.seed.tolist()
        last = np.array([self.output_lens.get(seed, -1) for seed in seeds], np.int64)
        ends = batch.sampling.output_index + 1 == last
        return np.where(ends, END_TOKEN, _ANY_TOKEN).astype(np.int32)
