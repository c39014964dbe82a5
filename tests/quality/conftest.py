import pytest

from paxkv.models.source import TinyRandom


@pytest.fixture(scope="session")
def tiny():
    """A random model that reads bytes."""
    return TinyRandom(num_layers=4, max_model_len=512).load("float32")
