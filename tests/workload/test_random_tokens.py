import pytest

from paxkv.errors import ConfigError
from paxkv.workload.arrivals import AllAtOnce
from paxkv.workload.lengths import Fixed, Uniform
from paxkv.workload.random_tokens import RandomTokens


def test_lengths_tokens_and_ids(tokenizer, limits):
    workload = RandomTokens(num_requests=200, prompt_len=Uniform(1, 9), output_len=Uniform(2, 4))
    requests = workload.requests(tokenizer, limits, seed=0)
    assert {len(r.prompt_token_ids) for r in requests} == set(range(1, 10))
    assert {r.max_tokens for r in requests} == {2, 3, 4}
    tokens = {t for r in requests for t in r.prompt_token_ids}
    assert min(tokens) >= 0
    assert 240 < max(tokens) < limits.vocab_size
    assert len({r.request_id for r in requests}) == len({r.seed for r in requests}) == 200
    assert all(r.ignore_eos for r in requests)


def test_shared_prefix(tokenizer, limits):
    workload = RandomTokens(num_requests=5, prompt_len=Fixed(4), shared_prefix_tokens=32)
    requests = workload.requests(tokenizer, limits, seed=0)
    assert {len(r.prompt_token_ids) for r in requests} == {36}
    assert len({r.prompt_token_ids[:32] for r in requests}) == 1
    assert len({r.prompt_token_ids[32:] for r in requests}) == 5


def test_seed_decides_everything_and_draws_do_not_mix(tokenizer, limits):
    def make(seed, **options):
        return RandomTokens(num_requests=8, **options).requests(tokenizer, limits, seed)

    assert make(1) == make(1)
    assert make(1) != make(2)
    other_arrivals = make(1, arrivals=AllAtOnce(), output_len=Fixed(1))
    assert [r.prompt_token_ids for r in make(1)] == [r.prompt_token_ids for r in other_arrivals]


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        RandomTokens(num_requests=0, shared_prefix_tokens=-1, temperature=-1, top_p=2)
    assert len(caught.value.problems) == 4
