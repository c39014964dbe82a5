"""Views made by hand: only what a test is about is given."""

from collections.abc import Callable

import pytest

from paxkv.policies.admission import AdmissionNeed
from paxkv.policies.view import HostView, PoolView, QueuedRequest, RequestView


@pytest.fixture(scope="session")
def running() -> Callable[..., RequestView]:
    """Make the view of a running request: 14 of its 15 tokens cached, 40 at its limit."""

    def make(order: int = 0, **changes) -> RequestView:
        fields = {
            "request_id": str(order),
            "order": order,
            "tenant": "default",
            "priority": 0,
            "arrival_s": float(order),
            "prompt_len": 10,
            "output_len": 5,
            "context_len": 14,
            "num_tokens": 15,
            "max_total_tokens": 40,
            "num_blocks": 4,
            "filled_blocks": 4,
            "exclusive_blocks": 4,
            "num_preemptions": 0,
        }
        return RequestView(**fields | changes)

    return make


@pytest.fixture(scope="session")
def waiting() -> Callable[..., QueuedRequest]:
    """Make the view of a waiting request."""

    def make(name: str = "a", **changes) -> QueuedRequest:
        fields = {
            "request_id": name,
            "tenant": "default",
            "priority": 0,
            "arrival_s": 0.0,
            "prompt_len": 10,
            "max_tokens": 10,
        }
        return QueuedRequest(**fields | changes)

    return make


@pytest.fixture(scope="session")
def pool() -> Callable[..., PoolView]:
    """Make the view of a pool of 100 blocks of 16 tokens, in which something runs."""

    def make(available: int = 100, **changes) -> PoolView:
        fields = {
            "num_blocks": 100,
            "available_blocks": available,
            "promisable_blocks": available,
            "num_running": 1,
            "block_size": 16,
        }
        return PoolView(**fields | changes)

    return make


@pytest.fixture(scope="session")
def need() -> Callable[..., AdmissionNeed]:
    """Make what a request needs: nothing but what is given."""

    def make(**changes) -> AdmissionNeed:
        fields = dict.fromkeys(AdmissionNeed.__dataclass_fields__, 0)
        return AdmissionNeed(**fields | changes)

    return make


@pytest.fixture(scope="session")
def host() -> Callable[..., HostView]:
    """Make the view of host memory: 4 blocks of 100 bytes free, and speeds as given."""

    def make(copy: float | None = None, prefill: float | None = None, **changes) -> HostView:
        fields = {
            "free_blocks": 4,
            "bytes_per_block": 100,
            "copy_bytes_per_s": copy,
            "prefill_tokens_per_s": prefill,
            "num_others": 0,
        }
        return HostView(**fields | changes)

    return make
