"""HostArray: every version keeps its values, whatever is done to the others."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.blocks.host_array import HostArray

SIZE = 6
index = st.lists(st.integers(0, SIZE - 1), max_size=4, unique=True)
span = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda t: slice(min(t), max(t)))
change = st.tuples(st.integers(0, 50), st.one_of(index, span), st.integers(-9, 9))


@given(st.lists(change, max_size=30), st.lists(st.integers(0, 50)))
def test_every_version_keeps_its_values(changes, reads):
    versions = [(HostArray(np.arange(SIZE)), np.arange(SIZE))]
    for base, where, value in changes:
        array, plain = versions[base % len(versions)]
        where = where if isinstance(where, slice) else np.array(where, np.intp)
        expected = plain.copy()
        expected[where] = value
        versions.append((array.set(where, value), expected))
        for read in reads[:1]:
            array, plain = versions[read % len(versions)]
            np.testing.assert_array_equal(np.asarray(array), plain)
    for array, plain in reversed(versions):
        np.testing.assert_array_equal(np.asarray(array), plain)


def test_values_read_do_not_change_with_later_versions():
    array = HostArray(np.arange(4))
    whole, part, item, row = np.asarray(array), array[1:3], array[0], array[...]
    array.set(np.arange(4), 9)
    assert whole.tolist() == [0, 1, 2, 3]
    assert row.tolist() == [0, 1, 2, 3]
    assert part.tolist() == [1, 2]
    assert item == 0


def test_an_empty_change_gives_a_version_of_its_own():
    first = HostArray(np.zeros(3, int))
    second = first.set(np.zeros(0, np.intp), 1)
    third = second.set(np.array([0]), 1)
    assert np.asarray(first).tolist() == np.asarray(second).tolist() == [0, 0, 0]
    assert np.asarray(third).tolist() == [1, 0, 0]


def test_a_change_that_fails_changes_nothing():
    array = HostArray(np.zeros(3, int))
    with pytest.raises(ValueError, match="shape"):
        array.set(np.array([0, 1]), np.arange(3))
    assert np.asarray(array.set(np.array([2]), 5)).tolist() == [0, 0, 5]
    assert np.asarray(array).tolist() == [0, 0, 0]


def test_an_old_version_holds_a_bounded_number_of_changes():
    first = latest = HostArray(np.zeros(10, int))
    for i in range(1000):
        latest = latest.set(np.array([i % 10]), i)
    steps, version = 0, first
    while version._undo is not None:
        version, steps = version._undo[0], steps + 1
    assert steps <= 10
    assert np.asarray(first).tolist() == [0] * 10


def test_behaves_as_an_array():
    array = HostArray(np.arange(4, dtype=np.int32))
    assert (len(array), array.shape, array.size, array.dtype) == (4, (4,), 4, np.int32)
    assert (array + 1).tolist() == [1, 2, 3, 4]
    assert (array == np.arange(4)).all()
    assert np.asarray(array, np.float32).dtype == np.float32
    assert "0, 1, 2, 3" in repr(array)
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_are_independent(duplicate):
    old = HostArray(np.zeros(3, int))
    new = old.set(np.array([1]), 7)
    other_old, other_new = duplicate(old), duplicate(new)
    new.set(np.array([0]), 9)
    assert np.asarray(other_old).tolist() == [0, 0, 0]
    assert np.asarray(other_new).tolist() == [0, 7, 0]
