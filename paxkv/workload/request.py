"""What a user asks for: one prompt, its limits, and when it arrives."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a workload.

    Attributes:
        request_id: Unique within a run.
        prompt_token_ids: The prompt, at least one token.
        max_tokens: Most output tokens, at least 1.
        arrival_s: Seconds after the start of the run.
        priority: Lower is more urgent, as in vLLM.
        tenant: Who asks; "default" where a workload does not say.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1]; 1 keeps the whole vocabulary.
        seed: Seed of this request's own random stream, whoever shares the batch.
        ignore_eos: Run to `max_tokens` even past an end token.
        fork_of: Id of the request with the same prompt whose cache this one shares once the prompt
            is computed: further samples of one prompt. None for a request of its own.
        prompt_text: The prompt as text, for the records; empty where it is not known.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    priority: int = 0
    tenant: str = "default"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    fork_of: str | None = None
    prompt_text: str = ""
