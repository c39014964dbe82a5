"""Requests: where they come from, when they arrive, how long they are.

A workload is a frozen dataclass with one method, `requests(tokenizer, model, seed)`, which returns
the same requests for the same arguments; a configuration names it by `_target_`.

    request.py        what one request is
    base.py           what workloads offer, and the seeds they hand out
    docs_chat.py      questions about the documentation that ships with Python
    prompts.py        a JSONL file
    random_tokens.py  random tokens, lengths and rates by distribution
    mix.py            several of them at once, each a tenant's
    arrivals.py       arrival processes
    lengths.py        length distributions
"""

from paxkv.workload.base import ModelLimits, TextTokenizer, Workload
from paxkv.workload.docs_chat import DocsChat
from paxkv.workload.prompts import Prompts
from paxkv.workload.random_tokens import RandomTokens
from paxkv.workload.request import Request

__all__ = [
    "DocsChat",
    "ModelLimits",
    "Prompts",
    "RandomTokens",
    "Request",
    "TextTokenizer",
    "Workload",
]
