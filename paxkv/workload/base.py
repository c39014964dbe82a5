"""What every workload offers, and what it needs to know of the model it is made for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from paxkv.workload.request import Request


class TextTokenizer(Protocol):
    """The part of a tokenizer that workloads use."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the model's answer."""
        ...


class ModelLimits(Protocol):
    """The part of a model's configuration that workloads use."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in 0 .. vocab_size - 1."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...


class Workload(Protocol):
    """Makes the requests of a run: the same ones for the same arguments."""

    def requests(self, tokenizer: TextTokenizer, model: ModelLimits, seed: int) -> list[Request]:
        """Return the requests, ids distinct; order need not follow arrival times.

        Raises:
            ConfigError: The workload cannot be made; all problems in one error.
        """
        ...


SEED_BITS = 31  # fits every integer type a sampler may keep seeds in
_ODD = 0x9E3779B1  # an odd factor maps indices one to one, modulo a power of two

_ODD_SAMPLE = 0x85EBCA6B  # another, so that samples do not meet the seeds of other requests


def request_seeds(seed: int, count: int) -> list[int]:
    """Return `count` distinct sampling seeds in 0 .. 2^31 - 1, a function of the run's seed.

    A prefix of the list does not change with `count`.
    """
    start = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return [(start + index * _ODD) % (1 << SEED_BITS) for index in range(count)]


def num_requests(workload: Workload) -> int | None:
    """Return how many requests a workload says it will make, every sample counted; None if not."""
    count = getattr(workload, "num_requests", None)
    return None if count is None else count * getattr(workload, "samples", 1)


def sample_ids(request_id: str, samples: int) -> list[str]:
    """Return the ids of a prompt's samples: the request's own, then `ID/1`, `ID/2` and so on."""
    return [request_id, *(f"{request_id}/{number}" for number in range(1, samples))]


def with_samples(requests: Sequence[Request], samples: int) -> list[Request]:
    """Return each request `samples` times: further samples of a prompt fork from the first.

    Each has a random stream of its own. With temperature 0 all samples are equal. A sample shares
    the cache of the first while that one runs: not under `schedule=static`, nor where an allocator
    lays blocks side by side.
    """
    made = []
    for request in requests:
        made.append(request)
        made += [
            replace(
                request,
                request_id=request_id,
                seed=(request.seed + number * _ODD_SAMPLE) % (1 << SEED_BITS),
                fork_of=request.request_id,
            )
            for number, request_id in enumerate(sample_ids(request.request_id, samples))
            if number
        ]
    return made


def streams(seed: int, count: int) -> list[np.random.Generator]:
    """Return independent random generators, so that one quantity's draws never shift another's."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]
