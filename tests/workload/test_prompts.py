"""Files of prompts: what is read, and every way to get a line wrong."""

import json

import pytest

from paxkv.errors import ConfigError
from paxkv.workload.prompts import Prompts


@pytest.fixture
def write(tmp_path):
    def write(*lines, encoding="utf-8"):
        path = tmp_path / "prompts.jsonl"
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_bytes("\n".join(text).encode(encoding))
        return str(path)

    return write


@pytest.fixture
def read(write, tokenizer, limits):
    def read(*lines, seed=0, **options):
        workload = Prompts(path=write(*lines), **options)
        return workload.requests(tokenizer, limits, seed)

    return read


@pytest.fixture
def problems(read):
    def problems(*lines):
        with pytest.raises(ConfigError) as caught:
            read(*lines)
        return list(caught.value.problems)

    return problems


def test_every_key_is_read(read):
    [request] = read(
        {
            "prompt_token_ids": [1, 2, 3],
            "max_tokens": 4,
            "request_id": "mine",
            "arrival_s": 1.5,
            "priority": -2,
            "tenant": "a",
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 11,
            "ignore_eos": True,
        }
    )
    assert request.request_id == "mine"
    assert request.prompt_token_ids == (1, 2, 3)
    assert (request.max_tokens, request.arrival_s, request.priority) == (4, 1.5, -2)
    assert (request.tenant, request.temperature, request.top_p) == ("a", 0.7, 0.9)
    assert (request.seed, request.ignore_eos, request.prompt_text) == (11, True, "")


def test_defaults_and_text(read):
    [request] = read({"prompt": "hi", "max_tokens": 1})
    assert request.prompt_token_ids == tuple(b"hi")
    assert request.prompt_text == "hi"
    assert (request.arrival_s, request.priority, request.tenant) == (0.0, 0, "default")
    assert (request.temperature, request.top_p, request.ignore_eos) == (0.0, 1.0, False)


def test_chat_template(read):
    [request] = read({"prompt": "hi", "max_tokens": 1}, chat_template=True)
    assert request.prompt_token_ids == tuple(b"<user>hi<assistant>")
    assert request.prompt_text == "hi"


def test_ids_are_line_numbers_and_order_is_the_files(read):
    # vllm-project/vllm-omni#2048: ids never collide; ai-dynamo/aiperf#273: every line, in order.
    lines = [{"prompt": f"p{i}", "max_tokens": 1, "arrival_s": 9 - i} for i in range(10)]
    requests = read(*lines[:5], "", "   ", *lines[5:])
    assert [r.request_id for r in requests] == [*"12345", *"89", "10", "11", "12"]
    assert [r.prompt_text for r in requests] == [f"p{i}" for i in range(10)]


def test_whole_ids_become_text(read):
    [request] = read({"prompt": "p", "max_tokens": 1, "request_id": 7})
    assert request.request_id == "7"


def test_seeds_are_distinct_and_follow_the_run_seed(read):
    lines = [{"prompt": "same", "max_tokens": 1, "temperature": 1.0}] * 4
    first, again, other = (read(*lines, seed=s) for s in (0, 0, 1))
    assert len({r.seed for r in first}) == 4
    assert first == again
    assert {r.seed for r in first}.isdisjoint(r.seed for r in other)


def test_a_derived_seed_never_meets_a_given_one(read):
    plain = {"prompt": "p", "max_tokens": 1}
    derived = [r.seed for r in read(plain, plain, plain)]
    mixed = read(plain, plain | {"seed": derived[0]}, plain | {"seed": derived[1]}, plain)
    assert len({r.seed for r in mixed}) == 4
    assert [r.seed for r in mixed[1:3]] == derived[:2]


def test_a_byte_order_mark_and_odd_separators_are_no_problem(write, tokenizer, limits):
    text = '{"prompt": "a\u2028b", "max_tokens": 1}\r\n'
    path = write(text, encoding="utf-8-sig")
    [request] = Prompts(path=path).requests(tokenizer, limits, 0)
    assert request.prompt_text == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"prompt": "p", "max_tokens": 1} x', "not JSON: Extra data"),
        ("[1, 2]", "must be a JSON object, not list"),
        ('{"prompt": "p", "max_tokens": 1, "max_tokens": 2}', "'max_tokens' is there twice"),
        ({"max_tokens": 1}, "either prompt or prompt_token_ids"),
        ({"prompt": "p", "prompt_token_ids": [1], "max_tokens": 1}, "and not both"),
        ({"prompt": "", "max_tokens": 1}, "prompt is empty"),
        ({"prompt": "  ", "max_tokens": 1}, "no tokens in it"),
        ({"prompt": 3, "max_tokens": 1}, "prompt must be text, not int"),
        ({"prompt_token_ids": [], "max_tokens": 1}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [1.0], "max_tokens": 1}, "list of whole numbers"),
        ({"prompt_token_ids": [True], "max_tokens": 1}, "list of whole numbers"),
        ({"prompt_token_ids": "12", "max_tokens": 1}, "list of whole numbers"),
        ({"prompt_token_ids": [1, 256], "max_tokens": 1}, r"256 is outside .* 0 \.\. 255"),
        ({"prompt_token_ids": [-1], "max_tokens": 1}, "-1 is outside"),
        ({"prompt": "p"}, "max_tokens is missing"),
        ({"prompt": "p", "max_tokens": 0}, "max_tokens=0: must be a whole number >= 1"),
        ({"prompt": "p", "max_tokens": True}, "max_tokens=True"),
        ({"prompt": "p", "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"prompt": "p", "max_tokens": "8"}, "max_tokens=8: must be a whole number"),
        ({"prompt": "p", "max_tokens": 1, "max_token": 2}, "did you mean 'max_tokens'"),
        ({"prompt": "p", "max_tokens": 1, "zzz": 2}, "unknown key 'zzz': known keys: prompt"),
        ('{"prompt": "p", "max_tokens": 1, "arrival_s": NaN}', "arrival_s=nan"),
        ('{"prompt": "p", "max_tokens": 1, "arrival_s": Infinity}', "arrival_s=inf"),
        ({"prompt": "p", "max_tokens": 1, "arrival_s": -0.5}, "finite number >= 0"),
        ({"prompt": "p", "max_tokens": 1, "arrival_s": None}, "arrival_s=None"),
        ({"prompt": "p", "max_tokens": 1, "temperature": -1}, "temperature=-1"),
        ('{"prompt": "p", "max_tokens": 1, "temperature": NaN}', "temperature=nan"),
        ({"prompt": "p", "max_tokens": 1, "top_p": 0}, "top_p=0"),
        ({"prompt": "p", "max_tokens": 1, "top_p": 1.1}, "top_p=1.1"),
        ({"prompt": "p", "max_tokens": 1, "seed": -1}, "seed=-1"),
        ({"prompt": "p", "max_tokens": 1, "seed": 2**31}, "seed=2147483648"),
        ({"prompt": "p", "max_tokens": 1, "priority": 0.5}, "priority=0.5"),
        ({"prompt": "p", "max_tokens": 1, "ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        ({"prompt": "p", "max_tokens": 1, "tenant": ""}, "tenant=''"),
        ({"prompt": "p", "max_tokens": 1, "request_id": None}, "request_id=None"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(problems, line, message):
    good = {"prompt": "p", "max_tokens": 1}
    found = problems(good, line, good)
    assert len(found) == 1
    assert "prompts.jsonl:2: " in found[0]
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(found)


def test_bytes_that_are_no_text(tmp_path, tokenizer, limits):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\n{"prompt": "\xff", "max_tokens": 1}')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: not UTF-8 text \(byte 12\)"):
        Prompts(path=str(path)).requests(tokenizer, limits, 0)


def test_all_problems_of_a_file_are_collected(problems):
    found = problems(
        {"prompt": "", "max_tokens": 0, "tmperature": 1},
        {"prompt": "p", "max_tokens": 1, "request_id": "a"},
        {"prompt": "p", "max_tokens": 1, "request_id": "a"},
        "{",
    )
    assert len(found) == 5
    assert [problem.split("jsonl:")[1][0] for problem in found] == ["1", "1", "1", "4", "3"]


def test_duplicate_ids_are_refused(problems):
    # vllm-project/vllm#10583
    [problem] = problems(
        {"prompt": "p", "max_tokens": 1},
        {"prompt": "p", "max_tokens": 1, "request_id": "1"},
    )
    assert "'1' is used in lines 1, 2" in problem


def test_an_id_of_a_further_sample_is_taken(problems, read):
    sampled = {"prompt": "p", "max_tokens": 1, "request_id": "a", "samples": 2}
    [problem] = problems(sampled, {"prompt": "p", "max_tokens": 1, "request_id": "a/1"})
    assert "'a/1' is used in lines 1, 2" in problem
    requests = read(sampled, {"prompt": "p", "max_tokens": 1, "request_id": "a/2"})
    assert [request.request_id for request in requests] == ["a", "a/1", "a/2"]


def test_arrivals_in_unix_time_are_refused(problems):
    # inference-sim/inference-sim#1606
    lines = [{"prompt": "p", "max_tokens": 1, "arrival_s": 1.7e15 + i} for i in range(2)]
    [problem] = problems(*lines)
    assert "1.7e+15" in problem
    assert "Subtract the first one" in problem


@pytest.mark.parametrize("content", [(), ("", "  ")])
def test_an_empty_file_is_an_error(problems, content):
    [problem] = problems(*content)
    assert "there is no request in it" in problem


def test_a_missing_file_is_an_error(tokenizer, limits):
    with pytest.raises(ConfigError, match=r"workload\.path=nowhere\.jsonl: No such file"):
        Prompts(path="nowhere.jsonl").requests(tokenizer, limits, 0)
