"""Requests that can never be served, and why."""

from paxkv.engine.state import SchedulerState
from paxkv.workload.request import Request


def why_refused(state: SchedulerState, request: Request, max_total_tokens: int) -> str:
    """Return why a request can never be served, with the numbers; an empty string if it can.

    Args:
        state: Only read.
        request: As submitted.
        max_total_tokens: Prompt and output tokens at its limit.
    """
    config, prompt_len = state.config, len(request.prompt_token_ids)
    if request.request_id in state.sequences:
        return f"request_id={request.request_id}: a request with this id is still unfinished"
    if prompt_len == 0:
        return "the prompt is empty; at least one token is needed"
    if request.max_tokens < 1:
        return f"max_tokens={request.max_tokens}: at least 1 is needed"
    if max(request.prompt_token_ids) >= config.vocab_size or min(request.prompt_token_ids) < 0:
        return f"a prompt token lies outside the vocabulary of {config.vocab_size}"
    if prompt_len >= config.max_model_len:
        return (
            f"prompt of {prompt_len} tokens: with one output token it passes "
            f"engine.max_model_len={config.max_model_len}"
        )
    leader = state.sequences.get(request.fork_of or "")
    if leader is not None:
        for name in ("prompt_token_ids", "tenant"):
            if getattr(leader.request, name) != getattr(request, name):
                return f"fork_of={request.fork_of}: a fork has the {name} of what it forks from"
    return _why_too_large(state, request, max_total_tokens)


def _why_too_large(state: SchedulerState, request: Request, max_total_tokens: int) -> str:
    config, prompt_len = state.config, len(request.prompt_token_ids)
    blocks = config.most_blocks(prompt_len, max_total_tokens)
    asked = f"prompt of {prompt_len} and up to {max_total_tokens - prompt_len} output tokens"
    if blocks > config.num_blocks:
        return (
            f"{asked} take {blocks} blocks: the pool holds "
            f"{config.num_blocks * config.block_size} tokens ({config.num_blocks} blocks of "
            f"{config.block_size}); raise cache.num_blocks or lower max_tokens"
        )
    most = state.accounts.most_for_one(request.tenant)
    if blocks > most:
        return (
            f"{asked} take {blocks} blocks: tenant {request.tenant!r} can be sure of {most} for a "
            "request, by its limit and by what is reserved for others; raise its limit or lower "
            "max_tokens"
        )
    return ""
