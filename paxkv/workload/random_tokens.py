"""Requests of random tokens: lengths and rates by distribution, content without meaning."""

from dataclasses import dataclass, field

from paxkv.errors import ConfigError
from paxkv.workload.arrivals import Arrivals, Poisson
from paxkv.workload.base import ModelLimits, TextTokenizer, request_seeds, streams, with_samples
from paxkv.workload.checks import count_problem, join, number_problem
from paxkv.workload.lengths import Lengths, LogNormal
from paxkv.workload.request import Request


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """Prompts of tokens drawn alike likely from the vocabulary.

    Attributes:
        num_requests: How many requests.
        prompt_len: Prompt lengths in tokens, without the shared prefix.
        output_len: Output lengths in tokens: each request's `max_tokens`.
        arrivals: When requests come in.
        shared_prefix_tokens: Tokens that every prompt starts with, the same ones for all.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        samples: Samples of each prompt; those after the first share its cache.
        ignore_eos: Run to the drawn output length even past an end token, so that the load is what
            the distribution says.
    """

    num_requests: int = 32
    prompt_len: Lengths = field(default_factory=lambda: LogNormal(64.0, 0.8, 8, 512))
    output_len: Lengths = field(default_factory=lambda: LogNormal(32.0, 0.5, 4, 128))
    arrivals: Arrivals = field(default_factory=lambda: Poisson(4.0))
    shared_prefix_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        problems = join(
            [
                count_problem("workload.num_requests", self.num_requests),
                count_problem("workload.samples", self.samples),
                count_problem("workload.shared_prefix_tokens", self.shared_prefix_tokens, low=0),
                number_problem("workload.temperature", self.temperature),
                number_problem("workload.top_p", self.top_p, high=1.0, open_low=True),
            ]
        )
        if problems:
            raise ConfigError(problems)

    def requests(self, tokenizer: TextTokenizer, model: ModelLimits, seed: int) -> list[Request]:
        """Return the requests; the same seed gives the same tokens, lengths and arrivals."""
        tokens, prompt_rng, output_rng, arrivals_rng = streams(seed, 4)
        prompt_lens = self.prompt_len.sample(self.num_requests, prompt_rng)
        output_lens = self.output_len.sample(self.num_requests, output_rng)
        arrivals = self.arrivals.times_s(self.num_requests, arrivals_rng)
        seeds = request_seeds(seed, self.num_requests)
        prefix = tokens.integers(model.vocab_size, size=self.shared_prefix_tokens).tolist()
        made = [
            Request(
                request_id=f"random-{index}",
                prompt_token_ids=(
                    *prefix,
                    *tokens.integers(model.vocab_size, size=int(prompt_lens[index])).tolist(),
                ),
                max_tokens=int(output_lens[index]),
                arrival_s=float(arrivals[index]),
                temperature=self.temperature,
                top_p=self.top_p,
                seed=seeds[index],
                ignore_eos=self.ignore_eos,
            )
            for index in range(self.num_requests)
        ]
        return with_samples(made, self.samples)
