"""The one formula for the bytes and blocks of a KV cache.

Sizing, admission, the simulator and the planner all use these functions, so that what is planned is
what is allocated.
"""

from dataclasses import dataclass
from typing import overload

import ml_dtypes
import numpy as np

from paxkv.errors import ConfigError

SCALE_BYTES = 4  # float32


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What a block holds: `block_size` tokens of K and V for all layers, with the scales they need.

    Attributes:
        kv_dtype: Storage type by name: float32, float16, bfloat16, int8, float8_e4m3fn or
            float8_e5m2. The 8-bit types carry one float32 scale a token, head and layer, for K
            and for V.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: a KV cache needs at least 1.")
        storage_dtype(self.kv_dtype)

    @property
    def quantised(self) -> bool:
        """Whether the storage type needs scales."""
        return storage_dtype(self.kv_dtype).itemsize == 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, K and V, scales included."""
        per_head = self.head_dim * storage_dtype(self.kv_dtype).itemsize
        per_head += SCALE_BYTES if self.quantised else 0
        return 2 * self.num_layers * self.num_kv_heads * per_head

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.bytes_per_token


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


def capacity_tokens(num_blocks: int, layout: KVLayout) -> int:
    """Return how many tokens a pool of so many blocks holds."""
    return num_blocks * layout.block_size


def pool_bytes(num_blocks: int, layout: KVLayout) -> int:
    """Return the bytes of a pool: what `pallas_kernels.init_pages` allocates."""
    return num_blocks * layout.bytes_per_block


def check_capacity(num_blocks: int, layout: KVLayout, *, max_model_len: int) -> None:
    """Refuse a pool that cannot hold one request of the longest allowed length.

    Raises:
        ConfigError: With both numbers, the largest length that fits, and what to change.
    """
    tokens = capacity_tokens(num_blocks, layout)
    if tokens >= max_model_len:
        return
    needed = blocks_needed(max_model_len, layout.block_size)
    lower = f"engine.max_model_len={tokens} or " if tokens else ""
    raise ConfigError(
        f"cache: the pool holds {tokens} tokens ({num_blocks} blocks of {layout.block_size}, "
        f"{gib(pool_bytes(num_blocks, layout))}), less than engine.max_model_len={max_model_len}, "
        f"which needs {needed} blocks ({gib(pool_bytes(needed, layout))}). The largest length that "
        f"fits is {tokens}. Try {lower}cache.num_blocks={needed}."
    )


def gib(num_bytes: float) -> str:
    """Return a size for people, in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"
