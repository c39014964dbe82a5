"""A fact hidden in a long text and asked for at its end: does the cache still hold it?"""

from collections.abc import Sequence

import numpy as np

from paxkv.models.tokenizer import Tokenizer
from paxkv.quality.agreement import Continuation, equal_choices
from paxkv.quality.cached import CachedModel
from paxkv.quality.text import docs_tokens

_FACT = "\n\nThe secret code of the {place} is {code}.\n\n"
_QUESTION = (
    "\n\nQuestion: what is the secret code of the {place}?\n"
    "Answer: the secret code of the {place} is"
)
_PLACES = ("harbour", "library", "garden", "station", "museum")


def make_needles(
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    depths: Sequence[float],
    repeats: int,
    seed: int,
    digits: int = 5,
) -> list[Continuation]:
    """Hide codes in documentation text; each prompt is continued by its code.

    Args:
        tokenizer: Of the model.
        num_tokens: Length of the text around the fact.
        depths: Where the fact stands, 0 (start) to 1 (end).
        repeats: Codes, and pieces of text, at each depth.
        seed: Of the codes and of where the text is cut from.
        digits: Of a code.

    Source: the needle-in-a-haystack test of long contexts, with the answer begun, so that a base
    model of 135 million parameters can finish it.
    """
    rng = np.random.default_rng(seed)
    needles = []
    for depth in depths:
        for _ in range(repeats):
            code = "".join(map(str, rng.integers(0, 10, digits)))
            place = _PLACES[rng.integers(len(_PLACES))]
            text = docs_tokens(tokenizer, num_tokens, start=float(rng.random()))
            cut = round(depth * num_tokens)
            fact = tokenizer.encode(_FACT.format(place=place, code=code))
            question = _QUESTION.format(place=place)
            asked = tokenizer.encode(question)
            answer = tokenizer.encode(f"{question} {code}")[len(asked) :]
            needles.append(Continuation([*text[:cut], *fact, *text[cut:], *asked], answer))
    return needles


def recall(model: CachedModel, needles: Sequence[Continuation]) -> float:
    """Return the share of codes that greedy decoding repeats exactly, 0 to 1."""
    return sum(bool(equal_choices(model, needle).all()) for needle in needles) / len(needles)
