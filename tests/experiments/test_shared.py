import numpy as np
import pytest

from experiments.shared.executor import LinearTimeExecutor
from experiments.shared.serve import serve
from experiments.shared.tables import markdown, percent
from paxkv.engine.state import SchedulerConfig
from paxkv.workload.request import Request

CONFIG = SchedulerConfig(
    block_size=4,
    num_blocks=9,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=16,
    vocab_size=10,
    eos_token_ids=(2,),
    prefix_caching=False,
)


def request(name, prompt_len=6, max_tokens=4, **fields):
    return Request(
        request_id=name, prompt_token_ids=(5,) * prompt_len, max_tokens=max_tokens, **fields
    )


def test_time_is_linear_in_tokens_and_rows():
    executor = LinearTimeExecutor(step_s=1.0, prefill_token_s=0.1, decode_row_s=0.01)
    served = serve(CONFIG, [request("a"), request("b")], executor)
    # A step with both prompts of 6 tokens, then three with two rows each.
    np.testing.assert_allclose([s.duration_s for s in served.steps], [2.2, 1.02, 1.02, 1.02])
    assert served.summary["duration"] == pytest.approx(5.26)
    assert served.mean_running() is None  # nobody ever waited
    assert served.full_cache is None


def test_an_output_ends_where_the_executor_knows_its_length():
    executor = LinearTimeExecutor(output_lens={7: 2, 8: 1})
    requests = [request("a", seed=7), request("b", seed=8), request("c", seed=9)]
    served = serve(CONFIG, requests, executor)
    assert {r.request_id: r.output_tokens for r in served.requests} == {"a": 2, "b": 1, "c": 4}


def test_means_are_of_the_time_in_which_requests_wait():
    # 16 tokens a step: prompts of 7, 7 and the first 2 tokens of a third; a fourth waits for it.
    requests = [request(str(i), prompt_len=7, max_tokens=2) for i in range(4)]
    served = serve(CONFIG, requests, LinearTimeExecutor())
    assert [step.waiting for step in served.steps] == [1, 0, 0]
    assert served.mean_running() == 3
    assert served.mean_written() == 16 / 36
    assert served.full_cache["internal_fragmentation_mean"] == pytest.approx(1 - 16 / 24)


def test_a_refused_request_is_an_error():
    with pytest.raises(RuntimeError, match=r"request a: .*max_model_len=16"):
        serve(CONFIG, [request("a", prompt_len=16)], LinearTimeExecutor())


def test_tables():
    assert markdown(("a", "b"), [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"
    assert (percent(0.0123), percent(None)) == ("1.2 %", "–")
