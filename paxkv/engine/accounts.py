"""What each tenant holds, has been promised and has been served.

Who pays for a block: every tenant that holds it, each once, however many of its requests do. So a
tenant that gives back its last hold never leaves another with a block that nobody paid for, and
reservations that fit into the pool can always be claimed.
"""

from dataclasses import dataclass, field

import numpy as np

from paxkv.policies.tenancy import TenantTable, TenantTerms


@dataclass(slots=True, eq=False)
class Account:
    """One tenant.

    Attributes:
        held_blocks: Different blocks that its requests hold.
        cached_blocks: Evictable blocks that it held last.
        guaranteed_blocks: Sum of what its running requests have been promised.
        owed_blocks: The part of it that they do not hold yet.
        unfinished: Its requests that have not ended.
        service_tokens: Weighted tokens it has been served, divided by its weight.
        holds: int32 [block], how many of its requests hold each block; empty where nothing is
            accounted.
    """

    name: str
    terms: TenantTerms
    held_blocks: int = 0
    cached_blocks: int = 0
    guaranteed_blocks: int = 0
    owed_blocks: int = 0
    unfinished: int = 0
    service_tokens: float = 0.0
    holds: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def claimed_blocks(self) -> int:
        """Blocks it holds or has been promised."""
        return self.held_blocks + self.owed_blocks

    @property
    def is_borrowing(self) -> bool:
        """Whether it has more than its reservation."""
        return self.claimed_blocks > self.terms.reservation_blocks

    @property
    def protected_blocks(self) -> int:
        """Its cached blocks that others may not evict: those within its reservation."""
        return min(self.cached_blocks, max(self.terms.reservation_blocks - self.claimed_blocks, 0))

    @property
    def certain_blocks(self) -> int:
        """Blocks that nobody else can be promised."""
        return max(self.terms.reservation_blocks, self.guaranteed_blocks)


class Accounts:
    """The accounts of all tenants seen so far, and of those that have a reservation.

    Args:
        table: The tenants' terms; where it accounts nothing, only service is counted.
        num_blocks: Size of the pool.
    """

    def __init__(self, table: TenantTable, num_blocks: int):
        self._table = table
        self._num_blocks = num_blocks
        self.enabled = table.accounts
        self._accounts: dict[str, Account] = {}
        for name in table.names:
            self.of(name)

    def of(self, tenant: str) -> Account:
        """Return a tenant's account, a new one where it was not seen before."""
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._table.terms(tenant))
            if self.enabled:
                account.holds = np.zeros(self._num_blocks, np.int32)
            self._accounts[tenant] = account
        return account

    def all(self) -> list[Account]:
        """Return all accounts."""
        return list(self._accounts.values())

    @property
    def single(self) -> str | None:
        """The tenant, where there is only one so far."""
        return next(iter(self._accounts)) if len(self._accounts) == 1 else None

    def held_by_tenant(self) -> dict[str, int]:
        """Return what each tenant holds; empty where nothing is accounted."""
        return {a.name: a.held_blocks for a in self._accounts.values()} if self.enabled else {}

    def open(self, tenant: str) -> None:
        """Count a request that was submitted.

        A tenant that comes back starts level with the least served active one: it is not paid back
        for the time in which it asked for nothing.
        """
        account = self.of(tenant)
        if not account.unfinished:
            active = [a.service_tokens for a in self._accounts.values() if a.unfinished]
            account.service_tokens = max(account.service_tokens, min(active, default=0.0))
        account.unfinished += 1

    def hold(self, tenant: str, ids: np.ndarray) -> None:
        """Count one more hold on each block (no repeats)."""
        if self.enabled and len(ids):
            account = self.of(tenant)
            account.held_blocks += int(np.count_nonzero(account.holds[ids] == 0))
            account.holds[ids] += 1

    def drop(self, tenant: str, ids: np.ndarray) -> None:
        """Count one hold less on each block (no repeats)."""
        if self.enabled and len(ids):
            account = self.of(tenant)
            account.holds[ids] -= 1
            account.held_blocks -= int(np.count_nonzero(account.holds[ids] == 0))

    def count_cached(self, tenant: str, change: int) -> None:
        """Count evictable blocks that a tenant held last."""
        self.of(tenant).cached_blocks += change

    def newly_held(self, tenant: str, ids: np.ndarray) -> int:
        """Return how many of the blocks the tenant does not hold yet."""
        return int(np.count_nonzero(self.of(tenant).holds[ids] == 0)) if self.enabled else 0

    def protected_from(self, tenant: str | None) -> int:
        """Return the cached blocks that must stay when this tenant takes blocks; None: any."""
        if not self.enabled:
            return 0
        return sum(a.protected_blocks for a in self._accounts.values() if a.name != tenant)

    def promisable(self, tenant: str) -> int:
        """Return the most blocks that can be promised to a request of a tenant, its limit aside."""
        others = sum(a.certain_blocks for a in self._accounts.values() if a.name != tenant)
        return self._num_blocks - others - self.of(tenant).guaranteed_blocks

    def most_for_one(self, tenant: str) -> int:
        """Return the most blocks that a single request of a tenant can ever be sure of."""
        others = sum(
            a.terms.reservation_blocks for a in self._accounts.values() if a.name != tenant
        )
        limit = self.of(tenant).terms.limit_blocks
        most = self._num_blocks - others
        return most if limit is None else min(most, limit)

    def room(self, tenant: str) -> int:
        """Return how many more blocks a tenant may claim; the pool's size without a limit."""
        account = self.of(tenant)
        if account.terms.limit_blocks is None:
            return self._num_blocks
        return account.terms.limit_blocks - account.claimed_blocks

    def is_due(self, tenant: str, num_blocks: int) -> bool:
        """Whether so many more blocks lie within a tenant's reservation."""
        account = self.of(tenant)
        return account.claimed_blocks + num_blocks <= account.terms.reservation_blocks
