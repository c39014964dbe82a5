"""One row a format: perplexity, greedy agreement, recall and bytes on the same texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paxkv.cache.quantize import KVFormat
from paxkv.models.source import LoadedModel
from paxkv.quality.agreement import Continuation, agreement, continue_all
from paxkv.quality.cached import CachedModel
from paxkv.quality.needle import make_needles, recall
from paxkv.quality.text import docs_tokens
from paxkv.workload.arrivals import AllAtOnce
from paxkv.workload.docs_chat import DocsChat

_TEXT_START = 0.5  # of the documentation: calibration reads its beginning


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What every format is measured on.

    Attributes:
        text: Tokens that perplexity is taken of.
        references: Chat prompts and what the model says with an unquantised cache.
        needles: Prompts with a hidden code, and the code.
    """

    text: Sequence[int]
    references: Sequence[Continuation]
    needles: Sequence[Continuation]


class Quality(NamedTuple):
    """What a format costs; see `Suite`.

    Attributes:
        perplexity: exp of the mean negative log-likelihood.
        equal_share: Of greedy tokens, each given the reference's text, 0 to 1.
        first_differences: Tokens of each prompt before a free run parts from the reference.
        recall: Share of needles found, 0 to 1.
        bytes_per_token: Of the cache, all layers.
    """

    perplexity: float
    equal_share: float
    first_differences: tuple[int, ...]
    recall: float
    bytes_per_token: int


def make_suite(
    model: LoadedModel,
    *,
    text_tokens: int = 512,
    num_prompts: int = 6,
    output_tokens: int = 48,
    needle_tokens: int = 300,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    repeats: int = 3,
    seed: int = 0,
) -> Suite:
    """Prepare texts from Python's documentation, and the reference with `kv=auto`.

    Args:
        model: Whose tokens they are.
        text_tokens: Of the text for perplexity.
        num_prompts: Chat prompts, as in `workload=docs_chat`.
        output_tokens: Greedy tokens of each.
        needle_tokens: Of the text around a hidden code.
        depths: See `make_needles`.
        repeats: See `make_needles`.
        seed: Of prompts and needles.
    """
    chat = DocsChat(num_requests=num_prompts, max_tokens=output_tokens, arrivals=AllAtOnce())
    prompts = [r.prompt_token_ids for r in chat.requests(model.tokenizer, model.config, seed)]
    return Suite(
        text=docs_tokens(model.tokenizer, text_tokens, start=_TEXT_START),
        references=continue_all(CachedModel(model, KVFormat()), prompts, output_tokens),
        needles=make_needles(
            model.tokenizer, num_tokens=needle_tokens, depths=depths, repeats=repeats, seed=seed
        ),
    )


def measure(model: LoadedModel, kv: KVFormat, suite: Suite, *, block_size: int = 16) -> Quality:
    """Measure one format on a suite."""
    cached = CachedModel(model, kv, block_size=block_size)
    same = agreement(cached, suite.references)
    return Quality(
        perplexity=cached.perplexity(suite.text).perplexity,
        equal_share=same.equal_share,
        first_differences=same.first_differences,
        recall=recall(cached, suite.needles),
        bytes_per_token=cached.bytes_per_token,
    )
