"""The prefix index finds what was registered, and nothing else."""

import pickle
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.blocks.prefix import PrefixIndex, blake2_key
from paxkv.cache.groups import LayerGroup, Span
from paxkv.errors import InvariantError


def all_collide(data: bytes) -> int:
    return 0


def two_bits(data: bytes) -> int:
    return blake2_key(data) % 4


def hits(index, *args, **kwargs):
    (blocks,) = index.match(*args, **kwargs).tolist()
    return blocks


def register(index, tokens, block_ids, salt=None):
    """Register all full blocks of a sequence; return the entries."""
    entries, parent = [], None
    for place, block_id in enumerate(block_ids):
        part = tokens[place * index.block_size : (place + 1) * index.block_size]
        parent = index.register(parent, part, [block_id], salt)
        entries.append(parent)
    return entries


@pytest.fixture(params=[blake2_key, all_collide])
def index(request):
    return PrefixIndex(4, key_function=request.param)


def test_finds_the_longest_registered_start(index):
    register(index, list(range(12)), [5, 3, 8])
    assert hits(index, range(12)) == [5, 3, 8]
    assert hits(index, range(11)) == [5, 3]
    assert hits(index, [*range(8), 99, 9, 10, 11]) == [5, 3]
    assert hits(index, [99, *range(1, 12)]) == []
    assert hits(index, []) == []
    assert hits(index, range(3)) == []
    assert len(index) == 3
    assert 3 in index and 4 not in index


def test_another_prompt_of_equal_hash_does_not_match():
    index = PrefixIndex(4, key_function=all_collide)
    register(index, list(range(1, 9)), [0, 1])
    assert hits(index, range(11, 19)) == []
    register(index, list(range(11, 19)), [2, 3])
    assert hits(index, range(11, 19)) == [2, 3]
    assert hits(index, range(1, 9)) == [0, 1]


def test_equal_blocks_under_different_parents_are_different(index):
    register(index, [1, 1, 1, 1, 7, 7, 7, 7], [0, 1])
    register(index, [2, 2, 2, 2, 7, 7, 7, 7], [2, 3])
    assert hits(index, [1, 1, 1, 1, 7, 7, 7, 7]) == [0, 1]
    assert hits(index, [2, 2, 2, 2, 7, 7, 7, 7]) == [2, 3]
    assert hits(index, [7, 7, 7, 7]) == []


SALTS = [
    None,
    "",
    "alpha",
    "null",
    {"adapter": "alpha"},
    {"tenant": "alpha"},
    {"adapter": "", "tenant": "alpha"},
    {"adapter": "alpha", "tenant": ""},
    '{"tenant": "alpha"}',
]


@pytest.mark.parametrize("key_function", [blake2_key, all_collide])
def test_each_salt_has_entries_of_its_own(key_function):
    index = PrefixIndex(2, key_function=key_function)
    for block_id, salt in enumerate(SALTS):
        assert hits(index, [1, 2], salt) == []
        index.register(None, [1, 2], [block_id], salt)
    for block_id, salt in enumerate(SALTS):
        assert hits(index, [1, 2], salt) == [block_id]


def test_the_order_of_a_salts_parts_does_not_matter(index):
    index.register(None, range(4), [0], {"a": "1", "b": "2"})
    assert hits(index, range(4), {"b": "2", "a": "1"}) == [0]


@pytest.mark.parametrize("bit", [0, 7, 8, 15, 16, 31, 32, 40, 62])
def test_every_bit_of_a_token_counts(bit):
    index = PrefixIndex(1)
    index.register(None, [0], [0])
    assert hits(index, [1 << bit]) == []


@pytest.mark.parametrize(
    ("prompt", "limit", "blocks"), [(8, 7, 1), (8, 8, 2), (9, 8, 2), (4, 3, 0), (0, -1, 0)]
)
def test_limit_leaves_tokens_to_compute(index, prompt, limit, blocks):
    register(index, list(range(8)), [0, 1])
    assert len(hits(index, range(prompt), limit_tokens=limit)) == blocks


def test_a_recycled_block_is_not_found(index):
    # Prompt A fills blocks 0 to 2 and ends, prompt B takes block 2, A comes again.
    register(index, list(range(12)), [0, 1, 2])
    index.drop(2)
    register(index, [50, 51, 52, 53], [2])
    assert hits(index, range(12)) == [0, 1]
    assert hits(index, [50, 51, 52, 53]) == [2]


def test_children_of_a_dropped_parent_are_found_below_the_same_content_only(index):
    register(index, list(range(8)), [0, 1])
    index.drop(0)
    assert hits(index, range(8)) == []
    # The same block with other content must not adopt them ...
    register(index, [90, 91, 92, 93], [0])
    assert hits(index, [90, 91, 92, 93, 4, 5, 6, 7]) == [0]
    # ... but the same content anew, in another block, leads to them again.
    register(index, list(range(4)), [5])
    assert hits(index, range(8)) == [5, 1]
    index.drop(1)
    assert hits(index, range(8)) == [5]


def test_nothing_is_kept_of_entries_without_blocks(index):
    register(index, list(range(12)), [0, 1, 2])
    register(index, [*range(4), 50, 51, 52, 53], [0, 3])
    for block_id in (0, 1, 3, 2):
        index.drop(block_id)
    assert len(index) == 0
    assert not index._by_id and not index._by_key


WINDOW = LayerGroup((1,), Span(6))
SINKS = LayerGroup((2,), Span(4, 1))


def test_a_hit_needs_the_blocks_of_every_group():
    index = PrefixIndex(4, (LayerGroup((0,)), WINDOW))
    parent = None
    for place in range(4):
        parent = index.register(parent, range(4 * place, 4 * place + 4), [place, 10 + place])
    # The token at position 16 sees 11 to 16 in the windowed group: blocks 2 and 3.
    assert index.match(range(17)).tolist() == [[0, 1, 2, 3], [-1, -1, 12, 13]]
    index.drop(11)
    assert index.match(range(17)).tolist() == [[0, 1, 2, 3], [-1, -1, 12, 13]]
    index.drop(12)  # now 16 and 12 tokens lack it, 8 lack block 11, and 4 need none but 10
    assert index.match(range(17)).tolist() == [[0], [10]]
    index.drop(0)
    assert index.match(range(17)).tolist() == [[], []]
    # What the windowed group lost is filled in when it is computed again.
    parent = index.register(None, range(4), [5, 15])
    assert index.blocks_of(parent) == (5, 10)
    assert 15 not in index


def test_sink_blocks_are_needed_whatever_the_window():
    index = PrefixIndex(4, (SINKS,))
    parent = None
    for place in range(4):
        parent = index.register(parent, range(4 * place, 4 * place + 4), [place])
    assert index.match(range(17)).tolist() == [[0, -1, -1, 3]]
    index.drop(0)
    assert index.match(range(17)).tolist() == [[]]


def test_known_content_keeps_its_first_block(index):
    first = register(index, list(range(8)), [0, 1])
    second = register(index, list(range(8)), [2, 3])
    assert second == first
    assert [index.blocks_of(entry) for entry in second] == [(0,), (1,)]
    assert 2 not in index and 3 not in index
    # What follows hangs below the first, so the second request's own tail is found too.
    index.register(second[-1], [8, 9, 10, 11], [4])
    assert hits(index, range(12)) == [0, 1, 4]


def test_registering_below_a_dropped_parent_is_refused_quietly(index):
    (entry,) = register(index, list(range(4)), [0])
    index.drop(0)
    assert index.register(entry, [4, 5, 6, 7], [1]) is None
    assert 1 not in index
    with pytest.raises(KeyError):
        index.blocks_of(entry)
    assert index.entry_of(0) is None


def test_registering_again_is_idempotent(index):
    assert register(index, list(range(8)), [0, 1]) == register(index, list(range(8)), [0, 1])
    assert len(index) == 2


def test_one_block_cannot_stand_for_two_contents(index):
    index.register(None, [0, 1, 2, 3], [0])
    with pytest.raises(InvariantError, match="block 0: registered again"):
        index.register(None, [9, 9, 9, 9], [0])


@pytest.mark.parametrize("length", [0, 3, 5, 8])
def test_only_full_blocks_are_registered(index, length):
    with pytest.raises(InvariantError, match=f"with {length} tokens; only a full block of 4"):
        index.register(None, range(length), [0])


def test_block_size_is_checked():
    with pytest.raises(ValueError, match="block_size=0"):
        PrefixIndex(0)


def test_dropping_an_unknown_block_does_nothing(index):
    index.drop(3)
    assert len(index) == 0


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda t: np.array(t, np.int32), lambda t: array("q", t)]
)
def test_tokens_come_in_any_form(index, kind):
    register(index, kind(list(range(8))), [0, 1])
    assert hits(index, np.arange(8)) == [0, 1]
    assert hits(index, kind(list(range(8)))) == [0, 1]


def test_pickles(index):
    entries = register(index, list(range(8)), [0, 1])
    other = pickle.loads(pickle.dumps(index))
    index.drop(1)
    assert hits(other, range(8)) == [0, 1]
    assert other.register(entries[-1], [8, 9, 10, 11], [5]) not in entries
    assert hits(other, range(12)) == [0, 1, 5]


def test_keys_do_not_depend_on_the_process():
    # `printf paxkv | b2sum -l 64`, read as a little-endian number
    assert blake2_key(b"paxkv") == 0xB5672DAC8A76B9EC


def test_uses_and_depth(index):
    register(index, list(range(8)), [6, 2])
    index.count_use([6, 2])
    index.count_use([6])
    assert [(index.uses_of(b), index.depth_of(b)) for b in (6, 2)] == [(2, 0), (1, 1)]
    assert index.block_ids() == [6, 2]
    index.drop(6)
    with pytest.raises(KeyError):
        index.uses_of(6)


# Few tokens and blocks of one or two, so that prompts meet often.
prompts = st.lists(st.integers(0, 1), max_size=6)
salts = st.sampled_from([None, "", "a"])
actions = st.lists(
    st.one_of(
        st.tuples(st.just("register"), prompts, salts),
        st.tuples(st.just("drop"), st.integers(0, 30), st.none()),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(actions, st.sampled_from([blake2_key, two_bits, all_collide]), st.integers(1, 2))
def test_agrees_with_a_table_of_whole_prefixes(actions, key_function, block_size):
    """The oracle knows each block by all tokens up to its end."""
    index = PrefixIndex(block_size, key_function=key_function)
    known: dict[tuple, int] = {}  # (salt, every token up to the block's end) -> block
    next_block = 0
    queries = []
    for action, value, salt in actions:
        if action == "register":
            queries.append((value, salt))
            parent = None
            for end in range(block_size, len(value) + 1, block_size):
                parent = index.register(parent, value[end - block_size : end], [next_block], salt)
                block = known.setdefault((salt, *value[:end]), next_block)
                assert index.blocks_of(parent) == (block,)
                next_block += block == next_block
        else:
            index.drop(value)
            for prefix in [prefix for prefix, block in known.items() if block == value]:
                del known[prefix]
        for prompt, salt in queries:
            expected = []
            for end in range(block_size, len(prompt) + 1, block_size):
                if (salt, *prompt[:end]) not in known:
                    break
                expected.append(known[salt, *prompt[:end]])
            assert hits(index, prompt, salt) == expected
    assert sorted(index.block_ids()) == sorted(known.values())


def test_a_prompt_counts_once_however_many_groups_serve_it():
    index = PrefixIndex(4, (LayerGroup((0,)), LayerGroup((1,), Span(5))))
    parent = index.register(None, range(4), [0, 1])
    index.register(parent, range(4, 8), [2, 3])
    for _ in range(2):
        hit = index.match(list(range(8)))
        assert hit.tolist() == [[0, 2], [-1, 3]]  # the window has left the first block behind
        index.count_use(hit[hit >= 0].tolist())
    assert [index.uses_of(block) for block in range(4)] == [2, 2, 2, 2]
