"""Paged attention and KV writes for JAX: one meaning, several implementations."""

from pallas_kernels.device import DeviceKind, device_kind
from pallas_kernels.dispatch import (
    IMPLEMENTATIONS,
    Choice,
    available_implementations,
    choose_implementation,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.kv_write import write_kv
from pallas_kernels.limits import AttentionSizes
from pallas_kernels.paged_attention import paged_decode, paged_prefill
from pallas_kernels.pages import KV_DTYPES, KVDtype, KVPages, init_pages, read_kv

__all__ = [
    "IMPLEMENTATIONS",
    "KV_DTYPES",
    "AttentionSizes",
    "Choice",
    "DeviceKind",
    "KVDtype",
    "KVPages",
    "UnsupportedError",
    "available_implementations",
    "choose_implementation",
    "device_kind",
    "init_pages",
    "paged_decode",
    "paged_prefill",
    "read_kv",
    "write_kv",
]
