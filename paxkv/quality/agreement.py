"""How far greedy output stays the same: token by token, and until it first parts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxkv.quality.cached import CachedModel


class Continuation(NamedTuple):
    """A prompt and the tokens that follow it."""

    prompt: Sequence[int]
    tokens: Sequence[int]


class Agreement(NamedTuple):
    """How greedy choices compare with those of a reference.

    Attributes:
        equal_share: Share of tokens that are the same, each given the reference's own text so far,
            so that one difference does not make the rest incomparable. 0 to 1.
        first_differences: Tokens of each prompt before the first that differs, where the model runs
            on its own tokens; as many as there are where none does.
    """

    equal_share: float
    first_differences: tuple[int, ...]


def continue_all(
    model: CachedModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[Continuation]:
    """Continue prompts greedily: the reference that other formats are held against."""
    return [Continuation(prompt, model.greedy(prompt, num_tokens)) for prompt in prompts]


def equal_choices(model: CachedModel, reference: Continuation) -> np.ndarray:
    """Return which tokens of a continuation the model would choose there, bool `[token]`."""
    prompt, tokens = reference
    predicted = model.predict([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    return predicted == np.asarray(tokens)


def agreement(model: CachedModel, references: Sequence[Continuation]) -> Agreement:
    """Compare a model's greedy choices with continuations.

    Up to the first difference a free run has seen the very tokens of the reference, so that one
    pass over those tells where it is.
    """
    equal = [equal_choices(model, reference) for reference in references]
    firsts = tuple(len(same) if same.all() else int(same.argmin()) for same in equal)
    return Agreement(float(np.concatenate(equal).mean()), firsts)
