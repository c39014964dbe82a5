"""The prefix index: which blocks already hold the KV of a given start of a prompt.

A block is known by its own tokens and by everything before it. So an entry names its parent entry,
and the salt stands where the first block's parent would. The hash of an entry only narrows the
search: a hit is confirmed by the tokens and by the identity of the parent.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    block_id: int
    key: int
    depth: int
    num_uses: int = 0


class PrefixIndex:
    """Finds the blocks of the longest known start of a prompt. Plain data: it pickles.

    Only full blocks whose KV is written may be registered. The index holds no references: the owner
    keeps the blocks (`mark_cached`) and calls `drop` before a block is recycled.

    Args:
        block_size: Tokens of a block.
        key_function: Hash of a byte string; any function is correct, a good one is fast.
    """

    def __init__(self, block_size: int, key_function: KeyFunction = blake2_key):
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: a block holds at least one token")
        self.block_size = block_size
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
    ) -> list[int]:
        """Return the blocks that hold the longest known start of `token_ids`; changes nothing.

        Args:
            token_ids: int [n], a sequence or an array.
            salt: Only entries registered with the same salt match; None is not the empty salt.
            limit_tokens: Use at most so many tokens; `len - 1` leaves one to compute. Whole blocks
                only, so the hit may be shorter.
        """
        tokens = _token_bytes(token_ids)
        width = self.block_size * _TOKEN_BYTES
        limit = len(tokens) if limit_tokens is None else limit_tokens * _TOKEN_BYTES
        parent: int | bytes = _root(salt)
        parent_key = self._key_function(parent)
        blocks = []
        for start in range(0, min(limit, len(tokens)) - width + 1, width):
            part = tokens[start : start + width]
            key = self._key_function(_key_data(parent_key, part))
            entry = self._find(key, parent, part)
            if entry is None:
                break
            blocks.append(entry.block_id)
            parent, parent_key = entry.entry_id, key
        return blocks

    def register(
        self,
        parent: int | None,
        token_ids: Any,
        block_id: int,
        salt: Salt = None,
    ) -> int | None:
        """Make a full block findable; returns the entry to pass as the parent of the next block.

        If the same content is known under another block, that entry is returned and `block_id` is
        not registered (`block_of` tells which block it was): the caller keeps its block for itself.

        Args:
            parent: Entry of the block before (from `register` or `entry_of`), None for the first.
            token_ids: int [block_size]. The block's own tokens.
            block_id: The block that holds them.
            salt: Counts for the first block; the others inherit it from their parent.

        Returns:
            The entry, or None if the parent is gone: nothing after it could ever be found.

        Raises:
            InvariantError: The block is registered with other content, or is not full.
        """
        tokens = _token_bytes(token_ids)
        if len(tokens) != self.block_size * _TOKEN_BYTES:
            raise InvariantError(
                f"block {block_id}: registered with {len(tokens) // _TOKEN_BYTES} tokens; only a "
                f"full block of {self.block_size} can be found again"
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
        known = self._find(key, place, tokens)
        if known is not None:
            return known.entry_id
        if block_id in self._by_block:
            raise InvariantError(
                f"block {block_id}: registered again with other content; drop it first"
            )
        entry = _Entry(self._next_id, place, tokens, int(block_id), key, depth)
        self._next_id += 1
        self._by_key.setdefault(key, []).append(entry)
        self._by_block[entry.block_id] = entry
        self._by_id[entry.entry_id] = entry
        return entry.entry_id

    def drop(self, block_id: int) -> None:
        """Forget a block; does nothing if it isn't registered.

        What was registered below it can never match again: entries name their parent by an id that
        is used once, not by its block.
        """
        entry = self._by_block.pop(block_id, None)
        if entry is None:
            return
        del self._by_id[entry.entry_id]
        same_key = self._by_key[entry.key]
        same_key.remove(entry)
        if not same_key:
            del self._by_key[entry.key]

    def entry_of(self, block_id: int) -> int | None:
        """Return the entry under which a block is registered, None if it isn't."""
        entry = self._by_block.get(block_id)
        return None if entry is None else entry.entry_id

    def block_of(self, entry_id: int) -> int | None:
        """Return the block of an entry, None if it was dropped."""
        entry = self._by_id.get(entry_id)
        return None if entry is None else entry.block_id

    def depth_of(self, block_id: int) -> int:
        """Return how many blocks come before this one in its prompt.

        Raises:
            KeyError: The block isn't registered.
        """
        return self._by_block[block_id].depth

    def count_use(self, block_ids: Sequence[int]) -> None:
        """Note that a prompt is served from these blocks.

        Raises:
            KeyError: A block isn't registered.
        """
        for block_id in block_ids:
            self._by_block[block_id].num_uses += 1

    def uses_of(self, block_id: int) -> int:
        """Return how often a prompt was served from this block.

        Raises:
            KeyError: The block isn't registered.
        """
        return self._by_block[block_id].num_uses

    def block_ids(self) -> list[int]:
        """Return all registered blocks, oldest registration first."""
        return list(self._by_block)

    def _find(self, key: int, parent: int | bytes, tokens: bytes) -> _Entry | None:
        for entry in self._by_key.get(key, ()):
            if entry.parent == parent and entry.tokens == tokens:
                return entry
        return None


_TOKEN_BYTES = 8


def _token_bytes(token_ids: Sequence[int] | np.ndarray) -> bytes:
    # Full width: a narrower type would make two long vocabularies' tokens look alike.
    return np.ascontiguousarray(token_ids, np.int64).tobytes()


def _root(salt: Salt) -> bytes:
    # JSON tells an absent salt from an empty one, and one part's name from another's.
    return b"salt:" + json.dumps(salt, sort_keys=True).encode()


def _key_data(parent_key: int, tokens: bytes) -> bytes:
    return b"parent:" + parent_key.to_bytes(8, "little") + b"tokens:" + tokens
