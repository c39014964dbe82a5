"""The one formula for the bytes and blocks of a KV cache.

Sizing, admission, the simulator and the planner all use these functions, so that what is planned is
what is allocated.
"""

from dataclasses import dataclass
from typing import overload

import ml_dtypes
import numpy as np

from pallas_kernels import KV_DTYPES
from pallas_kernels.pages import SCALE_BYTES
from paxkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What a block holds: `block_size` tokens of K and V for all layers, with the scales they need.

    Attributes:
        num_layers: Places for layers in a block.
        kv_dtype: Storage type by name, a key of `pallas_kernels.KV_DTYPES`.
        scaled: Whether a quantised type carries one float32 scale a token, head and layer, for K
            and for V; without them scales are static and take no room in the pool.
        plain_places: Places whose layers are stored in `plain_dtype` instead, ascending.
        plain_dtype: Storage type of those; None where there are none.
        open_dtype: Where keys are quantised per channel: one float32 scale a block, layer, head and
            dimension for K instead, and the type in which the keys of blocks that are not full yet
            are kept outside of them. None where they are not.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str
    scaled: bool = True
    plain_places: tuple[int, ...] = ()
    plain_dtype: str | None = None
    open_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: a KV cache needs at least 1.")
        for name in {self.kv_dtype, self.plain_dtype, self.open_dtype} - {None}:
            if name not in KV_DTYPES:
                raise ConfigError(
                    f"kv_dtype={name!r}: K and V are stored in {', '.join(KV_DTYPES)}"
                )
        if KV_DTYPES[self.kv_dtype].packed and self.head_dim % 2:
            raise ConfigError(
                f"kv={self.kv_dtype}: two codes share a byte, and the model's head_dim="
                f"{self.head_dim} is odd. Try kv=int8."
            )
        places = self.plain_places
        if list(places) != sorted({*places} & {*range(self.num_layers)}):
            raise ConfigError(f"plain_places={places}: not ascending places of {self.num_layers}.")
        if len(places) == self.num_layers or bool(places) == (self.plain_dtype is None):
            raise ConfigError(
                f"plain_places={places}, plain_dtype={self.plain_dtype}: some places but not all, "
                "with their dtype; or neither."
            )
        if self.open_dtype is not None and (not self.quantised or not self.scaled or places):
            raise ConfigError(
                f"open_dtype={self.open_dtype}: keys per channel are codes with scales in the "
                "pool, in all places."
            )

    @property
    def quantised(self) -> bool:
        """Whether the storage type needs scales."""
        return KV_DTYPES[self.kv_dtype].quantised

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of a full block takes in all layers, K and V, scales included.

        Rounded up where tokens share scales.
        """
        return -(-self.bytes_per_block // self.block_size)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        layers = (self.num_layers - len(self.plain_places)) * self._coded_bytes
        if self.plain_dtype is not None:
            plain = KV_DTYPES[self.plain_dtype].token_bytes(self.head_dim)
            layers += len(self.plain_places) * self.block_size * plain
        return self.num_kv_heads * layers

    def open_bytes(self, *, num_rows: int, num_groups: int) -> int:
        """Return the bytes outside of blocks: the keys of each row's open block in each group."""
        if self.open_dtype is None:
            return 0
        keys = self.num_layers * self.num_kv_heads * self.block_size * self.head_dim
        return num_rows * num_groups * keys * storage_dtype(self.open_dtype).itemsize

    @property
    def _coded_bytes(self) -> int:
        """Bytes of a block's codes and scales in one layer and head."""
        storage, size = KV_DTYPES[self.kv_dtype], self.block_size
        if self.open_dtype is None:
            return size * storage.token_bytes(self.head_dim, scaled=self.scaled)
        scales = self.head_dim + size  # of keys by dimension, of values by token
        return size * storage.token_bytes(self.head_dim, scaled=False) + SCALE_BYTES * scales


def storage_dtype(name: str) -> np.dtype:
    """Return the dtype of a name that NumPy or ml_dtypes knows.

    Raises:
        ConfigError: Neither knows it.
    """
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ConfigError(f"kv_dtype={name!r}: not the name of a number type.") from None


@overload
def blocks_needed(num_tokens: int, block_size: int) -> int: ...
@overload
def blocks_needed(num_tokens: np.ndarray, block_size: int) -> np.ndarray: ...
def blocks_needed(num_tokens: int | np.ndarray, block_size: int) -> int | np.ndarray:
    """Return the blocks that hold so many tokens: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


def blocks_in_budget(budget_bytes: int, layout: KVLayout) -> int:
    """Return how many whole blocks fit into so many bytes."""
    return max(0, int(budget_bytes)) // layout.bytes_per_block


def pool_bytes(num_blocks: int, layout: KVLayout) -> int:
    """Return the bytes of a pool: what `paxkv.cache.mixed.init_cache` allocates."""
    return num_blocks * layout.bytes_per_block


def gib(num_bytes: float) -> str:
    """Return a size for people, in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"
