"""paxkv: a laboratory for KV-cache memory in LLM serving."""

__version__ = "0.1.0"
