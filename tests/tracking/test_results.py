from paxkv.metrics import summarize
from paxkv.tracking.results import result_rows


def test_rows_of_an_empty_run_have_dashes():
    rows = {label: value for label, value, _ in result_rows(summarize([], [], [], 0, block_size=1))}
    assert rows["time to first token, mean / median / p99"] == "- / - / -"
    assert "goodput" not in rows


def test_what_went_wrong_is_shown(request_record, step_record):
    requests = [
        request_record([1.0, 0.9], num_preemptions=2),
        request_record([1.0]),
        request_record(finish_reason="rejected"),
        request_record(finish_reason=None),
    ]
    steps = [step_record(preemptions=2, prefill_tokens=1_200, recomputed_tokens=300, num_compiles=3,
                         compile_s=4.0, swap_out_blocks=7)]  # fmt: skip
    rows = {
        label: f"{value} {unit}"
        for label, value, unit in result_rows(summarize(requests, steps, [], 2.0, block_size=16))
    }
    assert rows["requests completed"] == "2 (stop 0, length 2) of 4"
    assert rows["not completed"] == "1 rejected, 1 unfinished requests"
    assert rows["preemptions"] == "2 in 1 requests"
    assert rows["recomputed"] == "300 (25.0 %) tokens"
    assert rows["swapped out / in"] == "7 / 0 blocks"
    assert rows["of one token, so without gaps"] == "1 requests"
    assert rows["left out, the clock went back"] == "2 values"
    assert rows["shapes compiled while serving"] == "3 in 4.00 s"
