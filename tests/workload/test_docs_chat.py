import dataclasses
import inspect
from pydoc_data.topics import topics

import pytest

from paxkv.errors import ConfigError
from paxkv.workload.arrivals import AllAtOnce
from paxkv.workload.docs_chat import QUESTIONS, SYSTEM_PROMPT, DocsChat
from paxkv.workload.lengths import Fixed, Uniform


def test_defaults(tokenizer, limits):
    requests = DocsChat().requests(tokenizer, limits, seed=0)
    assert len(requests) == 16
    assert len({r.request_id for r in requests}) == 16
    assert len({r.seed for r in requests}) == 16
    assert {r.max_tokens for r in requests} == {48}
    assert {r.temperature for r in requests} == {0.0}
    assert requests[0].arrival_s == 0
    assert requests[-1].arrival_s > 0


def test_text_is_from_the_documentation(tokenizer, limits):
    for request in DocsChat().requests(tokenizer, limits, seed=3):
        question, _, excerpt = request.prompt_text.partition("\n\n")
        assert question in QUESTIONS
        assert any(excerpt in text for text in topics.values())
        assert len(excerpt.split()) >= 8
        assert request.prompt_text in tokenizer.decode(request.prompt_token_ids)


def test_prompts_fill_their_length_and_never_pass_it(tokenizer, limits):
    workload = DocsChat(num_requests=32, prompt_len=Fixed(900))
    lengths = [len(r.prompt_token_ids) for r in workload.requests(tokenizer, limits, seed=1)]
    assert max(lengths) <= 900
    assert min(lengths) > 800  # the next word would not have fitted


def test_prompts_leave_room_for_the_answer(tokenizer, limits):
    small = dataclasses.replace(limits, max_model_len=600)
    workload = DocsChat(num_requests=32, prompt_len=Fixed(2_000), max_tokens=40)
    for request in workload.requests(tokenizer, small, seed=1):
        assert len(request.prompt_token_ids) + request.max_tokens <= 600


def test_seed_decides_everything(tokenizer, limits):
    assert DocsChat().requests(tokenizer, limits, 5) == DocsChat().requests(tokenizer, limits, 5)
    assert DocsChat().requests(tokenizer, limits, 5) != DocsChat().requests(tokenizer, limits, 6)


def test_arrivals_do_not_change_the_text(tokenizer, limits):
    poisson = DocsChat().requests(tokenizer, limits, 5)
    at_once = DocsChat(arrivals=AllAtOnce()).requests(tokenizer, limits, 5)
    assert [r.prompt_text for r in poisson] == [r.prompt_text for r in at_once]
    assert {r.arrival_s for r in at_once} == {0.0}


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 16)])
def test_system_prompt_is_shared(tokenizer, limits, share, count):
    requests = DocsChat(system_share=share).requests(tokenizer, limits, 0)
    opening = f"<system>{SYSTEM_PROMPT}".encode()
    assert sum(bytes(r.prompt_token_ids).startswith(opening) for r in requests) == count


def test_every_option_reaches_the_requests(tokenizer, limits):
    workload = DocsChat(
        num_requests=2, max_tokens=3, temperature=0.5, top_p=0.9, ignore_eos=True,
        prompt_len=Uniform(200, 300),
    )  # fmt: skip
    for request in workload.requests(tokenizer, limits, 0):
        assert (request.max_tokens, request.temperature) == (3, 0.5)
        assert (request.top_p, request.ignore_eos) == (0.9, True)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        DocsChat(num_requests=0, max_tokens=-1, system_share=2.0, temperature=float("nan"), top_p=0)
    assert len(caught.value.problems) == 5
    assert "workload.top_p=0: must be a finite number > 0 and <= 1." in caught.value.problems


def test_only_keywords():
    kinds = {p.kind for p in inspect.signature(DocsChat).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
