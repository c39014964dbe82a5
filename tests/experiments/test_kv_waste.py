"""The experiment on wasted memory, small: its numbers say what the policies are for."""

import pytest

from experiments.kv_waste import run
from experiments.shared.azure import TraceRow, read_trace
from experiments.shared.executor import LinearTimeExecutor
from experiments.shared.serve import serve

ROWS = [TraceRow(0.05 * place, 40 + 7 * place % 90, 20 + 11 * place % 50) for place in range(24)]


@pytest.fixture
def small():
    """Options of a pool of 1,024 tokens."""
    options = run.argparse.Namespace()
    options.pool_tokens, options.max_num_seqs, options.max_model_len = 1024, 32, 256
    return options


def waste(served):
    return served.full_cache["internal_fragmentation_mean"]


def test_paged_wastes_least_and_runs_most(small):
    served = {
        case.name: serve(
            run.config_of(case, small), run.known_outputs(ROWS, None), LinearTimeExecutor()
        )
        for case in run.ARRIVING
    }
    most, pow2, oracle, paged = served.values()
    assert waste(most) > waste(pow2) > waste(oracle) > waste(paged)
    running = [found.mean_running() for found in served.values()]
    assert running == sorted(running)
    written = [found.mean_written() for found in served.values()]
    assert written == sorted(written)


def test_smaller_blocks_waste_less(small):
    cases = [case for case in run.ALLOCATORS if "paged" in case.name]
    found = [
        waste(
            serve(run.config_of(case, small), run.known_outputs(ROWS, None), LinearTimeExecutor())
        )
        for case in cases
    ]
    assert found == sorted(found)


def test_admissions_end_requests_as_the_trace_does(small, monkeypatch):
    monkeypatch.setattr(run, "OUTPUT_LIMIT", 100)
    for case in run.ADMISSIONS:
        served = serve(run.config_of(case, small), *run.unknown_outputs(ROWS))
        lengths = {int(record.request_id): record.output_tokens for record in served.requests}
        assert lengths == {place: row.output_tokens for place, row in enumerate(ROWS)}
        if case.name == "admit=guaranteed":
            assert served.summary["preempt"]["num_preemptions"] == 0


def test_static_batches_wait(small):
    rates = [
        serve(
            run.config_of(case, small), run.known_outputs(ROWS, None), LinearTimeExecutor()
        ).summary["request_throughput"]
        for case in run.BATCHING
    ]
    assert rates[0] < rates[1]


def test_the_script_prints_its_tables(capsys):
    run.main(["--num-requests=4", "--pool-tokens=8192"])
    out = capsys.readouterr().out
    assert out.count("\n| --- |") == 4
    assert "4 requests of azure_conv_excerpt.csv" in out


def test_a_pool_that_holds_no_request_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["--pool-tokens=4096"])
    assert "Try --pool-tokens=40960" in capsys.readouterr().err


def test_both_forms_of_the_trace_are_read(tmp_path):
    published = tmp_path / "published.csv"
    published.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    rows = read_trace(published)
    assert [rounded(row) for row in rows] == [(0.0, 374, 44), (4.315, 396, 109)]
    assert read_trace()[:2] == [rounded(row) for row in rows]
    assert len(read_trace()) == 2000
    published.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="ContextTokens"):
        read_trace(published)
    with pytest.raises(SystemExit, match="no such file"):
        read_trace(tmp_path / "missing.csv")


def rounded(row):
    return row._replace(arrival_s=round(row.arrival_s, 3))
