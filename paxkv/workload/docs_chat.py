"""Questions about the documentation text that ships with Python: real text without a download."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field

from paxkv.errors import ConfigError
from paxkv.workload.arrivals import Arrivals, Poisson
from paxkv.workload.base import ModelLimits, TextTokenizer, request_seeds, streams, with_samples
from paxkv.workload.checks import count_problem, join, number_problem
from paxkv.workload.lengths import Lengths, Uniform
from paxkv.workload.request import Request

SYSTEM_PROMPT = (
    "You are a patient teacher of the Python language. Answer in plain words and in at most three "
    "sentences. Name the statement or the type the question is about, say what it is for, and give "
    "one short example where it helps. If the text does not answer the question, say so."
)
QUESTIONS = (
    "Explain this part of the Python documentation:",
    "Summarise this part of the Python documentation in one sentence:",
    "What should a beginner remember from this part of the Python documentation?",
    "Give an example that fits this part of the Python documentation:",
)
_MIN_WORDS = 8
_MIN_CHARS = 1_600  # text after the start of an excerpt, so that long prompts find enough


@dataclass(frozen=True, kw_only=True)
class DocsChat:
    """Chat requests whose prompts are cut from `pydoc_data.topics`.

    Attributes:
        num_requests: How many requests.
        max_tokens: Most output tokens of each.
        prompt_len: Prompt lengths in tokens, chat template included. A prompt is cut to the longest
            excerpt that fits its length, but keeps at least eight words of text.
        arrivals: When requests come in.
        system_share: Share of requests that open with one and the same system prompt, so that the
            prefix cache has something to find.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        samples: Samples of each prompt; those after the first share its cache.
        ignore_eos: Run to `max_tokens` even past an end token.
    """

    num_requests: int = 16
    max_tokens: int = 48
    prompt_len: Lengths = field(default_factory=lambda: Uniform(96, 300))
    arrivals: Arrivals = field(default_factory=lambda: Poisson(4.0))
    system_share: float = 0.5
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        problems = join(
            [
                count_problem("workload.num_requests", self.num_requests),
                count_problem("workload.samples", self.samples),
                count_problem("workload.max_tokens", self.max_tokens),
                number_problem("workload.system_share", self.system_share, high=1.0),
                number_problem("workload.temperature", self.temperature),
                number_problem("workload.top_p", self.top_p, high=1.0, open_low=True),
            ]
        )
        if problems:
            raise ConfigError(problems)

    def requests(self, tokenizer: TextTokenizer, model: ModelLimits, seed: int) -> list[Request]:
        """Return the requests; the same seed gives the same text and the same arrivals."""
        from pydoc_data.topics import topics  # 650 kB of text

        texts, lengths_rng, arrivals_rng = streams(seed, 3)
        lengths = self.prompt_len.sample(self.num_requests, lengths_rng)
        arrivals = self.arrivals.times_s(self.num_requests, arrivals_rng)
        seeds = request_seeds(seed, self.num_requests)
        starts = [
            (name, match.end())
            for name in sorted(topics)
            for match in re.finditer(r"\A|\n\n(?=\S)", topics[name])
            if len(topics[name]) - match.end() >= _MIN_CHARS
        ]
        room = model.max_model_len - self.max_tokens
        made = []
        for index in range(self.num_requests):
            system = SYSTEM_PROMPT if texts.random() < self.system_share else None
            question = QUESTIONS[texts.integers(len(QUESTIONS))]
            name, start = starts[texts.integers(len(starts))]
            words = re.findall(r"\S+\s*", topics[name][start : start + 8 * _MIN_CHARS])
            ids, text = _fit(tokenizer, system, question, words, min(int(lengths[index]), room))
            made.append(
                Request(
                    request_id=f"docs-{index}",
                    prompt_token_ids=tuple(ids),
                    max_tokens=self.max_tokens,
                    arrival_s=float(arrivals[index]),
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed=seeds[index],
                    ignore_eos=self.ignore_eos,
                    prompt_text=text,
                )
            )
        return with_samples(made, self.samples)


def _fit(
    tokenizer: TextTokenizer, system: str | None, question: str, words: list[str], limit: int
) -> tuple[list[int], str]:
    """Return the token ids and the user's text with as many words as `limit` tokens hold."""

    def content(num_words: int) -> str:
        return f"{question}\n\n{''.join(words[:num_words]).rstrip()}"

    def prompt(num_words: int) -> tuple[list[int], str]:
        text = content(num_words)
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True), text

    # What the template adds is taken for constant during the search, since rendering is slow, and
    # the result is checked: tokens may merge where texts meet.
    added = len(prompt(_MIN_WORDS)[0]) - len(tokenizer.encode(content(_MIN_WORDS)))
    sizes = range(_MIN_WORDS, min(len(words), max(limit, _MIN_WORDS)) + 1)
    over = bisect_right(sizes, limit, key=lambda n: added + len(tokenizer.encode(content(n))))
    for num_words in range(sizes[max(over - 1, 0)], _MIN_WORDS, -1):
        ids, text = prompt(num_words)
        if len(ids) <= limit:
            return ids, text
    return prompt(_MIN_WORDS)
