import pytest

from experiments.noisy_neighbour import run

SMALL = ["--seeds=1", "--chat=6", "--batch=5", "--num-blocks=240"]


def test_a_reservation_keeps_the_bound(capsys):
    run.main(SMALL)
    lines = capsys.readouterr().out.splitlines()
    kept = {line.split(":")[0]: "kept by 1 of 1" in line for line in lines if "kept by" in line}
    assert kept["chat reservation 40 %"]
    assert not kept["tenants=none"]


def test_a_broken_bound_fails(monkeypatch):
    monkeypatch.setattr(run, "allowed_delay_s", lambda: 0.0)
    monkeypatch.setattr(run, "CASES", (run.ALONE, *(case for case in run.CASES if case.bounded)))
    with pytest.raises(SystemExit, match="chat reservation 40 %"):
        run.main(SMALL)


def test_the_chat_is_the_same_with_and_without_a_neighbour():
    options = run.argparse.Namespace(chat=3, batch=2)
    config = run.config_of(run.ALONE, 240)
    chat = [r for r in run.make_requests(options, config, 0) if r.tenant == "chat"]
    options.batch = 4
    assert chat == [r for r in run.make_requests(options, config, 0) if r.tenant == "chat"]


@pytest.mark.parametrize("case", run.CASES, ids=lambda case: case.name)
def test_terms_fit_the_pool(case):
    terms = run.config_of(case, 480).tenants.named
    expected = {run.RESERVATION: {"chat": 192, "batch": 0}, run.SMALL: {"chat": 48, "batch": 0}}
    reserved = {name: term.reservation_blocks for name, term in terms.items()}
    assert reserved == expected.get(case.tenants, {"batch": 0} if case.tenants else {})
