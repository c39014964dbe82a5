import math
import pickle

import pytest

from paxkv.errors import ConfigError
from paxkv.policies.tenancy import NO_TENANTS, NoTenants, TenantsFile, TenantTerms


@pytest.fixture
def tenants(tmp_path):
    """Make the policy of a file with this text."""

    def make(text) -> TenantsFile:
        path = tmp_path / "tenants.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return TenantsFile(path=str(path))

    return make


def test_without_tenants_all_are_alike():
    assert NoTenants().resolve(100) is NO_TENANTS
    assert NoTenants().problems() == []
    assert NO_TENANTS.terms("anyone") == TenantTerms()
    assert NO_TENANTS.names == ()
    assert not NO_TENANTS.accounts


def test_terms_of_a_file(tenants):
    table = tenants(
        """
        chat: {reservation: 30%, limit: 60%, weight: 2.5, priority: 0, salt: true}
        batch: {reservation: 7, limit: 50}
        guest:
        default: {limit: 12.5%, weight: 1, priority: null}
        """
    ).resolve(99)
    assert table.accounts
    assert table.names == ("chat", "batch", "guest")
    assert table.terms("chat") == TenantTerms(
        reservation_blocks=29, limit_blocks=59, weight=2.5, priority=0, salt=True
    )  # shares are rounded down
    assert table.terms("batch") == TenantTerms(reservation_blocks=7, limit_blocks=50)
    assert table.terms("guest") == TenantTerms()  # named tenants take nothing from `default`
    assert table.terms("default") == TenantTerms(limit_blocks=12)


def test_a_tenant_that_is_not_named_has_stated_terms(tenants):
    """LMCache#3137: no quota must not mean a quota of nothing."""
    assert tenants("chat: {limit: 10}").resolve(100).terms("stranger") == TenantTerms()
    table = tenants("default: {limit: 10, salt: true}").resolve(100)
    assert table.terms("stranger") == TenantTerms(limit_blocks=10, salt=True)


def test_shares_are_exact(tenants):
    # In floats 0.29 * 100 and 0.57 * 100 fall short of a whole number.
    table = tenants("a: {reservation: 29%}\nb: {reservation: 57 %}\nc: {reservation: 14.0%}")
    terms = table.resolve(100)
    assert [terms.terms(name).reservation_blocks for name in "abc"] == [29, 57, 14]


def test_reservations_may_fill_the_pool(tenants):
    table = tenants("a: {reservation: 60}\nb: {reservation: 40%}").resolve(100)
    assert table.terms("a").reservation_blocks + table.terms("b").reservation_blocks == 100


def test_a_reservation_may_be_all_of_the_limit(tenants):
    terms = tenants("a: {reservation: 30, limit: 30%}").resolve(100).terms("a")
    assert (terms.reservation_blocks, terms.limit_blocks) == (30, 30)


def test_a_table_pickles(tenants):
    table = tenants("chat: {reservation: 30%}").resolve(100)
    assert pickle.loads(pickle.dumps(table)) == table


VALUES = [
    ("reservation", value, r"a whole number of blocks, 0 or more.*Try reservation: 30%")
    for value in ("-1", "1.5", ".nan", ".inf", "true", "null", "101%", "-5%", "nan%", "lots", "[]")
]
VALUES += [
    ("limit", value, r"a whole number of blocks, 1 or more.*Try limit: 60%")
    for value in ("0", "0%", "-1", "1.5", ".nan", "-.inf", "false", "100.1%", "1e3", "{}")
]
VALUES += [
    ("weight", value, r"a finite number above 0\. Try weight: 1\.0")
    for value in ("0", "-1.0", ".nan", ".inf", "true", "null", "heavy")
]
VALUES += [
    ("priority", value, r"a whole number, or null.*Try priority: 0")
    for value in ("1.5", "true", "high", ".inf")
]
VALUES += [("salt", value, r"true or false\. Try salt: true") for value in ("1", "null", "pepper")]


@pytest.mark.parametrize(("key", "value", "rule"), VALUES)
def test_values_that_mean_nothing_are_refused(tenants, key, value, rule):
    policy = tenants(f"a: {{{key}: {value}}}")
    (problem,) = policy.problems()
    with pytest.raises(
        ConfigError, match=rf"^tenants\.path=.*: tenant 'a': {key}=.*: must be {rule}\.$"
    ) as error:
        policy.resolve(100)
    assert error.value.problems == (problem,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"none in it.*Try tenants=none"),
        ("# only a comment", r"none in it"),
        ("[a, b]", r"must map tenants to their terms"),
        ("a: {limit: 5", r"not YAML: line 1: .*Try a line such as"),
        ("a: {limit: 5}\nb: {limit: 5}\na: {limit: 6}", r"not YAML: line 3: a is given twice"),
        ("a: {limit: 5, limit: 6}", r"line 1: limit is given twice"),
        (b"a: \xff\xfe", r"not YAML: "),
        ("when: 2026-99-99", r"not YAML: "),
        ("1: {limit: 5}", r"tenant 1: a name is text\. Try '1' in quotes"),
        ("yes: {limit: 5}", r"tenant True: a name is text"),
        ("a: 5", r"tenant 'a': must map reservation, limit.* Try a: \{limit: 60%\}"),
        ("a: {reserve: 5}", r"'a': reserve: there is no such term.*Did you mean reservation\?"),
        ("a: {colour: 5}", r"'a': colour: there is no such term.*priority, salt\.$"),
        ("a: {1: 5}", r"'a': 1: there is no such term"),
    ],
)
def test_files_that_say_nothing_clear_are_refused(tenants, text, message):
    policy = tenants(text)
    (problem,) = policy.problems()
    assert problem.startswith(f"tenants.path={policy.path}: ")
    with pytest.raises(ConfigError, match=message):
        policy.resolve(100)


def test_a_missing_file_is_found_without_a_pool(tmp_path):
    policy = TenantsFile(path=str(tmp_path / "none.yaml"))
    (problem,) = policy.problems()
    assert "No such file" in problem
    assert "Try tenants.path=FILE.yaml" in problem
    assert TenantsFile(path=str(tmp_path)).problems()  # a folder


@pytest.mark.parametrize(
    ("text", "num_blocks", "message"),
    [
        (
            "a: {reservation: 80}\nb: {reservation: 50}",
            100,
            r"add up to 130 blocks \(a 80, b 50\); the pool has 100\. Try reservations of at most "
            r"100 blocks in all, or cache\.num_blocks=130\.$",
        ),
        (
            "a: {reservation: 80%}\nb: {reservation: 50}",
            100,
            r"add up to 130 blocks \(a 80, b 50\).*at most 100 blocks in all\.$",
        ),
        (
            "a: {reservation: 40, limit: 30%}",
            100,
            r"'a': reservation=40: of 100 blocks that is 40, more than its limit=30%, which is 30\."
            r" Try reservation: 30, or limit: null",
        ),
        ("a: {limit: 1.5%}", 50, r"'a': limit=1\.5%: of 50 blocks that is not one.*limit: null"),
        ("default: {reservation: 5%}", 100, r"'default': reservation=5%: .*any number of them"),
    ],
)
def test_terms_that_a_pool_cannot_keep_are_refused(tenants, text, num_blocks, message):
    policy = tenants(text)
    assert policy.problems() == []  # nothing is wrong whatever the pool
    with pytest.raises(ConfigError, match=message) as error:
        policy.resolve(num_blocks)
    assert len(error.value.problems) == 1


def test_all_problems_are_told_at_once(tenants):
    policy = tenants(
        """
        a: {reservation: -5, weights: 2}
        b: {weight: .nan}
        c: {reservation: 150}
        """
    )
    with pytest.raises(ConfigError) as error:
        policy.resolve(100)
    subjects = [
        problem.removeprefix(f"tenants.path={policy.path}: ") for problem in error.value.problems
    ]
    assert [subject.split(":")[0] for subject in subjects[:3]] == [
        "tenant 'a'",
        "tenant 'a'",
        "tenant 'b'",
    ]
    assert subjects[3].startswith("reservations add up to 150 blocks (c 150)")
    assert len(subjects) == 4


def test_weights_are_numbers_whatever_they_are_written_as(tenants):
    table = tenants("a: {weight: 2}\nb: {weight: 0.25}").resolve(100)
    assert table.terms("a").weight == 2.0
    assert table.terms("b").weight == 0.25
    assert all(math.isfinite(table.terms(name).weight) for name in table.names)
