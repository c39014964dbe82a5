"""Write new keys and values into their pages, quantising on the way."""

from pallas_kernels.kv_write.api import write_kv

__all__ = ["write_kv"]
