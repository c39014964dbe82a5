import pytest

from paxkv.cache.groups import Span
from paxkv.errors import ConfigError
from paxkv.policies.window import Full, LayerView, Sinks, Sliding


@pytest.mark.parametrize(
    ("policy", "own", "window", "num_sink_tokens"),
    [
        (Full(), None, None, 0),
        (Full(), 512, 512, 0),
        (Sliding(), None, 256, 0),
        (Sliding(size=64), 512, 64, 0),
        (Sliding(size=1024), 512, 512, 0),
        (Sinks(), None, 256, 4),
        (Sinks(size=64, num_sink_tokens=2), 512, 64, 2),
        (Sinks(size=1024), 512, 512, 0),  # the layer's own, which has no sinks
        (Sinks(size=512), 512, 512, 0),
    ],
)
def test_what_a_layer_attends_to(policy, own, window, num_sink_tokens):
    layer = LayerView(layer=0, num_layers=2, window=own)
    assert policy.choose(layer) == Span(window=window, num_sink_tokens=num_sink_tokens)


@pytest.mark.parametrize("policy", [Sliding, Sinks])
@pytest.mark.parametrize("size", [0, -1, 2.5, True, None, "wide"])
def test_a_window_is_a_count_of_tokens(policy, size):
    with pytest.raises(ConfigError, match=r"window\.size=.*Try window\.size=256, or window=full"):
        policy(size=size)


@pytest.mark.parametrize("num_sink_tokens", [0, -4, 1.5, True])
def test_sinks_are_a_count_of_tokens(num_sink_tokens):
    with pytest.raises(ConfigError, match=r"window\.num_sink_tokens=.*window=sliding"):
        Sinks(num_sink_tokens=num_sink_tokens)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        Sinks(size=0, num_sink_tokens=0)
    assert len(error.value.problems) == 2
