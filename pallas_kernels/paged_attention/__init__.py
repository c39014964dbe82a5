"""Attention over a paged KV pool: decode (one query a row) and prefill (a causal chunk a row)."""

from pallas_kernels.paged_attention.api import paged_decode, paged_prefill

__all__ = ["paged_decode", "paged_prefill"]
