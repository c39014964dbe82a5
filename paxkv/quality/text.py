"""Text that ships with Python, for calibration and for scores: no download."""

from paxkv.models.tokenizer import Tokenizer

_CHARS_PER_TOKEN = 8  # more than any tokenizer packs on average


def docs_tokens(tokenizer: Tokenizer, num_tokens: int, *, start: float = 0.0) -> list[int]:
    """Return tokens of Python's documentation, topics in alphabetical order.

    Args:
        tokenizer: Of the model.
        num_tokens: How many.
        start: Where in the text to begin, as a share of it; the end joins the beginning.
    """
    text = _docs()
    first = int(start * len(text))
    ids: list[int] = []
    while len(ids) < num_tokens:
        chars = max(num_tokens - len(ids), 1) * _CHARS_PER_TOKEN
        ids += tokenizer.encode((text + text)[first : first + chars])
        first = (first + chars) % len(text)
    return ids[:num_tokens]


def _docs() -> str:
    from pydoc_data.topics import topics  # 650 kB of text

    return "\n\n".join(topics[name] for name in sorted(topics))
