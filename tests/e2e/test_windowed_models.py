"""Models that come with windows, through the engine: blocks given back, found again, swapped.

The tokens are those that transformers makes without any cache of blocks.
"""

import os
import pathlib

import numpy as np
import pytest

from paxkv.cache.attend import model_spans
from paxkv.cache.groups import group_layers, most_blocks_of
from paxkv.cache.quantize import KVFormat
from paxkv.engine.clock import VirtualClock
from paxkv.engine.device import DeviceExecutor
from paxkv.engine.engine import Engine
from paxkv.engine.state import SchedulerConfig, init_state
from paxkv.models.source import Checkpoint
from paxkv.policies.admission import FirstChunk
from paxkv.policies.preemption import Recompute, Swap
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.request import Request

SHARED = pathlib.Path(
    os.environ.get("PAXKV_SHARED", pathlib.Path(__file__).resolve().parents[2].parent / "shared")
)
FAMILIES = ("mistral_window", "gemma2", "gemma3")
BLOCK_SIZE, CHUNK, TOTAL_LEN = 4, 16, 88


class Served:
    """A windowed model, its executor, and the tokens that it should say."""

    def __init__(self, family):
        folder = SHARED / "golden" / "tiny" / family
        if not folder.is_dir():
            pytest.skip(f"the reference model (golden/tiny/{family}) is not here")
        self.model = Checkpoint(path=str(folder)).load("float32")
        with np.load(folder / "reference.npz") as reference:
            self.prompt = tuple(reference["input_ids"].tolist())
            self.greedy = tuple(reference["greedy"].tolist())
        config = self.model.config
        self.groups = group_layers(model_spans(config.windows))
        layout = KVFormat().layout(
            "float32",
            self.groups,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
        )
        # A request alone fills half of it, and finds its blocks again; four overflow it.
        self.bound = most_blocks_of(self.groups, TOTAL_LEN, BLOCK_SIZE, CHUNK)
        self.num_blocks = 22 * self.bound // 10
        self.executor = DeviceExecutor(
            self.model,
            layout,
            self.groups,
            num_blocks=self.num_blocks,
            host_blocks=self.num_blocks,
            max_blocks=32,
        )

    def serve(self, requests, preemption):
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK,
            max_model_len=96,
            vocab_size=self.model.config.vocab_size,
            groups=self.groups,
            admission=FirstChunk(watermark=0.0),  # all start, and then grow
            preemption=preemption,
        )
        log = MemoryTracker()
        engine = Engine(
            state=init_state(config),
            executor=self.executor,
            clock=VirtualClock(),
            observer=log,
        )
        engine.run(requests)
        return log


@pytest.fixture(scope="module", params=FAMILIES)
def served(request):
    return Served(request.param)


@pytest.mark.parametrize("preemption", [Recompute(), Swap()], ids=["recompute", "swap"])
def test_windowed_models_say_what_they_say_without_blocks(served, preemption):
    # The prompt comes alone and again, so that its blocks are found though windows have left some
    # of them; and then in a crowd that overflows the pool.
    shared = {"max_tokens": 40, "ignore_eos": True}
    prompts = [
        (served.prompt, 0.0),
        (served.prompt, 1000.0),
        (served.prompt[::-1], 2000.0),
        (served.prompt, 2000.0),
        (served.prompt[7:] + served.prompt[:7], 2000.0),
        (served.prompt, 2000.0),
    ]
    requests = [
        Request(request_id=str(n), prompt_token_ids=prompt, arrival_s=arrival_s, **shared)
        for n, (prompt, arrival_s) in enumerate(prompts)
    ]
    log = served.serve(requests, preemption)
    records = {record.request_id: record for record in log.requests}
    for request in requests:
        if request.prompt_token_ids == served.prompt:
            assert records[request.request_id].output_token_ids == served.greedy
    assert records["1"].cached_prompt_tokens >= 40
    assert sum(step.preemptions for step in log.steps) > 0
    assert served.bound < len(served.groups) * TOTAL_LEN // BLOCK_SIZE
    alone = [step.blocks_live for step in log.steps if step.running == 1]
    assert 0 < max(alone) <= served.bound


def test_groups_are_those_of_the_windows(served):
    windows = {group.span.window for group in served.groups}
    assert windows == set(served.model.config.windows)
    assert sorted(layer for group in served.groups for layer in group.layers) == list(
        range(served.model.config.num_layers)
    )
