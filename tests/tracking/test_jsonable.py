import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paxkv.tracking.jsonable import dumps, to_jsonable

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(plain)
def test_anything_is_one_line_of_strict_json(value):
    text = dumps(value)
    assert text.count(b"\n") == 1

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(text, parse_constant=refuse)


def test_arrays_paths_and_numbers(event_record):
    value = {"a": np.float32(0.5), 1: np.arange(2), "p": Path("x"), "n": np.float64("nan")}
    assert to_jsonable(value) == {"a": 0.5, "1": [0, 1], "p": "x", "n": None}
    assert to_jsonable(event_record("evict"))["kind"] == "evict"


def test_half_a_surrogate_pair_survives():
    assert json.loads(dumps("\ud800")) == "\ud800"
