"""Several tenants' workloads in one run."""

import pytest

from paxkv.errors import ConfigError
from paxkv.workload.mix import Mix
from paxkv.workload.prompts import Prompts
from paxkv.workload.random_tokens import RandomTokens


def test_each_tenant_has_its_workload(tokenizer, limits):
    mix = Mix(
        parts={"a": RandomTokens(num_requests=3), "b": RandomTokens(num_requests=2, samples=2)},
        priorities={"b": 1},
    )
    requests = mix.requests(tokenizer, limits, 0)
    assert [(r.tenant, r.priority) for r in requests] == [("a", 0)] * 3 + [("b", 1)] * 4
    assert len({r.request_id for r in requests}) == 7 == mix.num_requests
    assert requests[4].fork_of == requests[3].request_id == "b:random-0"
    assert requests[0].prompt_token_ids != requests[3].prompt_token_ids


def test_requests_keep_their_priority_unless_their_tenant_has_one(tokenizer, limits, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "p", "max_tokens": 1, "priority": 3}\n')
    part = Prompts(path=str(file))
    requests = Mix(parts={"a": part, "b": part}, priorities={"b": 1}).requests(tokenizer, limits, 0)
    assert [(r.tenant, r.priority) for r in requests] == [("a", 3), ("b", 1)]


def test_a_tenant_alone_asks_the_same(tokenizer, limits):
    part = RandomTokens(num_requests=3)
    both = Mix(parts={"a": part, "b": part}).requests(tokenizer, limits, 5)
    alone = Mix(parts={"b": part}).requests(tokenizer, limits, 5)
    assert both[3:] == alone
    assert Mix(parts={"b": part}).requests(tokenizer, limits, 6) != alone


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parts": {}}, "at least one tenant"),
        ({"parts": {"a": RandomTokens()}, "priorities": {"b": 1}}, r"workload\.priorities\.b"),
        ({"parts": {"a": 3}}, r"workload\.parts\.a=3: not a workload"),
        (
            {"parts": {"a": RandomTokens()}, "priorities": {"a": "high"}},
            r"workload\.priorities\.a=high: .*whole number.*Try \+workload\.priorities\.a=0",
        ),
    ],
)
def test_nonsense_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Mix(**values)
