"""The prefix index: which blocks already hold the KV of a given start of a prompt.

An entry is `block_size` tokens with everything before them: it names its parent entry, and the salt
stands where the first entry's parent would. The hash of an entry only narrows the search: a hit is
confirmed by the tokens and by the identity of the parent. Each group of layers may have a block
with the KV of an entry; where a group only sees a window, a hit needs none of its older blocks.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paxkv.blocks.pool import INVALID
from paxkv.cache.groups import LayerGroup
from paxkv.errors import InvariantError

type Salt = str | Mapping[str, str] | None
"""What must be equal besides the tokens; give parts of different meaning names: {"tenant": "a"}."""

type KeyFunction = Callable[[bytes], int]


def blake2_key(data: bytes) -> int:
    """Return a 64-bit key that is the same in every process, so that an index can be pickled."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@dataclass(slots=True, eq=False)
class _Entry:
    entry_id: int
    parent: int | bytes  # the parent's entry_id, or the tagged salt
    tokens: bytes
    block_ids: list[int]  # one a group, INVALID where the group has none
    key: int
    depth: int
    num_children: int = 0
    num_uses: int = 0


_ONE_FULL_GROUP = (LayerGroup((0,)),)


class PrefixIndex:
    """Finds the blocks of the longest known start of a prompt. Plain data: it pickles.

    Only full blocks whose KV is written may be registered. The index holds no references: the owner
    keeps the blocks (`mark_cached`) and calls `drop` before a block is recycled.

    Args:
        block_size: Tokens of a block.
        groups: The groups of layers; each has blocks of its own.
        key_function: Hash of a byte string; any function is correct, a good one is fast.
    """

    def __init__(
        self,
        block_size: int,
        groups: Sequence[LayerGroup] = _ONE_FULL_GROUP,
        key_function: KeyFunction = blake2_key,
    ):
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: a block holds at least one token")
        self.block_size = block_size
        self.groups = tuple(groups)
        self._key_function = key_function
        self._by_key: dict[int, list[_Entry]] = {}
        self._by_block: dict[int, _Entry] = {}
        self._by_id: dict[int, _Entry] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def match(
        self, token_ids: Any, salt: Salt = None, limit_tokens: int | None = None
    ) -> np.ndarray:
        """Return the blocks that hold the longest known start of `token_ids`; changes nothing.

        Args:
            token_ids: int [n], a sequence or an array.
            salt: Only entries registered with the same salt match; None is not the empty salt.
            limit_tokens: Use at most so many tokens; `len - 1` leaves one to compute. Whole blocks
                only, so the hit may be shorter.

        Returns:
            int32 [group, block], the same length for all groups; INVALID where a group's tokens
            after the hit see nothing of the block.
        """
        known = self._known_start(_token_bytes(token_ids), salt, limit_tokens)
        table = np.array([entry.block_ids for entry in known], np.int32).reshape(
            len(known), len(self.groups)
        )
        for length in range(len(known), 0, -1):
            hit = self._needed(table[:length].T.copy())
            if hit is not None:
                return hit
        return np.zeros((len(self.groups), 0), np.int32)

    def register(
        self,
        parent: int | None,
        token_ids: Any,
        block_ids: Sequence[int],
        salt: Salt = None,
    ) -> int | None:
        """Make full blocks findable; returns the entry to pass as the parent of the next ones.

        If a group already has a block with the same content, that one stays and the group's new
        block is not registered: the caller keeps it for itself.

        Args:
            parent: Entry of the blocks before (from `register` or `entry_of`), None for the first.
            token_ids: int [block_size]. The blocks' own tokens.
            block_ids: The block of each group that holds their KV.
            salt: Counts for the first block; the others inherit it from their parent.

        Returns:
            The entry, or None if the parent is gone: nothing after it could ever be found.

        Raises:
            InvariantError: A block is registered with other content, or is not full.
        """
        tokens = _token_bytes(token_ids)
        if len(tokens) != self.block_size * _TOKEN_BYTES:
            raise InvariantError(
                f"blocks {list(block_ids)}: registered with {len(tokens) // _TOKEN_BYTES} tokens; "
                f"only a full block of {self.block_size} can be found again"
            )
        if parent is None:
            place: int | bytes = _root(salt)
            parent_key, depth = self._key_function(place), 0
        else:
            above = self._by_id.get(parent)
            if above is None:
                return None
            place, parent_key, depth = parent, above.key, above.depth + 1
        key = self._key_function(_key_data(parent_key, tokens))
        entry = self._find(key, place, tokens)
        if entry is None:
            entry = self._add(place, tokens, key, depth)
        for group, block_id in enumerate(block_ids):
            if entry.block_ids[group] != INVALID:
                continue
            if block_id in self._by_block:
                self._prune(entry)
                raise InvariantError(
                    f"block {block_id}: registered again with other content; drop it first"
                )
            entry.block_ids[group] = int(block_id)
            self._by_block[int(block_id)] = entry
        return entry.entry_id

    def drop(self, block_id: int) -> None:
        """Forget a block; does nothing if it isn't registered.

        What comes after it in its prompt is found again once a block with its content is
        registered: entries are known by their tokens, not by their blocks.
        """
        entry = self._by_block.pop(block_id, None)
        if entry is None:
            return
        entry.block_ids[entry.block_ids.index(block_id)] = INVALID
        self._prune(entry)

    def entry_of(self, block_id: int) -> int | None:
        """Return the entry under which a block is registered, None if it isn't."""
        entry = self._by_block.get(block_id)
        return None if entry is None else entry.entry_id

    def blocks_of(self, entry_id: int) -> tuple[int, ...]:
        """Return the block of each group of an entry, INVALID where it has none.

        Raises:
            KeyError: The entry is gone.
        """
        return tuple(self._by_id[entry_id].block_ids)

    def depth_of(self, block_id: int) -> int:
        """Return how many blocks come before this one in its prompt.

        Raises:
            KeyError: The block isn't registered.
        """
        return self._by_block[block_id].depth

    def count_use(self, block_ids: Sequence[int]) -> None:
        """Note that one prompt is served from these blocks, of however many groups they are.

        Raises:
            KeyError: A block isn't registered.
        """
        for entry in {self._by_block[block_id] for block_id in block_ids}:
            entry.num_uses += 1

    def uses_of(self, block_id: int) -> int:
        """Return how often a prompt was served from this block.

        Raises:
            KeyError: The block isn't registered.
        """
        return self._by_block[block_id].num_uses

    def block_ids(self) -> list[int]:
        """Return all registered blocks, oldest registration first."""
        return list(self._by_block)

    def _known_start(self, tokens: bytes, salt: Salt, limit_tokens: int | None) -> list[_Entry]:
        """Return the entries of the longest known start, whichever groups have their blocks."""
        width = self.block_size * _TOKEN_BYTES
        limit = len(tokens) if limit_tokens is None else limit_tokens * _TOKEN_BYTES
        parent: int | bytes = _root(salt)
        parent_key = self._key_function(parent)
        known = []
        for start in range(0, min(limit, len(tokens)) - width + 1, width):
            part = tokens[start : start + width]
            key = self._key_function(_key_data(parent_key, part))
            entry = self._find(key, parent, part)
            if entry is None:
                break
            known.append(entry)
            parent, parent_key = entry.entry_id, key
        return known

    def _needed(self, table: np.ndarray) -> np.ndarray | None:
        """Return the blocks `[group, block]` that a hit of this length needs, or None if one lacks.

        Changes `table`.
        """
        length = table.shape[1]
        for row, group in zip(table, self.groups, strict=True):
            first = group.first_live_block(length * self.block_size, self.block_size)
            row[group.sink_blocks(self.block_size) : first] = INVALID
            needed = length - max(int(first) - group.sink_blocks(self.block_size), 0)
            if np.count_nonzero(row != INVALID) < needed:
                return None
        return table

    def _find(self, key: int, parent: int | bytes, tokens: bytes) -> _Entry | None:
        for entry in self._by_key.get(key, ()):
            if entry.parent == parent and entry.tokens == tokens:
                return entry
        return None

    def _add(self, parent: int | bytes, tokens: bytes, key: int, depth: int) -> _Entry:
        blocks = [INVALID] * len(self.groups)
        entry = _Entry(self._next_id, parent, tokens, blocks, key, depth)
        self._next_id += 1
        self._by_key.setdefault(key, []).append(entry)
        self._by_id[entry.entry_id] = entry
        if isinstance(parent, int):
            self._by_id[parent].num_children += 1
        return entry

    def _prune(self, entry: _Entry) -> None:
        """Forget an entry that has neither a block nor a child, and so its parents."""
        while not entry.num_children and all(block == INVALID for block in entry.block_ids):
            del self._by_id[entry.entry_id]
            same_key = self._by_key[entry.key]
            same_key.remove(entry)
            if not same_key:
                del self._by_key[entry.key]
            if not isinstance(entry.parent, int):
                return
            entry = self._by_id[entry.parent]
            entry.num_children -= 1


_TOKEN_BYTES = 8


def _token_bytes(token_ids: Sequence[int] | np.ndarray) -> bytes:
    # Full width: a narrower type would make two long vocabularies' tokens look alike.
    return np.ascontiguousarray(token_ids, np.int64).tobytes()


def _root(salt: Salt) -> bytes:
    # JSON tells an absent salt from an empty one, and one part's name from another's.
    return b"salt:" + json.dumps(salt, sort_keys=True).encode()


def _key_data(parent_key: int, tokens: bytes) -> bytes:
    return b"parent:" + parent_key.to_bytes(8, "little") + b"tokens:" + tokens
