"""Tenancy: how much of the pool each tenant is guaranteed, and how much it may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from paxkv.errors import ConfigError
from paxkv.policies.tenants_file import Amount, Entry, read_entries

UNNAMED = "default"  # its terms are those of every tenant that the file does not name


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantTerms:
    """What a tenant is entitled to.

    A tenant pays once for a block, however many of its requests hold it; a block that two tenants
    hold is paid by both. Cached blocks that nobody holds are paid by nobody.

    Attributes:
        reservation_blocks: Blocks that are there whenever it claims them.
        limit_blocks: Most blocks it may hold; None for no limit.
        weight: Its share of service under `schedule.policy=vtc`, relative to the others'.
        priority: Of all its requests, lower is more urgent; None leaves each request its own.
        salt: Whether its prefix cache is its own: it finds no other tenant's blocks, and no other
            tenant finds its.
    """

    reservation_blocks: int = 0
    limit_blocks: int | None = None
    weight: float = 1.0
    priority: int | None = None
    salt: bool = False


@dataclass(frozen=True, kw_only=True)
class TenantTable:
    """The terms of every tenant, for a pool of a certain size.

    Attributes:
        named: By name, those that the file names.
        unnamed: Of each tenant that is not named.
        accounts: Whether anybody's blocks are counted; False where there are no terms to keep.
    """

    named: Mapping[str, TenantTerms] = field(default_factory=dict)
    unnamed: TenantTerms = TenantTerms()
    accounts: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tenants that have terms of their own, in the order of the file."""
        return tuple(self.named)

    def terms(self, name: str) -> TenantTerms:
        """Return the terms of a tenant, named or not."""
        return self.named.get(name, self.unnamed)


NO_TENANTS = TenantTable()


class TenancyPolicy(Protocol):
    """Says what each tenant is entitled to; the scheduler keeps to it.

    Attributes:
        lends: Whether what a tenant has reserved and does not use goes to others meanwhile.
    """

    lends: ClassVar[bool]

    def problems(self) -> list[str]:
        """Return what is wrong whatever the size of the pool."""
        ...

    def resolve(self, num_blocks: int) -> TenantTable:
        """Return the terms for a pool of `num_blocks`.

        Raises:
            ConfigError: Terms that cannot be kept: all problems, each with what to change.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NoTenants:
    """Treat all requests alike, whoever asks.

    Source: vLLM and sglang, which know no tenants.

    Assumes: one user, or users who trust each other.
    Cost: none.
    """

    lends: ClassVar[bool] = False

    def problems(self) -> list[str]:
        """Return nothing."""
        return []

    def resolve(self, num_blocks: int) -> TenantTable:
        """Return a table without terms."""
        del num_blocks
        return NO_TENANTS


@dataclass(frozen=True, kw_only=True)
class TenantsFile:
    """Give tenants the terms of a file: a guaranteed part of the pool, a limit, slack between.

    The file is YAML, a mapping of names to terms, each of which may be left out:

        chat:  {reservation: 30%, limit: 60%, weight: 2.0, priority: 0, salt: true}
        batch: {limit: 512}
        default: {limit: 25%}

    `reservation` and `limit` are blocks or a share of the pool, rounded down; a limit of `null` is
    none. What a tenant has reserved and does not hold is lent, and taken back when claimed. The
    terms under `default` hold for each tenant that is not named; without them such a tenant has no
    reservation and no limit, weight 1, the priority of its requests, and no salt. Named tenants
    take nothing from `default`.

    A tenant pays once for a block, however many of its requests hold it; a block that two tenants
    hold is paid by both, which a salt rules out.

    Source: ours. Guarantee, limit and lending are those of cluster schedulers, such as the minimum
    and maximum share of YARN's queues; here for blocks of the KV cache.

    Assumes: reservations are sized for the load they are to protect. A reservation is of blocks:
    rows and the token budget of a step are shared, a contiguous allocator may have the blocks but
    not side by side, and under `schedule=static` a claim waits for the batch to end.
    Cost: O(blocks that change hands) a step.

    Attributes:
        path: The file.
    """

    path: str

    lends: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """Return what is wrong with the file: missing, not YAML, unknown keys, wrong values."""
        return self._named(read_entries(self.path)[0])

    def resolve(self, num_blocks: int) -> TenantTable:
        """Return the terms of the file for a pool of `num_blocks`.

        Raises:
            ConfigError: Everything that is wrong with the file, and reservations that are more
                than the pool holds, or than the tenant's limit.
        """
        problems, entries = read_entries(self.path)
        terms = {name: _terms(entry, num_blocks) for name, entry in entries.items()}
        for name, entry in entries.items():
            problems += [
                f"tenant {name!r}: {problem}"
                for problem in _terms_problems(name, entry, terms[name], num_blocks)
            ]
        problems += _sum_problems(entries, terms, num_blocks)
        if problems:
            raise ConfigError(self._named(problems))
        unnamed = terms.pop(UNNAMED, TenantTerms())
        return TenantTable(named=terms, unnamed=unnamed, accounts=True)

    def _named(self, problems: list[str]) -> list[str]:
        return [f"tenants.path={self.path}: {problem}" for problem in problems]


def _terms(entry: Entry, num_blocks: int) -> TenantTerms:
    return TenantTerms(
        reservation_blocks=_in_blocks(entry.reservation, num_blocks),
        limit_blocks=None if entry.limit is None else _in_blocks(entry.limit, num_blocks),
        weight=entry.weight,
        priority=entry.priority,
        salt=entry.salt,
    )


def _in_blocks(amount: Amount, num_blocks: int) -> int:
    """Return an amount in blocks; a share is rounded down, so that shares never exceed the pool."""
    return amount.blocks if amount.share is None else int(amount.share * num_blocks)


def _terms_problems(name: str, entry: Entry, terms: TenantTerms, num_blocks: int) -> list[str]:
    """Return what is wrong with one tenant's terms in a pool of this size."""
    reserved, limit = terms.reservation_blocks, terms.limit_blocks
    if name == UNNAMED and reserved > 0:
        return [
            f"reservation={entry.reservation}: these are the terms of each tenant that is not "
            "named, and there may be any number of them. Try reservation: 0, and name those who "
            "need one."
        ]
    if limit == 0:
        return [
            f"limit={entry.limit}: of {num_blocks} blocks that is not one, so no request of it "
            "could run. Try limit: null."
        ]
    if limit is not None and reserved > limit:
        return [
            f"reservation={entry.reservation}: of {num_blocks} blocks that is {reserved}, more "
            f"than its limit={entry.limit}, which is {limit}. Try reservation: {limit}, or "
            "limit: null."
        ]
    return []


def _sum_problems(
    entries: Mapping[str, Entry], terms: Mapping[str, TenantTerms], num_blocks: int
) -> list[str]:
    """Return a problem if the pool cannot hold all reservations at once."""
    reserved = {
        name: amount
        for name, term in terms.items()
        if name != UNNAMED and (amount := term.reservation_blocks) > 0
    }
    total = sum(reserved.values())
    if total <= num_blocks:
        return []
    each = ", ".join(f"{name} {amount}" for name, amount in reserved.items())
    fix = f"Try reservations of at most {num_blocks} blocks in all"
    if all(entries[name].reservation.share is None for name in reserved):
        fix += f", or cache.num_blocks={total}"
    return [f"reservations add up to {total} blocks ({each}); the pool has {num_blocks}. {fix}."]
