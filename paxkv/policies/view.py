"""What policies see of the engine: frozen snapshots, never the state itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestView:
    """A request as a policy sees it.

    Attributes:
        order: Place in the order of submission, unique; a smaller one came earlier.
        context_len: Tokens in the cache.
        num_tokens: Prompt and generated tokens; those past `context_len` are still to compute.
        num_blocks: Blocks it holds on the device.
        exclusive_blocks: Those nobody else holds, which preempting it would make available.
        max_total_tokens: Prompt and generated tokens when it reaches its limit.
    """

    request_id: str
    order: int
    tenant: str
    priority: int
    arrival_s: float
    prompt_len: int
    output_len: int
    context_len: int
    num_tokens: int
    max_total_tokens: int
    num_blocks: int
    exclusive_blocks: int
    num_preemptions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """The device pool as a policy sees it.

    Attributes:
        num_blocks: Size of the pool.
        available_blocks: Free blocks and evictable cached ones.
        num_running: Requests that hold a row.
        block_size: Tokens a block.
    """

    num_blocks: int
    available_blocks: int
    num_running: int
    block_size: int
