"""Paged attention and KV writes for JAX: one meaning, several implementations."""

from pallas_kernels.dispatch import Choice, available_implementations, choose_implementation
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_decode, paged_prefill
from pallas_kernels.pages import KV_DTYPES, KVDtype, KVPages, init_pages, read_kv

__all__ = [
    "KV_DTYPES",
    "Choice",
    "KVDtype",
    "KVPages",
    "UnsupportedError",
    "available_implementations",
    "choose_implementation",
    "init_pages",
    "paged_decode",
    "paged_prefill",
    "read_kv",
    "write_kv",
]
